"""The part of a QuantGRU that ONNX export reads: `export_mode`, `export_format`, plan, weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant_gru.errors import QuantGRUError
from quant_gru.integer.plan import GRUPlan
from quant_gru.interchange.onnx import recorded
from quant_gru.interchange.onnx.profiles import PROFILES
from quant_gru.interchange.onnx.scripted import is_tracing, scripted
from quant_gru.interchange.onnx.source import Source, Weights
from quant_gru.kernels.live_weights import settled
from quant_gru.modules.checkpoints import Checkpoints
from quant_gru.modules.computed_weights import compute_weights


class Exports(Checkpoints):
    """The part of a QuantGRU that ONNX export reads.

    Attributes:
        export_mode: Whether calls compute what `export_format` says, so that
            `torch.onnx.export(..., dynamo=False)` can trace them.
    """

    export_mode: bool = False
    _export_format: str = "float"

    @property
    def export_format(self) -> str:
        """What `torch.onnx.export(..., dynamo=False)` writes in `export_mode`: a profile.

        One of 'float' (the standard GRU node), 'qdq', 'integer' and 'node'; see docs/onnx.md.
        """
        return self._export_format

    @export_format.setter
    def export_format(self, profile: str) -> None:
        if profile not in PROFILES:
            raise QuantGRUError(f"Expected export_format to be one of {PROFILES}, got {profile!r}")
        self._export_format = profile

    def _plan(self) -> GRUPlan:
        raise NotImplementedError

    def _exports_float(self) -> bool:
        """Return whether a call computes the float GRU for an export."""
        return self.export_mode and self._export_format == "float"

    def _is_recorded(self) -> bool:
        """Return whether a call is traced for a file in which the GRU is one operator."""
        if recorded.exporting:
            return torch.compiler.is_compiling()
        return is_tracing() and not self._exports_float()

    def _record(
        self, input: Tensor | PackedSequence, hx: Tensor | None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Record a call as one operator."""
        packed = isinstance(input, PackedSequence) and recorded.exporting
        if is_tracing():
            sequence = self._normalize(input, hx, torch.float32)
            if sequence.packing is not None:
                raise QuantGRUError(
                    "Expected a tensor for torch.onnx.export(..., dynamo=False), got a "
                    "PackedSequence; use quant_gru.export_onnx"
                )
            y, h_n = scripted(self, self._export_format, sequence.x, sequence.h0)
            return sequence.restore(y, h_n, self._weight.dtype)
        given = input if packed else self._normalize(input, hx, torch.float32)
        return recorded.record(self, given, hx, self._shape(), self._weight.dtype)  # type: ignore[arg-type]

    def _source(self) -> Source:
        """Return the plan, if there are scales or statistics, and the weights."""
        weights: list[list[Weights]] = []
        compute_weights(self)
        for layer in self._weights():
            cells: list[Weights] = []
            for W, R, bw, br in layer:
                assert W is not None
                assert R is not None
                cells.append((W, R, bw, br))
            weights.append(cells)
        known = self._state.scales is not None or self._state.has_statistics
        with torch.no_grad():
            plan = settled(self._plan()) if known else None
        sizes = (self.input_size, self.hidden_size, self.num_layers, self._directions)
        return Source(plan, weights, *sizes, self.batch_first, self.zoneout)
