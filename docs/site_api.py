"""What the reference of the site leaves out of signatures."""

from __future__ import annotations

from typing import Any

import griffe


class Signatures(griffe.Extension):
    """Leave out `**_unknown`, which only gives other names an error of their own."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Change the signature of a function that was read."""
        if "_unknown" in func.parameters:
            del func.parameters["_unknown"]
