"""Runs the notebooks, whose sources are the .py files beside this one, and writes them as .ipynb.

    python docs/notebooks/build.py [NAME ..]

Sources have cells in the percent format: `# %%` begins a cell of code, `# %% [markdown]` one of
text. A cell shows what it prints, and its last expression, as Jupyter does.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("[0-9]_*.py"))
MARK = re.compile(r"^# %%(?P<text> \[markdown\])?\n", re.M)


def cells(name: str) -> Iterator[tuple[str, str]]:
    """Yield the kind, 'markdown' or 'code', and the text of each cell of a notebook."""
    _, *parts = MARK.split((HERE / f"{name}.py").read_text(encoding="utf-8"))
    for text, body in zip(parts[::2], parts[1::2], strict=True):
        if text:
            yield "markdown", re.sub(r"^# ?", "", body.strip(), flags=re.M)
        else:
            yield "code", body.strip()


def run(code: str, namespace: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Run a cell, and return its outputs as a notebook has them."""
    tree = ast.parse(code, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value, printed = None, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, where, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), where, "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = lines(printed.getvalue())
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        data = {"text/plain": lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            data = {"text/html": lines(value._repr_html_()), **data}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return outputs


def lines(text: str) -> list[str]:
    """Return the lines of a text as notebooks store them."""
    return text.rstrip("\n").splitlines(keepends=True)


def executed(name: str) -> dict[str, Any]:
    """Run a notebook from an empty namespace, and return it with its outputs."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    found: list[dict[str, Any]] = []
    count = 0
    for number, (kind, text) in enumerate(cells(name)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": lines(text)}
        if kind == "code":
            count += 1
            outputs = run(text, namespace, f"{name}.py, cell {count}")
            cell |= {"execution_count": count, "outputs": outputs}
        found.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": found, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def main() -> None:
    """Write the notebooks that are named, or all."""
    for name in sys.argv[1:] or NAMES:
        text = json.dumps(executed(name), indent=1, ensure_ascii=False, sort_keys=True)
        (HERE / f"{name}.ipynb").write_text(text + "\n", encoding="utf-8")
        print(f"{name}.ipynb: {len(text) // 1000} KB")


if __name__ == "__main__":
    main()
