"""Caches of compiled kernels that others can write, or that were made for others."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from pathlib import Path

import pytest
from limits import MIB, memory

from quant_gru.kernel_runtime.cuda.disk_cache import DiskCache

CACHE = DiskCache("ATTACKED_CACHE", "attacked", UserWarning)
pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs permissions of POSIX")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE.variable, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def umask():
    before = os.umask(0)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(
    ("mask", "file", "of_folder"),
    [
        (0o022, 0o644, 0o755),  # root compiles, others load
        (0o002, 0o664, 0o775),
        (0o077, 0o600, 0o700),
        (0o000, 0o664, 0o775),  # what everyone could write would not be trusted
    ],
)
def test_permissions_follow_the_umask(mask, file, of_folder, folder, umask):
    umask(mask)
    CACHE.store("name", b"code")
    (entry,) = CACHE.entries()
    assert (entry.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (file, of_folder)
    assert CACHE.load("name") == b"code"


def test_a_folder_that_everyone_can_write(folder):
    CACHE.store("name", b"code")
    folder.chmod(0o1777)
    with pytest.warns(UserWarning, match=r"is not used, because others can write it.*chmod o-w"):
        assert CACHE.load("name") is None
    CACHE.store("other", b"code")  # said once
    assert [path.stem for path in CACHE.entries()] == ["name"]
    folder.chmod(0o755)
    assert CACHE.load("name") == b"code"


@pytest.mark.parametrize(
    ("owner", "user", "trusted"),
    [("root", "me", True), ("me", "me", True), ("other", "me", False), ("other", "root", False)],
)
@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="needs root, who is anyone")
def test_owners_of_the_folder(owner, user, trusted, monkeypatch):
    ids = {"root": 0, "me": 1234, "other": 4321}
    # pytest's folders are for one user only
    with tempfile.TemporaryDirectory() as around, warnings.catch_warnings(record=True) as said:
        os.chmod(around, 0o755)
        folder = Path(around, "cache")
        monkeypatch.setenv(CACHE.variable, str(folder))
        CACHE.store("name", b"code")
        os.chown(folder, ids[owner], -1)
        warnings.simplefilter("always")
        os.seteuid(ids[user])
        try:
            found = CACHE.load("name")
        finally:
            os.seteuid(0)
    assert found == (b"code" if trusted else None)
    assert ["it belongs to another user" in str(each.message) for each in said] == [True] * (
        not trusted
    )


def a_pipe(entry: Path) -> None:
    os.mkfifo(entry)


def a_folder(entry: Path) -> None:
    entry.mkdir()


def a_device(entry: Path) -> None:
    entry.symlink_to("/dev/zero")


def a_file_of_a_terabyte(entry: Path) -> None:
    with entry.open("wb") as file:
        file.truncate(1 << 40)


def a_file_that_everyone_can_write(entry: Path) -> None:
    entry.write_bytes(hashlib.sha256(b"namecode").digest() + b"code")
    entry.chmod(0o666)


ENTRIES = [a_pipe, a_folder, a_device, a_file_of_a_terabyte, a_file_that_everyone_can_write]


@pytest.mark.parametrize("make", ENTRIES)
def test_entries_that_are_not_read(make, folder):
    folder.mkdir(mode=0o755)
    make(folder / "name.cubin")
    with memory(16 * MIB, seconds=5):
        assert CACHE.load("name") is None
    if make is not a_folder:
        CACHE.store("name", b"code")
        assert CACHE.load("name") == b"code"


def test_a_relative_folder_of_caches_is_ignored(folder, monkeypatch):
    monkeypatch.delenv(CACHE.variable)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert CACHE.folder() == Path.home() / ".cache" / "attacked"
