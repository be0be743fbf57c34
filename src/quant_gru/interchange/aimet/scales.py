"""Encodings of quantization parameters, and quantization parameters of encodings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quant_gru.config import QuantConfig
from quant_gru.errors import QuantGRUError
from quant_gru.integer.plan import CellPlan, update_first
from quant_gru.integer.qparams import QParams, float32, weight_scales
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.weights import groups_of
from quant_gru.interchange.aimet.entries import Entry
from quant_gru.interchange.aimet.places import Place
from quant_gru.interchange.row_scales import ROWS, row_scales
from quant_gru.parameters.checks import check_pinned, check_scale

Cells = Sequence[Sequence[QParams]]
Weights = Sequence[Sequence[Mapping[str, Tensor]]]


def entries_of(
    places: Sequence[Place], cells: Cells, weights: Weights
) -> tuple[list[Entry], list[str]]:
    """Return the encodings of tensors, and the reasons why others have none.

    Args:
        places: The tensors.
        cells: [layer][direction] -> quantization parameters.
        weights: [layer][direction] -> weight operator -> float values, rows in PyTorch's order.

    Returns:
        One entry per tensor, and one line per tensor that the format has no place for.
    """
    found: dict[str, Entry] = {}
    left_out: dict[str, str] = {}
    for place in places:
        parts = [
            _entry(place, cells[place.layer][d], weights[place.layer][d]) for d in place.directions
        ]
        if any(part != parts[0] for part in parts):
            left_out[place.name] = "its directions have different scales"
        elif isinstance(parts[0], str):
            left_out[place.name] = parts[0]
        elif found.setdefault(place.name, parts[0]) != parts[0]:
            left_out[place.name] = "its uses have different scales"
    kept = [entry for name, entry in found.items() if name not in left_out]
    return kept, [f"{name}: {reason}" for name, reason in left_out.items()]


def _entry(place: Place, qparams: QParams, weights: Mapping[str, Tensor]) -> Entry | str:
    """Return the encoding of one direction, or why there is none."""
    first = place.operators[0]
    if not place.is_param:
        q = qparams.quantizers[first]
        if q.is_outside:
            return f"its zero point {q.zero_point} is no code (input_excludes_zero)"
        return Entry(place.name, q.bits, q.signed, (q.scale,), (q.zero_point,), None, False)
    widths = [qparams.config[name].bitwidth for name in place.operators]
    if len(set(widths)) != 1:
        return f"its parts have widths {', '.join(map(str, widths))}"
    assert widths[0] is not None
    lists = [weight_scales(qparams, name, weights[name]).cpu() for name in place.operators]
    if all(len(each) == 1 and torch.equal(each, lists[0]) for each in lists):
        scales = lists[0]
    else:
        rows = weights[first].shape[0]
        # a scale per gate is the same scale for each of its rows
        lists = [each.repeat_interleave(rows // len(each)) for each in lists]
        if place.update_first:
            lists = [update_first(each) for each in lists]
        scales = torch.cat(lists)
    axis = None if len(scales) == 1 else place.axis
    points = (0,) * len(scales)
    return Entry(place.name, widths[0], True, tuple(scales.tolist()), points, axis, True)


def with_plan_scales(qparams: QParams, plan: CellPlan) -> QParams:
    """Return parameters with the scales of W and R that the multipliers of a plan contain."""
    pinned = dict(qparams.pinned)
    for name in ROWS:
        rows = update_first(row_scales(plan, name))  # its own inverse
        groups = groups_of(qparams.config[name].granularity or "channel", len(rows))
        pinned.setdefault(name, tuple(rows[:: len(rows) // groups].tolist()))
    return replace(qparams, pinned=pinned)


def with_entry(
    qparams: QParams, place: Place, entry: Entry, weights: Mapping[str, Tensor]
) -> QParams:
    """Return parameters of one direction with the scales of one encoding.

    Scales of weights are fixed then, unless they are those that the weights have anyway.

    Raises:
        QuantGRUError: The encoding does not fit.
    """
    if not place.is_param:
        if entry.is_param:
            raise QuantGRUError("Expected the encoding of an activation, got that of a parameter")
        return _with_activation(qparams, place.operators[0], entry)
    H = weights["weight.R"].shape[1]
    rows = 3 * H * len(place.operators)
    if len(entry.scales) not in (1, rows):
        raise QuantGRUError(f"Expected 1 or {rows} scales, got {len(entry.scales)}")
    if entry.axis not in (None, place.axis) and len(entry.scales) > 1:
        raise QuantGRUError(f"Expected axis to be {place.axis}, got {entry.axis}")
    middle = 0 if entry.signed else 1 << (entry.bits - 1)
    if any(point != middle for point in entry.zero_points):
        raise QuantGRUError(
            "Expected a symmetric encoding, because weights and biases are symmetric, got an "
            f"offset of {next(p for p in entry.zero_points if p != middle) - middle} codes"
        )
    for index, name in enumerate(place.operators):
        part = entry.scales
        if len(part) > 1:
            part = part[3 * H * index : 3 * H * (index + 1)]
            if place.update_first:  # exchanging the first two gates is its own inverse
                part = (*part[H : 2 * H], *part[:H], *part[2 * H :])
        scales = tuple(map(float32, part))
        qparams = _with_weight(qparams, name, entry.bits, scales, weights[name], H)
    return qparams


def _with_activation(qparams: QParams, name: str, entry: Entry) -> QParams:
    if len(entry.scales) != 1:
        raise QuantGRUError(
            f"Expected one scale, because activations have one, got {len(entry.scales)}"
        )
    before = qparams.config[name]
    # the same grid of real values, in signed or unsigned codes
    from_lowest = entry.zero_points[0] - entry.lowest
    lowest = {True: 0, False: -(1 << (entry.bits - 1))}
    points = {unsigned: from_lowest + lowest[unsigned] for unsigned in (False, True)}
    unsigned = before.is_unsigned
    if before.is_symmetric and points[unsigned] != 0 and points[not unsigned] == 0:
        unsigned = not unsigned
    point = points[unsigned]
    config = qparams.config.replace(
        name,
        bitwidth=entry.bits,
        is_unsigned=unsigned,
        is_symmetric=before.is_symmetric and point == 0,
    )
    quantizer = Quantizer(entry.bits, not unsigned, float32(entry.scales[0]), point)
    check_scale(quantizer, config, name)
    quantizers = {**qparams.quantizers, name: quantizer}
    return _made(qparams, config, quantizers, qparams.pinned)


def _with_weight(
    qparams: QParams, name: str, bits: int, scales: tuple[float, ...], w: Tensor, H: int
) -> QParams:
    granularity = qparams.config[name].granularity or "channel"
    gates = [set(scales[H * gate : H * (gate + 1)]) for gate in range(3)]
    if len(set(scales)) == 1 and (len(scales) == 1 or granularity == "tensor"):
        granularity, scales = "tensor", scales[:1]
    elif granularity == "gate" and all(len(gate) == 1 for gate in gates):
        scales = scales[::H]
    else:
        granularity = "channel"
    config = qparams.config.replace(name, bitwidth=bits, granularity=granularity)
    rest = {key: value for key, value in qparams.pinned.items() if key != name}
    found = _made(qparams, config, qparams.quantizers, rest)
    if name not in qparams.pinned and tuple(weight_scales(found, name, w).tolist()) == scales:
        return found
    pinned = {**rest, name: check_pinned(list(scales), config, name, H)}
    return _made(qparams, config, qparams.quantizers, pinned)


def _made(
    qparams: QParams,
    config: QuantConfig,
    quantizers: Mapping[str, Quantizer],
    pinned: Mapping[str, tuple[float, ...]],
) -> QParams:
    return qparams.remade(config, quantizers, pinned, qparams.tables)
