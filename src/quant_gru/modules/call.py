"""The forward of a QuantGRU: it reuses a prepared call that still holds, or prepares one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Sequence as TensorSequence
from functools import cache
from typing import Any, NoReturn, overload

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.nn.utils.rnn import PackedSequence

from quant_gru.autograd.straight_through import Differentiated, Given, run
from quant_gru.errors import CalibrationError, QuantGRUError
from quant_gru.execution.layers import run_real
from quant_gru.execution.noise import Noise
from quant_gru.execution.plan_cache import PlanCache
from quant_gru.execution.prepared_call import PreparedCall, prepare
from quant_gru.integer.plan import GRUPlan
from quant_gru.interchange.onnx import recorded
from quant_gru.modules.computed_weights import compute_weights
from quant_gru.modules.exports import Exports
from quant_gru.modules.float_zoneout import run_float
from quant_gru.torch_ops import operators, watchers
from quant_gru.torch_ops.plan_sources import LivePlans


class Calls(Exports):
    """The forward of a QuantGRU."""

    calibrating: bool

    @overload
    def forward(
        self, input: Tensor, hx: Tensor | None = None, zoneout_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(
        self, input: PackedSequence, hx: Tensor | None = None, zoneout_mask: Tensor | None = None
    ) -> tuple[PackedSequence, Tensor]: ...

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None = None,
        zoneout_mask: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run the GRU.

        Args:
            input: (T, N, C), (N, T, C) if `batch_first`, (T, C), or a PackedSequence. The quantized
                mode first casts it to float32, like the states.
            hx: Initial states (layers * directions, N, H), or (layers * directions, H) for
                unbatched input; None for zeros.
            zoneout_mask: In training, replaces the mask drawn with probability `zoneout`: 1 for
                units that take their new state, 0 for units that keep the old one (as in Haste).
                (T, N, H) or (layers * directions, T, N, H), always with time first.

        Returns:
            Output (T, N, directions * H), or in the input's form, and last states as `hx`.

        Raises:
            CalibrationError: Quantization is on, but neither scales nor statistics exist.
            QuantGRUError: A shape does not fit (in quantized mode; otherwise nn.GRU's errors).
        """
        if isinstance(input, Proxy) or isinstance(hx, Proxy):
            return watchers.leaf(self, input, hx, zoneout_mask)
        if self.calibrating:
            output = super().forward(input, hx)
            self._collect(input, hx)
            return output
        if (self.export_mode or recorded.exporting) and self._is_recorded():
            return self._record(input, hx)
        if not self.use_quantization or self._exports_float():
            if self._scales_unused:
                self._warn_of_unused_scales()
            if self._is_plain(zoneout_mask):
                return super().forward(input, hx)
            return self._forward_float(input, hx, zoneout_mask)
        if torch.compiler.is_compiling():
            return self._forward_traced(input, hx, zoneout_mask)
        if watchers.skipped_by_dynamo():
            return _uncompiled()(self, input, hx, zoneout_mask=zoneout_mask)
        if watchers.traced(input, hx, self):
            return self._forward_traced(input, hx, zoneout_mask)
        prepared = self._state.plans.prepared
        if prepared is None or self.training or zoneout_mask is not None:
            return self._forward(input, hx, zoneout_mask, None)
        own = self._parameters.values()
        result = prepared.start(own, input, hx, None, self.batch_first)
        if result is not None:
            return result
        return self._forward(input, hx, None, prepared)

    def __prepare_scriptable__(self) -> NoReturn:
        watchers.refuse_script(self)

    def _forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None,
        zoneout_mask: Tensor | None,
        prepared: PreparedCall | None,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run the quantized forward for all input forms and dtypes, differentiably if needed.

        Args:
            input: As for `forward`.
            hx: As for `forward`.
            zoneout_mask: As for `forward`.
            prepared: A prepared call that may run the normalized input in native code.
        """
        sequence = self._normalize(input, hx, torch.float32)
        x, h0, packing = sequence.values, sequence.states, sequence.packing
        if prepared is not None:
            own = self._parameters.values()
            result = prepared.start(own, x, h0, None, False, packing)
            if result is not None:
                return sequence.finish(*result)
        noise = self._noise(sequence, zoneout_mask)
        prepared = self._prepared(noise)
        logarithms = self._logarithms()
        dtype = self._weight.dtype
        if torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (x, h0, *prepared.weights, *logarithms)
        ):
            how, given = self._differentiated(prepared), Given(packing, noise, dtype)
            y, h_n = run(how, x, h0, given, prepared.weights, logarithms)
        else:
            y, h_n = run_real(prepared.plan, x, h0, None, noise, None, packing, dtype)
        return sequence.finish(y, h_n)

    def _prepared(self, noise: Noise | None) -> PreparedCall:
        """Return the shared state of calls: that of the last call if it holds, or a new one."""
        plans, own = self._state.plans, self._parameters.values()
        live, (dropped, p) = self._may_change_unseen(), self._dropped(noise)
        # learned scales follow their parameters at each call
        kept = None if live and self._log2_scales else plans.kept(self._weight.device, live)
        if kept is not None and kept.holds(own):
            kept.update(dropped, p)
            return kept
        if kept is not None:
            # parts of the weights have guards of their own, which may see a write later
            plans.forget_settled()
        self._finalized(in_forward=True)
        assert self._state.scales is not None
        weights = self._weights()
        known = {id(w) for w in own}
        # computed weights, as in parametrizations and pruning, may differ in each call
        cells = [cell for layer in weights for cell in layer]
        live = live or any(w is not None and id(w) not in known for cell in cells for w in cell)
        scales = self._state.scales
        found = prepare(
            lambda: plans.plan(scales, weights, live, dropped, p),
            cells,
            own,
            self._weight.dtype,
            live,
        )
        if kept is not None and kept.plan is found.plan:
            # how calls are differentiated does not depend on the weights
            found.differentiated = kept.differentiated
        plans.keep(found)
        if self._state.scales is not scales:
            # another thread changed the scales: this plan may have been cached after its clear()
            plans.clear()
        return found

    def _differentiated(self, prepared: PreparedCall) -> Differentiated:
        """Return how calls with this shared state are differentiated."""
        how: Differentiated | None = prepared.differentiated
        if how is None or (how.precision, how.stash_bits) != (self._precision, self._stash_bits):
            how = prepared.differentiated = Differentiated(
                prepared.plan,
                self.bias,
                self._precision,
                self._stash_bits,
                self._learned(),
                self._plan_again(),
            )
        return how

    def _dropped(self, noise: Noise | None) -> tuple[list[Tensor] | None, float]:
        """Return dropped recurrent weights of each layer and direction, and their probability."""
        if noise is None:
            return None, 0.0
        found = noise.all_dropped(self.num_layers, self._directions, self.hidden_size)
        return found, noise.recurrent_dropout

    def _plan(self) -> GRUPlan:
        """Return the plan of the current weights, which are read again."""
        compute_weights(self)
        self._state.plans.forget_settled()
        self._finalized()
        assert self._state.scales is not None
        live = self._may_change_unseen()
        return self._state.plans.plan(self._state.scales, self._weights(), live)

    def _plan_again(self) -> Callable[[TensorSequence[Tensor], Noise | None], GRUPlan]:
        """Return again(weights, noise) -> the plan of a forward, from a flat list of weights."""
        scales, shape = self._state.scales, self._shape()
        assert scales is not None
        # a weak reference, so that plans do not keep themselves alive
        kept = weakref.ref(self._state.plans)

        def again(weights: TensorSequence[Tensor], noise: Noise | None) -> GRUPlan:
            plans = LivePlans(scales, kept() or PlanCache(), shape)
            sizes = (shape.num_layers, shape.directions, shape.hidden_size)
            dropped = noise.all_dropped(*sizes) if noise else None
            return plans.plan(weights, True, dropped, noise.recurrent_dropout if noise else 0.0)

        return again

    def _may_change_unseen(self) -> bool:
        """Return whether weights may change without a change of their version.

        Fused optimizers write weights without raising their version, so weights that take part in a
        gradient are never cached. Inference-mode tensors have no version.
        """
        own = self._parameters.values()
        return self._takes_part_in_a_gradient() or any(
            w is not None and w.is_inference() for w in own
        )

    def _takes_part_in_a_gradient(self) -> bool:
        if self.training:
            return True
        if not torch.is_grad_enabled():
            return False
        # original weights of parametrizations are parameters of submodules
        own = self.parameters() if self._modules else self._parameters.values()
        return any(w is not None and w.requires_grad for w in own)

    def _forward_traced(
        self, input: Tensor | PackedSequence, hx: Tensor | None, zoneout_mask: Tensor | None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run the quantized forward as one operator that tracers and transforms can handle."""
        if torch.onnx.is_in_onnx_export():
            return self._record(input, hx)
        if self._log2_scales:
            raise QuantGRUError(
                "Expected learn_scales to be False for torch.compile, torch.export and torch.func, "
                "got True: scales are read on the host; freeze() the GRU for inference"
            )
        text = self._state.text
        if text is None:
            raise CalibrationError(
                "Expected a calibrated GRU to trace, got one without scales; call calibrate(data) "
                "and finalize_calibration() first"
            )
        weights = [w for layer in self._weights() for cell in layer for w in cell if w is not None]
        sequence = self._normalize(input, hx, torch.float32)
        settings = operators.Settings(
            self._noise(sequence, zoneout_mask),
            self.bidirectional,
            self._takes_part_in_a_gradient(),
            self.precision,
            self._state.containers if torch.is_grad_enabled() else (),
        )
        y, h_n = operators.forward(
            sequence.x, sequence.h0, sequence.lengths, weights, text, settings
        )
        return sequence.restore(y, h_n, self._weight.dtype)

    def _forward_float(
        self, input: Tensor | PackedSequence, hx: Tensor | None, zoneout_mask: Tensor | None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run the float mode with zoneout or recurrent dropout, step by step."""
        sequence = self._normalize(input, hx)
        y, h_n = run_float(
            sequence.x,
            sequence.h0,
            sequence.lengths,
            self._weights(),
            self._noise(sequence, zoneout_mask),
            self.zoneout,
        )
        return sequence.restore(y, h_n, y.dtype)

    def _is_plain(self, zoneout_mask: Tensor | None) -> bool:
        """Return whether nn.GRU computes the result of the float mode."""
        held = zoneout_mask is not None or self.zoneout > 0
        return not held and not (self.training and self.recurrent_dropout > 0)


@cache
def _uncompiled() -> Callable[..., tuple[Tensor | PackedSequence, Tensor]]:
    """Return the forward for calls between graphs of a compiled model, without compilation."""
    # imports Dynamo, which takes a second
    found: Any = torch.compiler.disable(Calls.forward)
    return found  # type: ignore[no-any-return]
