"""Benchmarks of actnn, each with --help.

    python benchmarks/actnn.py speed        # memory and time on a GPU, beside what PyTorch offers
    python benchmarks/actnn.py accuracy     # training with equal schedules
    python benchmarks/actnn.py costs        # errors of gradients of published models
    python benchmarks/actnn.py codec        # bandwidth of encoding and decoding
    python benchmarks/actnn.py hooks        # time of hooks on the host
    python benchmarks/actnn.py pareto       # the picture of what `speed` wrote

Each is a module with a function `main` in benchmarks/actnn_parts.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.append(sys.path.pop(0))  # this file does not hide the package actnn


def main() -> None:
    parts = sorted(path.stem for path in (Path(__file__).parent / "actnn_parts").glob("[!_]*.py"))
    if len(sys.argv) < 2 or sys.argv[1] not in parts:
        print(__doc__)
        asked = sys.argv[1] if len(sys.argv) > 1 else "none"
        if asked not in ("-h", "--help"):
            raise SystemExit(f"Expected one of {', '.join(parts)}, got {asked}")
        return
    name = sys.argv.pop(1)
    sys.argv[0] += f" {name}"  # in the texts of --help
    importlib.import_module(f"actnn_parts.{name}").main()


if __name__ == "__main__":
    main()
