"""Every snippet of the documentation runs; links lead somewhere; the published schema is real."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from test_chinese import MIRRORS

from quant_gru.parameters.schema import params_json_schema
from sweeps import first_of

ROOT = Path(__file__).parents[2]
CHINESE = [ROOT / "README.zh-CN.md", *sorted((ROOT / "docs" / "zh").glob("*.md"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *CHINESE]
# The code of a page that mirrors another whole one is that of the other: see test_chinese.py.
RUN = [page for page in PAGES if "#" in MIRRORS.get(str(page.relative_to(ROOT)), "#")]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]

FENCE = re.compile(r"^(?:<!-- (?P<skip>no-run) -->\n)?```python\n(?P<code>.*?)^```$", re.M | re.S)

# After each of its blocks, the tutorial shows what the block prints.
PRINTED = re.compile(
    r"^```python\n(?P<code>.*?)^```\n+(?P<trained><!-- trained -->\n)?```text\n(?P<text>.*?)^```$",
    re.M | re.S,
)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def snippets(page):
    """(first line, code) of every snippet that runs."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        if not found["skip"]:
            yield text.count("\n", 0, found.start("code")), found["code"]


@pytest.mark.parametrize("page", first_of(RUN, 2), ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_run(page, tmp_path, monkeypatch):
    """From an empty namespace and folder, as for a reader who pastes a page from its top."""
    if page.name == "tutorial.md" and shutil.which("cc") is None:
        pytest.skip("needs a C compiler, cc")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    text = page.read_text(encoding="utf-8")
    shown = {found["code"]: found for found in PRINTED.finditer(text)}
    namespace = {"__name__": "snippets"}
    try:
        for line, code in snippets(page):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                # Blank lines in front, so that a failure names the line of the page.
                exec(compile("\n" * line + code, str(page), "exec"), namespace)
            if page.name == "tutorial.md":
                assert_printed(shown[code], out.getvalue())
    finally:
        torch.set_num_threads(threads)


def assert_printed(found, printed):
    """A block prints what the page shows below it.

    Training in float differs between processors. Numbers after it may differ by 4 or by 2 %.
    """
    words = [NUMBER.sub("0", text).split() for text in (found["text"], printed)]
    assert words[0] == words[1]
    if not found["trained"]:
        assert found["text"].split() == printed.split()
    for page, here in zip(
        *(NUMBER.findall(text) for text in (found["text"], printed)), strict=True
    ):
        expected = float(page.replace(",", ""))
        assert abs(float(here.replace(",", "")) - expected) <= max(4, 0.02 * expected)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_snippet_is_overlooked(page):
    text = page.read_text(encoding="utf-8")
    assert len(FENCE.findall(text)) == len(re.findall(r"^\s*```(?:py|python)\b", text, re.M))


def anchors(page):
    """What GitHub makes of the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert file.is_relative_to(ROOT), f"{page.name} links out of the repository: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}"


def test_published_schema_is_the_real_one():
    published = ROOT / "docs" / "schemas" / "quant_params.schema.json"
    assert (
        published.read_text(encoding="utf-8") == json.dumps(params_json_schema(), indent=2) + "\n"
    )
