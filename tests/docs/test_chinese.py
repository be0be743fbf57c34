"""Each Chinese page says what its English page says: the same code, figures and names."""

import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MIRRORS = {  # a page, or one section of it
    "README.zh-CN.md": "README.md",
    "docs/zh/configuration.md": "docs/configuration.md",
    "docs/zh/frozen_file.md": "docs/deployment.md#The file of a frozen GRU",
    "docs/zh/parameter_file.md": "docs/parameter_file.md",
}
ALONE = {"docs/zh/quick_start.md", "docs/zh/from_documents.md"}  # pages without an English one

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
INDENTED = re.compile(r"^\n((?: {4}.*\n)+)", re.M)
SPAN = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\([^)]*\)")
FIGURE = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\w)", re.A)
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve thirteen "
NUMBERS += "fourteen fifteen sixteen seventeen"
WORDS = {word: str(n) for n, word in enumerate(NUMBERS.split())}


def code_blocks(text):
    """The blocks of code of a page, without comments and line by line."""
    found = [f"{language}\n{code}" for language, code in FENCE.findall(text)]
    found += INDENTED.findall(FENCE.sub("", text))
    return [re.sub(r"[ \t]*(?<!\S)# .*$", "", block, flags=re.M).splitlines() for block in found]


def facts(text):
    """Figures and code spans, each as often as it is there."""
    text = LINK.sub("]", text)
    return sorted(SPAN.findall(text) + FIGURE.findall(SPAN.sub("", text)))


def cells(text):
    """The facts of each cell of each table, row by row."""
    rows = re.findall(r"^ *\|(.+)\| *$", FENCE.sub("", text), re.M)
    return [[facts(cell) for cell in re.split(r"(?<!\\)\|", row)] for row in rows]


def prose(text):
    """Title and paragraphs of each section, without code and tables."""
    text = re.sub(r"^ *\|.*$", "", INDENTED.sub("", FENCE.sub("", text)), flags=re.M)
    return [part.partition("\n")[::2] for part in re.split(r"^#+ ", text, flags=re.M)[1:]]


def pages(chinese):
    name, _, section = MIRRORS[chinese].partition("#")
    english = (ROOT / name).read_text(encoding="utf-8")
    if section:
        heading = f"## {section}\n"
        english = heading + english.split(f"\n{heading}")[1].split("\n## ")[0] + "\n"
    return [english, (ROOT / chinese).read_text(encoding="utf-8")]


def differences(chinese, ours, theirs):
    """What must change in the Chinese page for its lines to be those of the English page."""
    return "\n".join(
        difflib.unified_diff(ours, theirs, chinese, MIRRORS[chinese], n=1, lineterm="")
    )


def test_every_chinese_page_is_held_or_stands_alone():
    found = {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/zh/*.md")}
    assert found | {"README.zh-CN.md"} == MIRRORS.keys() | ALONE


@pytest.mark.parametrize("page", MIRRORS)
def test_code_is_equal(page):
    english, chinese = map(code_blocks, pages(page))
    assert len(english) > 1
    ours, theirs = ([line for block in blocks for line in block] for blocks in (chinese, english))
    assert chinese == english, differences(page, ours, theirs)


@pytest.mark.parametrize("page", MIRRORS)
def test_tables_have_the_same_figures_and_names(page):
    english, chinese = map(cells, pages(page))
    assert len(english) > 9 or page == "docs/zh/parameter_file.md"  # which has no table
    assert chinese == english, differences(page, [*map(str, chinese)], [*map(str, english)])


@pytest.mark.parametrize("page", MIRRORS)
def test_sections_have_the_same_figures_and_names(page):
    """Though not as often; figures that are words in English may be digits in Chinese."""
    english, chinese = map(prose, pages(page))
    assert len(chinese) == len(english)
    differing = []
    for (title, theirs), (_, ours) in zip(english, chinese, strict=True):
        words = {WORDS[word] for word in re.findall(r"[a-z]+", theirs.lower()) if word in WORDS}
        missing = sorted(set(facts(theirs)) - set(facts(ours)))
        extra = sorted(set(facts(ours)) - set(facts(theirs)) - words)
        if missing or extra:
            differing.append(f"{title}: {page} lacks {missing}, and has {extra} alone")
    assert not differing, "\n".join(differing)


@pytest.mark.parametrize("page", [*MIRRORS, *sorted(ALONE)])
def test_punctuation_is_chinese(page):
    """No half-width comma, colon, semicolon or question mark beside a Chinese character."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = SPAN.sub("", INDENTED.sub("", FENCE.sub("", text)))
    assert re.findall(r".{0,9}(?:[\u4e00-\u9fff][,;:?!]|[,;:?!][\u4e00-\u9fff]).{0,9}", text) == []


def test_comments_are_removed_and_nothing_else():
    page = '```python\na = 1  # one\n# two\nb = "#3"\n```\n\n    make x  # y\n'
    assert code_blocks(page) == [["python", "a = 1", "", 'b = "#3"'], ["    make x"]]


def test_facts():
    assert facts("GRU(40, 64) has `x 3` and 17 [1.5](a2.md), AVX-512, int8; 共9个。") == sorted(
        ["40", "64", "`x 3`", "17", "1.5", "512", "9"]
    )
