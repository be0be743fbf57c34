"""How much of a quantized model's error each operator causes, with the scales that it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quant_gru.analysis.outputs import expect_tensors, named_tensors
from quant_gru.analysis.trials import BASE, Forward, Place, base_for, with_widths
from quant_gru.calibration.batches import eval_mode, run_batch, with_progress
from quant_gru.config import OPERATORS
from quant_gru.errors import QuantGRUError
from quant_gru.integer.qparams import PRE_ACTIVATION, QParams
from quant_gru.modules.adjust import Change, adjust
from quant_gru.modules.gru import QuantGRU
from quant_gru.whole_models.observed import scales_kept


@dataclass(frozen=True)
class Shares:
    """Errors at the outputs of a model.

    Attributes:
        signal: Summed squares of the outputs of the reference.
        noise: Summed squared error of the outputs.
        noises: Operator -> the same with all other operators so wide that they cause none.
    """

    signal: float
    noise: float
    noises: dict[Place, float]

    @property
    def share(self) -> dict[Place, float]:
        """Operator -> its share of the sum, 0..1."""
        total = sum(self.noises.values()) or 1.0
        return {place: noise / total for place, noise in self.noises.items()}


def shares(
    model: torch.nn.Module,
    grus: Mapping[str, QuantGRU],
    reference: torch.nn.Module | None,
    batches: Sequence[Any],
    forward_fn: Forward | None,
    progress: bool,
) -> Shares:
    """Measure a model, and each operator alone; the model is restored.

    Args:
        model: A model.
        grus: Name -> a calibrated GRU of it.
        reference: A float model; None for `model` in float mode.
        batches: As for `run_batch`.
        forward_fn: As for `run_batch`.
        progress: Whether to show a progress bar (only on a terminal).
    """

    def outputs(of: torch.nn.Module) -> list[Tensor]:
        found = [
            tensor.double()
            for batch in batches
            for _, tensor in named_tensors(run_batch(of, batch, forward_fn))
        ]
        expect_tensors(found)
        return found

    def difference(real: Sequence[Tensor], found: Sequence[Tensor]) -> float:
        if [each.shape for each in real] != [each.shape for each in found]:
            raise QuantGRUError(
                "Expected the reference to give outputs of the model's shapes, got others"
            )
        return sum(float((a - b).square().sum()) for a, b in zip(real, found, strict=True))

    models = [model] if reference is None else [model, reference]
    with scales_kept(grus), eval_mode(*models), torch.no_grad():
        originals = {name: gru._state.scales for name, gru in grus.items()}
        for gru in grus.values():
            gru._state, gru._log2_scales = gru._state.copy(), []
            gru.use_quantization = True
        quantized = outputs(model)
        places = _places(grus)
        bases = sorted({base_for(bits) for bits in places.values()} | {BASE})
        wide = {base: {name: _wide(gru, base) for name, gru in grus.items()} for base in bases}
        for gru in grus.values():
            gru.use_quantization = False
        own = outputs(model)
        for gru in grus.values():
            gru.use_quantization = True
        least = {}
        for base in bases:
            _set(grus, wide[base])
            least[base] = difference(own, outputs(model))
        noises = {}
        for place, bits in with_progress(places.items(), "measuring", progress):
            base = base_for(bits)
            cells = {name: [list(row) for row in rows] for name, rows in wide[base].items()}
            row = cells[place.module][place.layer]
            direction = int(place.reverse)
            original = originals[place.module]
            assert original is not None
            row[direction] = _with(row[direction], original[place.layer][direction], place)
            _set(grus, cells)
            found = difference(own, outputs(model))
            noises[place] = max(found - least[base], 0.0)
        real = own if reference is None else outputs(reference)
    signal = sum(float(each.square().sum()) for each in real)
    return Shares(signal, difference(real, quantized), noises)


Cells = list[list[QParams]]


def _places(grus: Mapping[str, QuantGRU]) -> dict[Place, int]:
    """Return the width of each operator that has one."""
    return {
        Place(name, layer, direction == 1, operator): bits
        for name, gru in grus.items()
        for layer, cells in enumerate(gru._state.scales or ())
        for direction, cell in enumerate(cells)
        for operator in OPERATORS
        if (bits := cell.config[operator].bitwidth) is not None
        and (gru.bias or not operator.startswith("weight.b"))
    }


def _set(grus: Mapping[str, QuantGRU], cells: Mapping[str, Cells]) -> None:
    for name, gru in grus.items():
        gru._state.try_scales(cells[name])


def _wide(gru: QuantGRU, base: int) -> Cells:
    """Return the scales of a GRU with all narrower operators widened: their ranges stay."""
    return [
        [_widened(cell, base, gru.hidden_size) for cell in cells]
        for cells in gru._state.scales or ()
    ]


def _widened(cell: QParams, base: int, hidden_size: int) -> QParams:
    for name in OPERATORS:
        bits = cell.config[name].bitwidth
        if bits is not None and bits < base:
            cell = adjust(cell, name, Change(bitwidth=base), hidden_size)
    return cell


def _with(wide: QParams, original: QParams, place: Place) -> QParams:
    """Return the wide scales with one operator as it was."""
    name = place.operator
    bits = original.config[name].bitwidth
    assert bits is not None
    config = with_widths(wide.config, {name: bits})
    quantizers, pinned = dict(wide.quantizers), dict(wide.pinned)
    if name in quantizers:
        quantizers[name] = original.quantizers[name]
    if name in original.pinned:
        pinned[name] = original.pinned[name]
    tables = {
        out: table for out, table in wide.tables.items() if name not in (out, PRE_ACTIVATION[out])
    }
    return wide.remade(config, quantizers, pinned, tables)
