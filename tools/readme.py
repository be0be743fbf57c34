"""README.md as the package's description, for scikit-build-core.

Pages outside of the repository cannot follow the README's relative links. They become absolute if
`[project.urls]` has a `Repository`; otherwise the text of links stays, and pictures are left out.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLACE = r"\((?!https?:|#)([^)]+)\)"
PICTURE = re.compile(rf"!\[([^][]*)\]{PLACE}\n*")
LINK = re.compile(rf"(?<!!)\[([^][]+)\]{PLACE}")


def dynamic_metadata(
    field: str, settings: Mapping[str, Any], project: Mapping[str, Any]
) -> dict[str, str]:
    """Return the README with links that hold everywhere."""
    repository = project["urls"].get("Repository") if "urls" in project else None
    picture = rf"![\1]({repository}/raw/main/\2)\n\n" if repository else ""
    link = rf"[\1]({repository}/blob/main/\2)" if repository else r"\1"
    text = PICTURE.sub(picture, (ROOT / "README.md").read_text(encoding="utf-8"))
    return {"content-type": "text/markdown", "text": LINK.sub(link, text)}
