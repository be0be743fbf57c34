"""Links and paths in the documentation lead somewhere."""

import re
import runpy
from pathlib import Path

import pytest

import quant_gru

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("src/**/README.md")),
]
SOURCES = ROOT / "src" / "quant_gru"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_of_files(page):
    """Paths in backticks with a folder and a suffix of sources, from a root that readers know."""
    text = page.read_text(encoding="utf-8")
    suffixes = "py|cu|cuh|cpp|hpp|inl|h"
    for path in re.findall(rf"`((?:[\w.]+/)+[\w.]+\.(?:{suffixes}))`", text):
        roots = (
            ROOT,
            ROOT / "src",
            SOURCES,
            SOURCES / "kernels",
            SOURCES / "kernels/cuda",
            page.parent,
        )
        assert any((root / path).exists() for root in roots), path


PICTURES = ["accuracy_bits", "call", "cell", "speed", "targets"]


@pytest.fixture(params=PICTURES)
def picture(request, monkeypatch):
    """What the script of a picture makes."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "images"))
    return request.param, runpy.run_path(str(ROOT / "docs" / "images" / f"{request.param}.py"))


def test_pictures_are_what_their_scripts_make(picture):
    name, made = picture
    drawn = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
    assert made["picture"]() == drawn, f"python docs/images/{name}.py"


def test_pictures_can_be_read_on_light_and_dark_pages():
    for path in (ROOT / "docs" / "images").glob("*.svg"):
        drawn = path.read_text(encoding="utf-8")
        assert not re.findall(r"#(?:fff|ffffff|000|000000)\b", drawn), path.name
        own = re.search(r"<text[^>]*fill=", drawn)  # a colour for both
        assert own or "prefers-color-scheme: dark" in drawn, path.name


def test_pictures_of_pixels_have_a_dark_twin():
    folder = ROOT / "docs" / "images"
    for path in folder.glob("*.png"):
        assert (folder / f"{path.stem.removesuffix('_dark')}_dark.png").exists(), path.name
    hooks = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))
    page = (ROOT / "docs" / "analysis.md").read_text(encoding="utf-8")
    assert len(hooks["PICTURE"].findall(page)) == page.count("<picture>") > 0


def test_names_in_the_picture_of_targets_are_public():
    text = (ROOT / "docs" / "images" / "targets.svg").read_text(encoding="utf-8")
    for call in re.findall(r">(?:QuantGRU\.)?((?:export|from|trace|convert|calibrate)_\w+)", text):
        assert hasattr(quant_gru, call) or hasattr(quant_gru.QuantGRU, call), call


def test_places_in_the_picture_of_a_call_exist():
    made = runpy.run_path(str(ROOT / "docs" / "images" / "call.py"))
    for *_, places, _ in made["BOXES"].values():
        for place in places.removeprefix("torch.nn.GRU, ").split(", "):
            path = SOURCES / place
            assert path.exists() or path.with_suffix(".cpp").exists(), place
