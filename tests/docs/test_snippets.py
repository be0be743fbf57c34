"""Every snippet of the documentation runs; links lead somewhere; the published schema is real."""

import json
import re
from pathlib import Path

import pytest
import torch

from quant_gru.parameters.schema import params_json_schema

ROOT = Path(__file__).parents[2]
CHINESE = [ROOT / "README.zh-CN.md", *sorted((ROOT / "docs" / "zh").glob("*.md"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *CHINESE]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]

FENCE = re.compile(r"^(?:<!-- (?P<skip>no-run) -->\n)?```python\n(?P<code>.*?)^```$", re.M | re.S)

# What a page takes for granted: the files of a run of the demo.
BEFORE = {
    "demo.md": """
from pathlib import Path

import torch
from quant_gru.demo.comparison import quantize, variants
from quant_gru.demo.data import Sequences
from quant_gru.demo.model import SequenceClassifier
from quant_gru.demo.output import OutputFolder

data = Sequences(torch.rand(16, 8, 8), torch.full((16,), 8), torch.zeros(16, dtype=torch.int64))
model = quantize(SequenceClassifier(8, 64, 10), variants()["int8"], data)
OutputFolder.prepare(Path("demo_output")).save(model)
""",
}


def snippets(page):
    """(first line, code) of every snippet that runs."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        if not found["skip"]:
            yield text.count("\n", 0, found.start("code")), found["code"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {"__name__": "snippets"}
    exec(BEFORE.get(page.name, ""), namespace)
    for line, code in snippets(page):
        # Blank lines in front, so that a failure names the line of the page.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


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
