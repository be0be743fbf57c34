"""The tarball of a release serves a machine without a compiler for C++; the reference is whole."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from cpp_build import CMAKE, NEEDS_TOOLS, ROOT, run

EXAMPLE, MODEL = ROOT / "cpp/examples/run_model.c", ROOT / "cpp/tests/gru.safetensors"
NEEDS_DOXYGEN = pytest.mark.skipif(shutil.which("doxygen") is None, reason="needs doxygen")


@NEEDS_TOOLS
def test_the_tarball(build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpack = Path(str(CMAKE)).with_name("cpack")
    run(cpack, "--config", build / "CPackConfig.cmake", "-B", tmp_path / "made")
    (tarball,) = (tmp_path / "made").glob("*.tar.gz")
    assert re.fullmatch(r"quant_gru-[\d.]+-Linux-\w+\.tar\.gz", tarball.name)
    with tarfile.open(tarball) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path, filter="data")
    for ending in (
        "libgru_quant_static.a",
        "libgru_quant_shared.so.1",
        "libgru_quant_onnxruntime.so",
        "model.hpp",
        "LICENSE",
    ):
        assert any(name.endswith(ending) for name in names), ending
    assert not any("/tests/" in name for name in names)
    folder = tmp_path / names[0].partition("/")[0]
    config = next(folder.glob("**/quant_gru.pc")).parent
    monkeypatch.setenv("PKG_CONFIG_PATH", str(config))
    flags = run("pkg-config", "--static", "--cflags", "--libs", "quant_gru").split()
    run("gcc", "-static", EXAMPLE, *flags, "-o", tmp_path / "program")
    assert len(run(tmp_path / "program", MODEL, "3").split()) > 1


@NEEDS_TOOLS
def test_an_example_says_what_it_needs(build: Path) -> None:
    (program,) = (path for path in build.glob("**/run_model") if path.is_file())
    for arguments in ([], [MODEL, "1", "2"]):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "FILE   a frozen GRU" in done.stderr


@NEEDS_DOXYGEN
def test_the_reference_has_every_public_class_and_function(tmp_path: Path) -> None:
    text = (ROOT / "cpp/Doxyfile").read_text(encoding="utf-8")
    config = tmp_path / "Doxyfile"
    config.write_text(text + f"\nOUTPUT_DIRECTORY = {tmp_path}\nGENERATE_XML = YES\n")
    run("doxygen", config, folder=ROOT)  # a warning of doxygen is an error
    index = (tmp_path / "xml/index.xml").read_text(encoding="utf-8")
    headers = sorted((ROOT / "cpp/include/quant_gru").iterdir())
    declared = "".join(path.read_text(encoding="utf-8") for path in headers)
    classes = set(re.findall(r"^(?:class|struct) QUANT_GRU_API (\w+)", declared, re.M))
    functions = set(re.findall(r"\b(qgru_\w+)\(", declared))
    assert len(classes) > 10
    assert len(functions) > 15
    for name in classes | functions:
        assert re.search(rf"<name>(?:\w+::)*{name}(?:&lt;.*)?</name>", index), name
    model = next((tmp_path / "xml").glob("classquant__gru_1_1Model.xml")).read_text()
    assert "A loaded model. Copies share its memory." in model
    assert "selects an" in model
    shape = next((tmp_path / "xml").glob("structquant__gru_1_1Shape.xml")).read_text()
    assert "whether x is (N, T, C)" in shape
    for page in (tmp_path / "xml").glob("*quant__gru_1_1*.xml"):
        described = page.read_text(encoding="utf-8").rpartition("</sectiondef>")[2]
        if page.name.startswith(("class", "struct")) and "::State<" not in described:
            assert re.search(r"<briefdescription>\s*<para>(?!.*internal)", described), page.name
