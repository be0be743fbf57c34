"""Files that belong together are all old or all new, whatever interrupts their writer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from limits import MIB, memory

from quant_gru import ConfigError
from quant_gru.config import file_sets
from quant_gru.config.file_sets import NOTE
from quant_gru.config.files import read_bytes, write_files, write_text

NAMES = ("gru.c", "gru.h", "new.txt")

# Writes three files, the last of them new, and is killed where a function is called the n-th time.
KILLED = """
import os, signal, sys
from quant_gru.config.files import write_files

folder, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
plain = getattr(os, name)

def counted(*arguments, **options):
    global count
    count -= 1
    if count == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*arguments, **options)

setattr(os, name, counted)
write_files({os.path.join(folder, each): "new " + each for each in ("gru.c", "gru.h", "new.txt")})
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES[:2]:
        (tmp_path / name).write_text(f"old {name}")
    (tmp_path / NAMES[0]).chmod(0o640)
    return tmp_path


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


OLD = {name: f"old {name}" for name in NAMES[:2]}
NEW = {name: f"new {name}" for name in NAMES}


@pytest.mark.skipif(os.name == "nt", reason="needs signals of POSIX")
@pytest.mark.parametrize(
    ("function", "count", "expected"),
    [
        ("link", 2, OLD),  # while old files are kept
        ("replace", 1, OLD),
        ("replace", 2, OLD),  # between two files
        ("replace", 3, OLD),
        ("close", 100, NEW),
    ],
)
def test_a_killed_writer(function, count, expected, folder):
    found = subprocess.run([sys.executable, "-c", KILLED, str(folder), function, str(count)])
    assert found.returncode == (0 if expected is NEW else -signal.SIGKILL)
    if count == 2 and function == "replace":
        assert (folder / "gru.c").read_text() == "new gru.c"
    assert read_bytes(folder / "gru.c").decode() == expected["gru.c"]
    assert contents(folder) == expected
    assert {name: (folder / name).read_text() for name in expected} == expected
    assert (folder / "gru.c").stat().st_mode & 0o777 == 0o640
    write_files({folder / name: f"new {name}" for name in NAMES})
    assert {name: (folder / name).read_text() for name in NAMES} == NEW


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_replacement_that_fails(error, count, folder, monkeypatch):
    replace, left = os.replace, iter(range(1, 9))

    def fail(*arguments):
        if next(left) == count:
            raise error
        replace(*arguments)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises((ConfigError, KeyboardInterrupt)):
        write_files({folder / name: f"new {name}" for name in NAMES})
    assert contents(folder) == OLD


def test_a_file_system_without_links(folder, monkeypatch):
    def no_link(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)
    test_a_replacement_that_fails(OSError(28, "No space left"), 2, folder, monkeypatch)


def test_two_names_of_one_file(folder):
    (folder / "link.h").symlink_to(folder / "gru.h")
    with pytest.raises(ConfigError, match=r"named once, got .*gru\.h' and .*link\.h', which are"):
        write_files({folder / "gru.h": "a", folder / "link.h": "b"})
    assert contents(folder) == {**OLD, "link.h": "old gru.h"}


def test_several_folders(folder, monkeypatch):
    other = folder / "other"
    other.mkdir()
    (folder / "link.h").symlink_to(other / "gru.h")
    write_files({folder / "link.h": "new", folder / "gru.c": "new"})
    assert (other / "gru.h").read_text() == (folder / "gru.c").read_text() == "new"
    assert {path.name for path in folder.iterdir()} == {"gru.c", "gru.h", "link.h", "other"}


def test_a_file_written_after_the_killed_writer_stays(folder):
    """What the user or another program has replaced meanwhile is not put back."""
    subprocess.run([sys.executable, "-c", KILLED, str(folder), "replace", "2"])
    (folder / "gru.c").unlink()
    (folder / "gru.c").write_text("mine")
    write_text(folder / "gru.h", "mine, too")
    assert contents(folder) == {"gru.c": "mine", "gru.h": "mine, too"}


# --- notes that nobody of us wrote

HEX = "0" * 32


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{}",
        [["gru.c", f".{HEX}.tmp", f".{HEX}.old", 0]],
        [["../outside", f".{HEX}.tmp", f".{HEX}.old", "IDENTITY"]],
        [["gru.c", "gru.h", "gru.h", "IDENTITY"]],
        [["gru.c", f".{HEX}.tmp", "../outside", "IDENTITY"]],
        [["..", f".{HEX}.tmp", None, "IDENTITY"]],
        [["gru.c", f".{HEX}.tmp", f".{HEX}.old", "1 2 3"]],
    ],
)
def test_notes_of_others_change_nothing(note, folder):
    outside = folder / "outside"
    outside.write_text("outside")
    inside = folder / "inside"
    inside.mkdir()
    for name, text in OLD.items():
        (inside / name).write_text(text)
    if isinstance(note, list):
        note = json.dumps(note).replace("IDENTITY", file_sets._identity(outside)).encode()
    (inside / NOTE).write_bytes(note)
    assert read_bytes(inside / "gru.c") == b"old gru.c"
    assert contents(inside) == OLD
    assert outside.read_text() == "outside"


@pytest.mark.skipif(os.name == "nt", reason="needs files of POSIX")
@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "terabyte"])
def test_notes_that_are_no_files(kind, folder):
    note = folder / NOTE
    if kind == "pipe":
        os.mkfifo(note)
    elif kind == "link":
        note.symlink_to(folder / "gru.h")
    elif kind == "folder":
        note.mkdir()
    else:
        with note.open("wb") as file:
            file.truncate(1 << 40)
    with memory(16 * MIB, seconds=5):
        if kind == "terabyte":
            assert read_bytes(folder / "gru.c") == b"old gru.c"
        else:
            with pytest.raises(ConfigError, match=NOTE):
                read_bytes(folder / "gru.c")
    assert (folder / "gru.h").read_text() == "old gru.h"


@pytest.mark.skipif(os.name == "nt", reason="needs users of POSIX")
def test_notes_of_other_users_are_not_followed(folder, monkeypatch):
    """Whoever can write a folder such as /tmp could have this user's files replaced."""
    planted = folder / f".{HEX}.old"
    planted.write_text("planted")
    identity = file_sets._identity(folder / "gru.c")
    (folder / NOTE).write_text(json.dumps([["gru.c", f".{HEX}.tmp", planted.name, identity]]))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert read_bytes(folder / "gru.c") == b"old gru.c"
    with pytest.raises(ConfigError, match="which is no file of this user"):
        write_files({folder / name: f"new {name}" for name in NAMES})
    write_text(folder / "gru.h", "alone")
    assert (folder / "gru.c").read_text() == "old gru.c"


def test_a_note_that_another_process_holds(folder, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(file_sets, "_LONGEST_WAIT", 0.05)
    with (folder / NOTE).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="which another process holds"):
            read_bytes(folder / "gru.c")
    assert read_bytes(folder / "gru.c") == b"old gru.c"


def test_without_locks(folder, monkeypatch):
    monkeypatch.setattr(file_sets, "fcntl", None)
    write_files({folder / name: f"new {name}" for name in NAMES})
    assert contents(folder) == NEW
