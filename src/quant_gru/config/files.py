"""JSON files of this library: strict, in UTF-8, and written atomically."""

import contextlib
import json
import logging
import math
import os
import stat
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quant_gru.config.file_sets import replace_all, settle
from quant_gru.errors import ConfigError

_logger = logging.getLogger(__name__)


def read_json(path: str | os.PathLike[str], if_missing: str = "") -> Any:
    """Return the contents of a JSON file.

    Args:
        path: The file.
        if_missing: A hint for the error if there is no such file.

    Raises:
        ConfigError: The file cannot be read, is not UTF-8 or JSON, or has a duplicate key.
    """
    return parse_json(read_bytes(path, if_missing), f"(file {name_of(path)!r})")


def read_bytes(path: str | os.PathLike[str], if_missing: str = "") -> bytes:
    """Return the contents of a file.

    Args:
        path: The file.
        if_missing: A hint for the error if there is no such file.

    Raises:
        ConfigError: The file cannot be read.
    """
    with _errors_of_reading(path, if_missing):
        settle(Path(path).parent)
        raw = Path(path).read_bytes()
    _logger.debug("read %d bytes (file %r)", len(raw), name_of(path))
    return raw


def expect_readable(path: str | os.PathLike[str]) -> None:
    """Raise for a file that cannot be read, before more is imported to read it.

    Raises:
        ConfigError: The file cannot be read.
    """
    with _errors_of_reading(path), Path(path).open("rb"):
        pass


@contextlib.contextmanager
def _errors_of_reading(path: str | os.PathLike[str], if_missing: str = "") -> Iterator[None]:
    where = f"(file {name_of(path)!r})"
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"Expected a file to exist, got none {where}{if_missing}") from None
    except IsADirectoryError:
        raise ConfigError(f"Expected a file, got a directory {where}") from None
    except OSError as error:
        raise ConfigError(f"Expected a readable file, got {error.strerror} {where}") from error


def name_of(path: Any) -> str:
    """Return the name of a file, for opening it and for messages.

    Raises:
        ConfigError: `path` is not a file path.
    """
    if isinstance(path, str | os.PathLike):
        name = os.fspath(path)
        if isinstance(name, str) and "\0" not in name:
            return name
    raise ConfigError(f"Expected the path of a file, got {path!r}")


def parse_json(raw: bytes, where: str) -> Any:
    """Return the value of JSON text in UTF-8.

    Args:
        raw: The text.
        where: The source in brackets, for error messages.

    Raises:
        ConfigError: The text is not UTF-8 or JSON, has a duplicate key, or a number that is not
            finite.
    """
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"Expected UTF-8 text, got byte 0x{raw[error.start]:02x} at {error.start} {where}"
        ) from None
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"Expected JSON, got an error at line {error.lineno}, column {error.colno}: "
            f"{error.msg} {where}{_comment_hint(text, error.pos)}"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{error} {where}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"Expected JSON of moderate size, got: {error} {where}") from None


def _comment_hint(text: str, position: int) -> str:
    """Return what to do about a comment at an error, if there is one."""
    if not text[position:].lstrip(" \t\r\n,").startswith(("//", "/*", "#")):
        return ""
    return (
        '; JSON has no comments: a configuration has "comment" entries in their place, see the '
        "file that quant-gru config --write FILE makes"
    )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"Expected every key to be named once, got {key!r} twice")
        found[key] = value
    return found


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_constant(text)


def _no_constant(text: str) -> float:
    raise ConfigError(f"Expected JSON numbers to be finite, got {text:.40}")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, as `write_files` does.

    Raises:
        ConfigError: The file cannot be written, or the text cannot be encoded in UTF-8.
    """
    write_files({path: text})


def write_bytes(path: str | os.PathLike[str], raw: bytes) -> None:
    """Write a file, as `write_files` does.

    Raises:
        ConfigError: The file cannot be written.
    """
    write_files({path: raw})


def write_files(contents: Mapping[str | os.PathLike[str], str | bytes]) -> None:
    """Write files so that on failure the previous contents of all remain.

    All contents are on the disk before the first file is replaced. If the process is killed while
    files are replaced, the next read or write of this library there puts the old ones back.
    Existing files keep their permissions. Pipes and devices are written directly. Text is in UTF-8.

    Raises:
        ConfigError: A file cannot be written or is named twice, or a text cannot be encoded in
            UTF-8.
    """
    drafts: dict[Path, Path] = {}
    names: dict[Path, str] = {}
    name = ""
    try:
        for path, content in contents.items():
            name = name_of(path)
            raw = content if isinstance(content, bytes) else _encoded(content, name)
            target = Path(os.path.realpath(name))
            mode = None
            with contextlib.suppress(FileNotFoundError):
                mode = os.stat(name).st_mode
            if mode is not None and not stat.S_ISREG(mode):
                Path(name).write_bytes(raw)
                continue
            if target in names:
                raise ConfigError(
                    f"Expected every file to be named once, got {names[target]!r} and {name!r}, "
                    "which are one file"
                )
            names[target] = name
            drafts[target] = draft = target.with_name(f".{uuid.uuid4().hex}.tmp")
            _write_draft(draft, raw, mode)
        replace_all(drafts)
        _logger.debug("wrote %s", ", ".join(map(repr, names.values())))
    except OSError as error:
        where = error.filename2 or name
        folder = os.path.dirname(name)
        if isinstance(error, FileNotFoundError) and folder and not os.path.exists(folder):
            raise ConfigError(
                f"Expected a file in a folder that exists, got folder {folder!r}, which does not "
                f"(file {name!r})"
            ) from None
        raise ConfigError(
            f"Expected a writable file, got {error.strerror or error} (file '{where}')"
        ) from error
    finally:
        for draft in drafts.values():
            with contextlib.suppress(OSError):
                draft.unlink()


def _write_draft(draft: Path, raw: bytes, mode: int | None) -> None:
    with open(draft, "xb") as stream:
        if mode is not None:
            draft.chmod(stat.S_IMODE(mode))
        stream.write(raw)
        stream.flush()
        os.fsync(stream.fileno())


def _encoded(text: str, name: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"Expected text that UTF-8 can hold, got {text[error.start]!r} (file {name!r})"
        ) from None
