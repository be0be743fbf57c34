"""What `quantize_onnx` reports: codes, decibels, bytes and times."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quant_gru.analysis.sqnr import as_json, decibels, energies, text_of
from quant_gru.interchange.onnx.verify import Difference


@dataclass(frozen=True)
class NodeReport:
    """One GRU node.

    Attributes:
        codes: 'output' and 'h_n', as far as something reads them -> how the codes of the file
            differ from those of the plan.
        sqnr: Signal over noise of its output in dB, against float, on the float file's inputs.
        kind: Sizes, as text.
    """

    codes: dict[str, Difference]
    sqnr: float
    kind: str


@dataclass(frozen=True)
class OnnxReport:
    """What was gained, and what it costs; `print` it.

    Attributes:
        nodes: Name of a GRU node -> its report.
        outputs: Name of an output of the file -> its signal over noise in dB against the float
            file; inf if both are equal, nan if both are zero.
        bytes: Of the float file, and of the file in integers.
        seconds: Of a run of both in ONNX Runtime, on one thread: the shortest.
        feeds: Number of feeds that were compared.
        kept: Name of a GRU node that stays float -> why.
        notes: What else to know.
    """

    nodes: dict[str, NodeReport]
    outputs: dict[str, float]
    bytes: tuple[int, int]
    seconds: tuple[float, ...]
    feeds: int
    kept: dict[str, str]
    notes: list[str]

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.nodes, *self.outputs, *self.kept, "GRU node"))
        kind = max(len(each.kind) for each in self.nodes.values())
        lines = [f"{'GRU node':{width}}  {'':{kind}}  {'dB':>6}  codes"]
        for name, node in self.nodes.items():
            lines.append(
                f"{name:{width}}  {node.kind:{kind}}  {text_of(node.sqnr):>6}  {_codes(node)}"
            )
        lines += [f"{name:{width}}  stays float: {why}" for name, why in self.kept.items()]
        lines += ["", f"{'output':{width}}  {'':{kind}}  {'dB':>6}"]
        lines += [
            f"{name:{width}}  {'':{kind}}  {text_of(value):>6}"
            for name, value in self.outputs.items()
        ]
        (before, after), (slow, fast) = self.bytes, self.seconds
        lines += [
            "",
            f"file: {before:,} bytes in float, {after:,} in integers ({after / before:.2f})",
            f"a run: {1000 * slow:.3g} ms in float, {1000 * fast:.3g} ms in integers "
            f"({fast / slow:.2f}); one thread of ONNX Runtime",
            f"compared on {self.feeds} feed{'s' * (self.feeds != 1)}",
            *self.notes,
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return all figures as JSON; decibels that are not finite are text."""
        document = {
            "nodes": {
                name: {
                    "kind": node.kind,
                    "sqnr_db": as_json(node.sqnr),
                    "codes": {key: vars(each) for key, each in node.codes.items()},
                }
                for name, node in self.nodes.items()
            },
            "outputs": {name: as_json(value) for name, value in self.outputs.items()},
            "bytes": {"float": self.bytes[0], "integer": self.bytes[1]},
            "seconds": {"float": self.seconds[0], "integer": self.seconds[1]},
            "feeds": self.feeds,
            "kept": self.kept,
            "notes": self.notes,
        }
        return json.dumps(document, indent=2)


def decibels_of(real: Sequence[Any], quantized: Sequence[Any]) -> float:
    """Return the signal over noise of arrays in dB, over all of them."""
    signal = noise = 0.0
    for a, b in zip(real, quantized, strict=True):
        if np.shape(a) != np.shape(b):
            return -math.inf
        pair = (torch.from_numpy(np.array(v, np.float64)) for v in (a, b))
        own, other = energies(*pair)
        signal, noise = signal + own, noise + other
    return decibels(signal, noise)


def _codes(node: NodeReport) -> str:
    total = sum(each.values for each in node.codes.values())
    differing = sum(each.differing for each in node.codes.values())
    return f"{differing} of {total} differ" if differing else "equal"
