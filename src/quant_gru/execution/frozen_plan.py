"""The plan of a frozen GRU, built from its integer buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from quant_gru.errors import ParameterError
from quant_gru.execution.plan_cache import CallKeeper, Stamp
from quant_gru.integer.plan import (
    CellPlan,
    FrozenPart,
    GRUPlan,
    WeightPart,
    bias_limit,
    build_frozen,
    matmul_sum,
    stack,
)
from quant_gru.integer.qparams import QParams
from quant_gru.integer.quantizer import CONTAINERS, code_limits
from quant_gru.integer.weighted_sum import significant_bits
from quant_gru.kernel_runtime.cuda.graph_capture import capturing
from quant_gru.kernels.cuda.machine import COLD, refuse_in_capture
from quant_gru.parameters.document import is_plain
from quant_gru.parameters.schema import Shape

BUFFERS = ("W", "R", "Bw", "Br", "Mx", "kx", "Mh", "kh")


def key_of(name: str, layer: int, direction: int) -> str:
    """The name of a buffer, as state_dicts have it."""
    return f"{name}_l{layer}{'_reverse' if direction else ''}"


def check_integers(
    found: Mapping[str, object],
    shape: Shape,
    qparams: QParams,
    layer: int,
    direction: int,
    values: bool = True,
) -> None:
    """Check the integers of one cell before kernels read them.

    Args:
        found: Name of `BUFFERS` -> tensor.
        shape: The GRU it belongs to.
        qparams: The quantizers of the cell.
        layer: Which layer.
        direction: Which direction.
        values: Whether to check values, too. On a GPU this synchronizes.

    Raises:
        ParameterError: A tensor is missing or does not fit.
    """
    H, D = shape.hidden_size, shape.directions
    columns = {"W": (shape.input_size if layer == 0 else D * H,), "R": (H,)}
    for name in BUFFERS:
        key, tensor = key_of(name, layer, direction), found.get(name)
        size = (3 * H, *columns.get(name, ()))
        if not _holds_integers(tensor) or tensor.shape != size:
            raise ParameterError(
                f"Expected integers of shape {size} at key {key!r}, got {_kind_of(tensor)}"
            )
        if not values:
            continue
        lo, hi = _limits(name, qparams)
        least, most = int(tensor.min()), int(tensor.max())
        if not lo <= least <= most <= hi:
            raise ParameterError(
                f"Expected integers in [{lo}, {hi}] at key {key!r}, got {least}..{most}"
            )


def _limits(name: str, qparams: QParams) -> tuple[int, int]:
    """Return the value range of a buffer that satisfies every bound of the plan."""
    weight, operand = (
        ("weight.W", "input.x") if name in ("W", "Bw", "Mx", "kx") else ("weight.R", "output.h")
    )
    bits, width = qparams.config[weight].bitwidth or 1, qparams.quantizers[operand].bits
    if name in ("W", "R"):
        return code_limits(bits, signed=True)
    if name in ("Bw", "Br"):
        limit = bias_limit(bits, width)
        return -limit, limit
    if name in ("Mx", "Mh"):
        p = significant_bits(bits + width)
        return 1 << (p - 1), (1 << p) - 1
    return -600, 600


def _holds_integers(value: object) -> TypeGuard[Tensor]:
    return is_plain(value) and value.dtype in CONTAINERS


def _kind_of(value: object) -> str:
    if value is None:
        return "none"
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{value.dtype} {tuple(value.shape)} ({value.layout}, device {value.device.type})"


class FrozenPlans(CallKeeper):
    """Builds plans from buffers, and caches the plan of each cell while its buffers are unchanged.

    Args:
        qparams: [layer][direction] -> quantizers and tables.
        shape: The GRU they belong to.
    """

    def __init__(self, qparams: Sequence[Sequence[QParams]], shape: Shape) -> None:
        super().__init__()
        self.qparams, self.shape = qparams, shape
        self._frozen: dict[tuple[torch.device, int, int], FrozenPart] = {}
        self._cells: dict[tuple[int, int], tuple[list[Stamp], CellPlan]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_frozen": {},
            "_cells": {},
            "_captured": [],
            "prepared": None,
            "in_graphs": None,
        }

    def forget_settled(self) -> None:
        """Forget the plans of the integers."""
        self.drop_prepared()
        self._cells.clear()

    def plan(
        self,
        buffers: Sequence[Tensor],
        live: bool = False,
        dropped: Sequence[Tensor] | None = None,
        p: float = 0.0,
    ) -> GRUPlan:
        """Return the plan of all layers and directions.

        Args:
            buffers: The integers of each cell in the order of `BUFFERS`, one cell after the other;
                the directions of a layer are adjacent.
            live: Unused, for the interface of `PlanCache`; changes of the integers are detected.
            dropped: Unused; a frozen GRU is not trained.
            p: Unused.

        Raises:
            ParameterError: A buffer does not fit.
        """
        size = len(BUFFERS)
        cells_of_all = sum(map(len, self.qparams))
        if len(buffers) != size * cells_of_all:
            raise ParameterError(
                f"Expected {size * cells_of_all} tensors of integers, got {len(buffers)}"
            )
        cells = iter([buffers[i : i + size] for i in range(0, len(buffers), size)])
        found = stack(
            [
                [
                    self._cell(qparams, layer, direction, next(cells))
                    for direction, qparams in enumerate(directions)
                ]
                for layer, directions in enumerate(self.qparams)
            ]
        )
        return self.keep_if_captured(found)

    def _cell(
        self, qparams: QParams, layer: int, direction: int, buffers: Sequence[Tensor]
    ) -> CellPlan:
        kept = self._cells.get((layer, direction))
        if kept and all(map(Stamp.matches, kept[0], buffers)):
            return kept[1]
        # results of a captured graph exist only after it has run
        is_captured = is_plain(buffers[0]) and capturing(buffers[0].device)
        found = dict(zip(BUFFERS, buffers, strict=True))
        check_integers(found, self.shape, qparams, layer, direction, values=not is_captured)
        unseen = is_captured or any(buffer.is_inference() for buffer in buffers)
        # before the plan: another thread may change buffers while it is built
        stamps = None if unseen else [Stamp(buffer) for buffer in buffers]
        W, R, Bw, Br, Mx, kx, Mh, kh = buffers
        key = (W.device, layer, direction)
        if key not in self._frozen:
            refuse_in_capture(W.device, COLD)
            self._frozen[key] = build_frozen(qparams, W.device)
        q, config = qparams.quantizers, qparams.config

        def product(weight: str, K: int, x: str, y: str, M: Tensor, k: Tensor) -> tuple[Any, int]:
            bits = config[weight].bitwidth
            assert bits is not None
            return matmul_sum(y, bits, K, q[x], q[y], M, k, config.rounding)

        Wx, bound_Wx = product("weight.W", W.shape[1], "input.x", "matmul.Wx", Mx, kx)
        Rh, bound_Rh = product("weight.R", R.shape[1], "output.h", "matmul.Rh", Mh, kh)
        finite = torch.ones((), dtype=torch.bool, device=W.device)
        bits = {name: config[name].bitwidth or 1 for name in ("weight.W", "weight.R")}
        weights = WeightPart(
            W,
            R,
            Bw,
            Br,
            Bw,
            Br,
            {},
            Wx,
            Rh,
            bound_Wx,
            bound_Rh,
            bits["weight.W"],
            bits["weight.R"],
            finite,
        )
        plan = CellPlan(self._frozen[key], weights)
        if stamps is not None:
            self._cells[layer, direction] = (stamps, plan)
        return plan
