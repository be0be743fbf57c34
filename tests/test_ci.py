"""Continuous integration: what is missing fails there, and skips elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SKIPS = """
import pytest

def test_tool():
    pytest.skip("needs a compiler that nobody has")

@pytest.mark.skipif(True, reason="needs a GPU")
def test_gpu():
    pass

@pytest.mark.parametrize("form", ["first"])
def test_form(form):
    pytest.skip("not for first")

@pytest.mark.xfail(reason="known")
def test_known():
    raise AssertionError
"""
MODULE = 'import pytest\npytest.importorskip("a_package_that_nobody_has")\n'


@pytest.mark.parametrize("ci", [True, False])
def test_only_what_needs_a_gpu_may_skip(ci, tmp_path):
    for name, text in {"test_one": SKIPS, "test_two": MODULE}.items():
        (tmp_path / f"{name}.py").write_text(text)
    environment = {key: value for key, value in os.environ.items() if key != "QUANT_GRU_CI"}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    environment |= {"QUANT_GRU_CI": "1"} if ci else {}
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", tmp_path, tmp_path]
    command += ["-p", "skips", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    expected = "1 failed, 2 skipped, 1 xfailed, 1 error" if ci else "4 skipped, 1 xfailed"
    assert f"= {expected} in " in done.stdout, done.stdout
    for reason in ("needs a compiler that nobody has (", "could not import 'a_package_that_nob"):
        assert (f"got a skip: {reason}" in done.stdout) is ci


def test_files_with_slow_tests_are_found():
    """Others are not imported where only slow tests run: see `may_be_slow` in conftest.py."""
    folder = Path(__file__).parent
    marking = {
        str(file.relative_to(folder))
        for file in folder.rglob("*.py")
        if not file.name.startswith("test_") and "mark.slow" in file.read_text(encoding="utf-8")
    }
    assert marking == {"conftest.py", "sweeps.py", "cpp/conftest.py"}
