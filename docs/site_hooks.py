"""What `make docs` adds to docs/: pages from the root, notebooks, and files that pages link to.

Pages are written for GitHub, where a link may lead to any file of the repository. On the site such
a file is a page, or it is copied to `source/`: every link leads somewhere without a network.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = ("README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md")
NOTEBOOKS = "docs/notebooks"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
# one picture of two files on GitHub; the site chooses by its own switch, see site.css
PICTURE = re.compile(
    r'<picture>\n<source [^>]*srcset="([^"]+)">\n<img alt="([^"]+)" src="([^"]+)">\n</picture>'
)
CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", re.M | re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the place of the notebooks, or leave it out where there are none."""
    for section in config.nav or []:
        for title, entries in section.items() if isinstance(section, dict) else ():
            if isinstance(entries, list) and {"Notebooks": "notebooks"} in entries:
                found = [f"notebooks/{path.stem}.md" for path in notebooks()]
                rest = [each for each in entries if each != {"Notebooks": "notebooks"}]
                section[title] = rest + [{"Notebooks": found}] * bool(found)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages from the root, notebooks, and what pages link to."""
    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for path in notebooks():
        stored = files.get_file_from_path(str(path.relative_to(ROOT / "docs")))
        if stored is not None:
            files.remove(stored)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=as_page(path)))
    for page in files.documentation_pages():
        for target in LINK.findall(CODE.sub("", page.content_string)):
            path = (folder(page) / target).resolve()
            if (
                path.is_file()
                and path.is_relative_to(ROOT)
                and not in_docs(path)
                and path.suffix != ".md"
            ):
                name = f"source/{path.relative_to(ROOT)}"
                if files.get_file_from_path(name) is None:
                    files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links that leave docs/ lead to the place of their file on the site."""
    where = folder(page.file)
    markdown = PICTURE.sub(r"![\2](\3){ .on-light } ![\2](\1){ .on-dark }", markdown)

    def placed(found: re.Match[str]) -> str:
        path = (where / found[1]).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            return found[1]  # mkdocs reports it
        if in_docs(path):
            name = str(path.relative_to(ROOT / "docs"))
        elif str(path.relative_to(ROOT)) == "README.md":
            name = "index.md"
        elif path.name in PAGES:
            name = path.name
        else:
            name = f"source/{path.relative_to(ROOT)}"
        return posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or ".")

    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [LINK.sub(placed, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(placed, markdown[end:])])


def folder(file: File) -> Path:
    """Return the folder in which links of a page begin."""
    if file.src_uri in PAGES:
        return ROOT
    return (ROOT / "docs" / file.src_uri).parent


def in_docs(path: Path) -> bool:
    """Return whether a file lies below docs/."""
    return path.is_relative_to(ROOT / "docs")


def notebooks() -> list[Path]:
    """Return all notebooks in the order of their names."""
    return sorted((ROOT / NOTEBOOKS).glob("*.ipynb"))


def as_page(path: Path) -> str:
    """Return a notebook as a page: its text, its code, and what the code printed."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += [shown(output) for output in cell.get("outputs", [])]
    return "\n\n".join(parts) + "\n"


def shown(output: dict[str, Any]) -> str:
    """Return one output of a cell: a picture or HTML if it has one, else its text."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/png" in data:
        return f"![output](data:image/png;base64,{''.join(data['image/png']).strip()})"
    for kind in ("image/svg+xml", "text/html"):
        if kind in data:
            return f"<div>{''.join(data[kind])}</div>"
    return f"```text\n{''.join(data.get('text/plain', '')).rstrip()}\n```"
