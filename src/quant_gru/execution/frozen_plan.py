"""The plan of a frozen GRU, built from its integer buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_runtime.cuda.graph_capture import capturing
from quant_gru.execution.plan_cache import CallKeeper, Stamp
from quant_gru.integer.plan import (
    CellPlan,
    FrozenPart,
    GRUPlan,
    WeightPart,
    build_frozen,
    matmul_sum,
    stack,
)
from quant_gru.integer.qparams import QParams
from quant_gru.kernels.cuda.machine import COLD, refuse_in_capture

BUFFERS = ("W", "R", "Bw", "Br", "Mx", "kx", "Mh", "kh")


class FrozenPlans(CallKeeper):
    """Builds plans from buffers, and caches the plan of each cell while its buffers are unchanged.

    Args:
        qparams: [layer][direction] -> quantizers and tables.
    """

    def __init__(self, qparams: Sequence[Sequence[QParams]]) -> None:
        super().__init__()
        self.qparams = qparams
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
        """
        size = len(BUFFERS)
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
        W, R, Bw, Br, Mx, kx, Mh, kh = buffers
        key = (W.device, layer, direction)
        if key not in self._frozen:
            refuse_in_capture(W.device, COLD)
            self._frozen[key] = build_frozen(qparams, W.device)
        q, config = qparams.quantizers, qparams.config

        def product(weight: str, K: int, x: str, y: str, M: Tensor, k: Tensor) -> tuple[Any, int]:
            bits = config[weight].bitwidth
            assert bits is not None
            return matmul_sum(bits, K, q[x], q[y], M, k)

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
        # results of a captured graph exist only after it has run
        unseen = capturing(W.device) or any(buffer.is_inference() for buffer in buffers)
        if not unseen:
            self._cells[layer, direction] = ([Stamp(buffer) for buffer in buffers], plan)
        return plan
