"""What installs and checks the package: descriptions, tools, targets of make."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools"


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, cwd=ROOT, check=False
    )


@pytest.mark.parametrize("address", ["https://example.org/quant-gru", None])
def test_links_of_the_description_hold_everywhere(address: str | None) -> None:
    """Where the repository has an address they are absolute, otherwise their text stays."""
    from readme import dynamic_metadata

    project = {"urls": {"Repository": address}} if address else {}
    text = dynamic_metadata("readme", {}, project)["text"]
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert all(link.startswith(("https://", "#")) for link in links)
    linked = f"[installing]({address}/blob/main/docs/install.md)"
    assert (linked in text) is (address is not None)
    assert "installing" in text
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert all(picture.startswith(f"{address}/raw/main/docs/") for picture in pictures)
    assert bool(pictures) is (address is not None)
    assert "```python\nimport torch\n" in text  # code stays


def test_a_release_has_the_address_of_its_repository(tmp_path: Path) -> None:
    tomllib = pytest.importorskip("tomllib")  # of CPython 3.11
    workflow = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    commands = re.findall(r"run: (printf .*)", workflow)
    assert len(commands) == 2
    for command in commands:
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        server = {"GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "us/quant-gru"}
        subprocess.run(["sh", "-c", command], cwd=tmp_path, env=server, check=True)
        project = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))
        assert project["project"]["urls"] == {"Repository": "https://example.org/us/quant-gru"}


def test_actnn_needs_no_kernels_of_the_gru() -> None:
    """As in a build with QUANT_GRU_PARTS=actnn."""
    code = """
import sys
sys.modules["quant_gru.kernels._native"] = None
import actnn, torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
actnn.compress(model, bits=4)
model(torch.randn(512, 64)).square().mean().backward()
assert model[0].weight.grad.abs().max() > 0
try:
    from quant_gru import QuantGRU
except ImportError as error:
    print(error)
"""
    done = run(sys.executable, "-c", code)
    assert "unless QUANT_GRU_PARTS=actnn" in done.stdout, done.stderr


def test_check_names_a_missing_package() -> None:
    done = run(sys.executable, "-S", TOOLS / "check.py")
    assert (done.returncode, done.stdout) == (
        1,
        "Expected quant_gru to be installed, got no such module\n",
    )


def test_check_runs_files_that_exist() -> None:
    import check

    assert [each for each in check.TESTS if not (ROOT / "tests" / each).is_file()] == []


def test_wheels_name_a_missing_python(tmp_path: Path) -> None:
    import wheels

    with pytest.raises(SystemExit, match=r"Expected python3\.99 to be on the PATH or in pyenv"):
        wheels.interpreter("3.99")
    found = wheels.interpreter(".".join(map(str, sys.version_info[:2])))
    assert run(found, "--version").returncode == 0
    defines = wheels.compilers("aarch64", tmp_path)
    assert "-target aarch64-linux-gnu.2.17" in Path(defines["CMAKE_CXX_COMPILER"]).read_text()


def test_parts_that_do_not_exist_are_an_error(tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    pytest.importorskip("nanobind")
    command = ["cmake", "-S", ROOT, "-B", tmp_path, "-DQUANT_GRU_PYTHON=ON"]
    command += ["-DQUANT_GRU_PARTS=codec", f"-DPython_EXECUTABLE={sys.executable}"]
    import nanobind

    done = run(*command, f"-Dnanobind_DIR={nanobind.cmake_dir()}")
    assert done.returncode
    assert "Expected QUANT_GRU_PARTS to be all or actnn, got codec" in done.stderr


def test_help_names_every_target() -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    text = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", text, re.M)
    assert targets
    named = set(re.findall(r"make ([a-z-]+)", run("make", "help").stdout))
    assert named >= {*targets[1].split()} - {"help"}
