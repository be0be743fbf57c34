"""Replaces several files so that all of them are old or all are new, whatever interrupts it.

No file system replaces two files in one step. So the old ones are kept until the last is replaced,
and a note beside them says how to put them back: at once after an error, and if the process was
killed, by the next read or write of this library in that folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from quant_gru.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows: a note is read without waiting for its writer
    fcntl = None  # type: ignore[assignment]

NOTE = ".quant-gru-unfinished"

_LONGEST_WAIT = 10.0  # seconds for another process to replace its files
_KEPT = re.compile(r"\.[0-9a-f]{32}\.(tmp|old)")
_MOST_BYTES = 1 << 20

# A target, the draft that replaces it, the name that keeps its old contents, and which file the
# draft is.
Entry = tuple[str, str, str | None, str]


def replace_all(drafts: Mapping[Path, Path]) -> None:
    """Give each draft the name of its target; on an error all old files remain.

    Args:
        drafts: Target -> a complete file in the same folder, named as a hidden hexadecimal number.

    Raises:
        OSError: A file cannot be replaced.
    """
    with ExitStack() as stack:
        for folder in sorted({target.parent for target in drafts}):
            own = {target: each for target, each in drafts.items() if target.parent == folder}
            # one file is replaced in one step, after what was left unfinished is put back
            stack.enter_context(_noted(folder, own if len(drafts) > 1 else {}))
        for target, draft in drafts.items():
            os.replace(draft, target)


def settle(folder: Path) -> None:
    """Put back the files of a write that was killed, if there was one; wait for one that runs.

    Raises:
        ConfigError: They cannot be put back.
    """
    if _is_noted(folder):
        try:
            with _noted(folder, {}):
                pass
        except OSError as error:
            raise ConfigError(
                "Expected files of one write, got those of one that was killed, which cannot be "
                f"put back: {error.strerror or error} (file '{folder / NOTE}')"
            ) from error


@contextmanager
def _noted(folder: Path, drafts: Mapping[Path, Path]) -> Iterator[None]:
    """Run a block that replaces files of a folder, and put the old ones back if it fails."""
    if not drafts and not _is_noted(folder):
        yield
        return
    note = _locked(folder / NOTE)
    try:
        _put_back(folder, _entries(note))
        entries = [_entry(target, draft) for target, draft in drafts.items()]
        try:
            os.ftruncate(note, 0)
            os.pwrite(note, json.dumps(entries).encode(), 0)
            os.fsync(note)
            for target, _, old, _ in entries:
                if old is not None:
                    _keep(folder / target, folder / old)
            yield
        except BaseException:
            _put_back(folder, entries)
            (folder / NOTE).unlink()
            raise
        (folder / NOTE).unlink()  # from here on the new files hold
        _put_back(folder, [(target, draft, old, "") for target, draft, old, _ in entries])
    finally:
        os.close(note)


def _is_noted(folder: Path) -> bool:
    """Return whether there is a note of this user. Those of others are not followed."""
    try:
        found = os.lstat(folder / NOTE)
    except OSError:
        return False
    return _is_own(found)


def _is_own(found: os.stat_result) -> bool:
    return os.name == "nt" or found.st_uid == os.geteuid()


def _locked(path: Path) -> int:
    """Open a note, and wait until no other process has it."""
    start = time.monotonic()
    while True:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        note = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o600)
        try:
            found = os.fstat(note)
            if not stat.S_ISREG(found.st_mode) or not _is_own(found):
                raise OSError(f"{path.name!r}, which is no file of this user")
            if _has_lock(note):
                with contextlib.suppress(FileNotFoundError):
                    if os.stat(path).st_ino == found.st_ino:
                        return note  # it was not removed meanwhile
            elif time.monotonic() - start > _LONGEST_WAIT:
                raise OSError(f"{path.name!r}, which another process holds")
            else:
                time.sleep(0.01)
        except BaseException:
            os.close(note)
            raise
        os.close(note)


def _has_lock(note: int) -> bool:
    """Try to lock a note for this process."""
    if fcntl is not None:
        try:
            fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _entries(note: int) -> list[Entry]:
    """Return what a note says; nothing if it says anything but what `_noted` writes."""
    with contextlib.suppress(ValueError, RecursionError):
        found: Any = json.loads(os.pread(note, _MOST_BYTES, 0) or b"[]")
        if isinstance(found, list) and all(_is_entry(each) for each in found):
            return [tuple(each) for each in found]
    return []


def _is_entry(entry: Any) -> bool:
    match entry:
        case [str(target), str(draft), str() | None as old, str()]:
            kept = all(each is None or _KEPT.fullmatch(each) for each in (draft, old))
            return kept and target == os.path.basename(target) and "\0" not in target
    return False


def _entry(target: Path, draft: Path) -> Entry:
    old = draft.with_suffix(".old").name if target.exists() else None
    return target.name, draft.name, old, _identity(draft)


def _identity(path: Path) -> str:
    """Return what a file keeps under another name, and what no other file has."""
    found = path.stat()
    return f"{found.st_ino} {found.st_mtime_ns} {found.st_size}"


def _keep(target: Path, old: Path) -> None:
    try:
        os.link(target, old)
    except OSError:  # a file system without links
        shutil.copy2(target, old)


def _put_back(folder: Path, entries: list[Entry]) -> None:
    """Undo the replacements that were made, and remove what they leave."""
    for target, draft, old, identity in entries:
        with contextlib.suppress(FileNotFoundError):
            if _identity(folder / target) == identity:
                if old is None:
                    (folder / target).unlink()
                else:
                    os.replace(folder / old, folder / target)
        for each in (draft, old):
            if each is not None:
                (folder / each).unlink(missing_ok=True)
