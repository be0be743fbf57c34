"""The shared library exports its interfaces and nothing else, and can be unloaded."""

from __future__ import annotations

import _ctypes
import ctypes
import re
import shutil
from pathlib import Path

import pytest
from cpp_build import NEEDS_TOOLS, ROOT, run

INCLUDE = ROOT / "cpp/include/quant_gru"
pytestmark = [NEEDS_TOOLS, pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")]


def exported(
    build: Path, *options: str, library: str = "libgru_quant_shared.so"
) -> list[tuple[str, str]]:
    """Type and name of every symbol."""
    lines = run("nm", "-D", "--defined-only", *options, build / library)
    return [tuple(line.split(maxsplit=2)[1:]) for line in lines.splitlines()]  # type: ignore[misc]


def test_the_c_interface_is_that_of_the_header(build: Path) -> None:
    declared = re.findall(
        r"^QUANT_GRU_API [^(]*?(qgru_\w+)\(", (INCLUDE / "quant_gru.h").read_text(), re.M
    )
    assert len(declared) > 10
    found = [name for _, name in exported(build) if not name.startswith("_Z")]
    assert sorted(found) == sorted(declared)


def test_the_rest_is_the_documented_cpp_interface(build: Path) -> None:
    """Every name is in a public header; no template of the standard library is exported."""
    headers = "".join(path.read_text() for path in INCLUDE.glob("*.hpp"))
    symbols = [(kind, name) for kind, name in exported(build, "-C") if "qgru_" not in name]
    assert len(symbols) > 100
    for kind, name in symbols:
        assert kind != "u", name  # STB_GNU_UNIQUE keeps a library from being unloaded
        plain = re.sub(
            r"^(typeinfo for|typeinfo name for|vtable for|[^(]* (?=quant_gru::)) ?", "", name
        )
        assert plain.startswith("quant_gru::"), name
        assert "::State" not in plain.partition("(")[0], name
        first = re.match(r"quant_gru::(?:cuda::)?(\w+)", plain)
        assert first is not None, name
        assert re.search(rf"\b{first[1]}\b", headers), name


def test_the_operator_of_onnx_runtime_is_one_function(build: Path) -> None:
    assert exported(build, library="libgru_quant_onnxruntime.so") == [("T", "RegisterCustomOps")]


def test_it_can_be_unloaded(build: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(build / "libgru_quant_shared.so", tmp_path / "unloaded.so"))
    library = ctypes.CDLL(str(copy))
    assert library.qgru_version()
    assert copy.name in Path("/proc/self/maps").read_text()
    _ctypes.dlclose(library._handle)
    assert copy.name not in Path("/proc/self/maps").read_text()
