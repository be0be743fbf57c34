"""Pages are the same on GitHub and on the site that `make docs` builds."""

import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
ELEMENTS = ("li", "ul", "ol", "table", "tr", "td", "pre", "code", "h1", "h2", "h3", "strong", "img")


def counts(html):
    return {each: len(re.findall(rf"<{each}[ />]", html)) for each in ELEMENTS}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_both_see_the_same_elements(page):
    """A list without a blank line before it, or a table in a list, may be text on one of them."""
    markdown = pytest.importorskip("markdown")
    pytest.importorskip("pymdownx")
    text = re.sub(r"\A---\n.*?\n---\n", "", page.read_text(encoding="utf-8"), flags=re.S)
    plain = {"pymdownx.highlight": {"use_pygments": False}}
    extensions = ["tables", "attr_list", "md_in_html", "pymdownx.superfences", "pymdownx.highlight"]
    site = markdown.markdown(text, extensions=extensions, extension_configs=plain)
    assert counts(site) == counts(MarkdownIt("commonmark").enable("table").render(text))


def test_every_public_name_is_on_a_page_of_the_api():
    import actnn
    import quant_gru

    for package in (quant_gru, actnn):
        page = (ROOT / "docs" / "api" / f"{package.__name__}.md").read_text(encoding="utf-8")
        named = re.findall(rf"^::: {package.__name__}\.(\w+)$", page, re.M)
        assert sorted(named) == sorted(set(package.__all__) - {"__version__"})


def test_every_page_is_in_the_navigation():
    """mkdocs reports it also, but only where it is installed."""
    named = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in ROOT.glob("docs/**/*.md"):
        assert str(page.relative_to(ROOT / "docs")) in named, page
