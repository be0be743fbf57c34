"""Caches of compiled kernels that others can write, or that were made for others."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
from limits import MIB, memory

from quant_gru.kernel_runtime.cuda import disk_cache
from quant_gru.kernel_runtime.cuda.disk_cache import DiskCache

CACHE = DiskCache("ATTACKED_CACHE", "attacked", UserWarning)
pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs permissions of POSIX")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE.variable, str(tmp_path / "cache"))
    monkeypatch.setattr(disk_cache, "_distrusted", set())
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
def test_owners_of_the_folder(owner, user, trusted, folder, monkeypatch):
    CACHE.store("name", b"code")
    ids = {"root": 0, "me": 1234, "other": 4321}
    stat = Path.stat

    def owned(path, **options):
        found = list(stat(path, **options))
        found[4] = ids[owner]
        return os.stat_result(found)

    monkeypatch.setattr(Path, "stat", owned)
    monkeypatch.setattr(os, "geteuid", lambda: ids[user])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert CACHE.load("name") == (b"code" if trusted else None)
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
    entry.write_bytes(disk_cache._digest("name", b"code") + b"code")
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
