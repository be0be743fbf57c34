"""QuantGRUCell: torch.nn.GRUCell with a quantized mode, one step of the same plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import Proxy

from quant_gru.config.choice import OneConfig
from quant_gru.errors import QuantGRUError
from quant_gru.execution.sequence_layout import Sequence
from quant_gru.modules.frozen import FrozenQuantGRU
from quant_gru.modules.gru import QuantGRU
from quant_gru.modules.near_misses import refuse_unknown
from quant_gru.torch_ops import watchers

_PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def _as_sequence(
    input: Any, hx: Any, input_name: str = "the input", state_name: str = "the state"
) -> tuple[Tensor, Tensor | None]:
    """Return a cell's input and state as a sequence of one step, (1, N, C) and (1, N, H).

    Args:
        input: (N, C) or (C,).
        hx: (N, H) or (H,), or None.
        input_name: Name of `input` in messages.
        state_name: Name of `hx` in messages.

    Raises:
        QuantGRUError: The input or the state has another number of dimensions.
    """
    if not isinstance(input, Tensor) or input.dim() not in (1, 2):
        got = tuple(input.shape) if isinstance(input, Tensor) else type(input).__name__
        raise QuantGRUError(f"Expected {input_name} of a cell to be (N, C) or (C,), got {got}")
    batched = input.dim() == 2
    if hx is not None and (not isinstance(hx, Tensor) or hx.dim() != input.dim()):
        got = tuple(hx.shape) if isinstance(hx, Tensor) else type(hx).__name__
        shape = "(N, H)" if batched else "(H,)"
        raise QuantGRUError(f"Expected {state_name} of a cell to be {shape}, got {got}")
    if not batched:
        return input[None, None], None if hx is None else hx[None, None]
    return input[None], None if hx is None else hx[None]


class QuantGRUCell(QuantGRU, torch.nn.GRUCell):
    """A drop-in `torch.nn.GRUCell` with a mode that computes only in integers.

    A step gives the codes of the same step of a `QuantGRU` with the same weights and scales.
    Everything else is as for `QuantGRU`: calibration, checkpoints, freezing, training. Whole
    sequences are faster with a `QuantGRU`.

    Args:
        input_size: Features of an input, C.
        hidden_size: Features of the state, H.
        bias: Whether the cell has biases.
        device: Device of the parameters.
        dtype: dtype of the parameters.
        use_quantization: Whether forward computes in integers.
        config: Widths and kinds of the 17 operators: a QuantConfig, the name of a preset
            ('int8_wide'), the path of a file, or a dict. None for 8 bits, symmetric.

    Example:
        >>> cell = QuantGRUCell(8, 16, config="int8_wide")
        >>> h = cell(torch.randn(4, 8))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        use_quantization: bool = False,
        config: OneConfig | None = None,
        **_unknown: NoReturn,
    ) -> None:
        refuse_unknown(QuantGRUCell.__init__, _unknown)
        # inference-mode parameters have no version, so changes would go undetected
        with torch.inference_mode(False):
            cell = torch.nn.GRUCell(input_size, hidden_size, bias, device, dtype)
        self._adopt(cell, config, use_quantization)

    @classmethod
    def of(cls, cell: torch.nn.GRUCell, config: OneConfig | None = None) -> QuantGRUCell:
        """Return a cell with everything that `cell` has: parameters, hooks, mode."""
        new = cls.__new__(cls)
        new._adopt(cell, config, False)
        return new

    def _adopt(
        self, cell: torch.nn.GRUCell, config: OneConfig | None, use_quantization: bool
    ) -> None:
        own = self.__dict__
        own.update(cell.__dict__)
        for name in ("_parameters", "_buffers", "_modules"):
            own[name] = dict(cell.__dict__[name])
        names = _PARAMETERS if cell.bias else _PARAMETERS[:2]
        # a guard of the weights takes tensors only, so absent biases are plain attributes
        for name in _PARAMETERS:
            if own["_parameters"].get(name, 0) is None:
                own[name] = own["_parameters"].pop(name)
        sizes = {"num_layers": 1, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        own.update(sizes, mode="GRU", proj_size=0)
        own.update(_flat_weights_names=list(names), _all_weights=[list(names)])
        self._init_flat_weights()
        self._init_quantization(config, use_quantization)
        H, C = self.hidden_size, self.input_size
        shapes = ((3 * H, C), (3 * H, H), (3 * H,), (3 * H,))
        self._named_shapes = [list(zip(_PARAMETERS, shapes, strict=True))]

    @property
    def _weight(self) -> Tensor:
        return self.weight_ih

    def forward(  # type: ignore[override]
        self, input: Tensor, hx: Tensor | None = None
    ) -> Tensor:
        """Run one step.

        Args:
            input: (N, C) or (C,).
            hx: State (N, H) or (H,); None for zeros.

        Returns:
            The new state, of the shape of `hx`.

        Raises:
            CalibrationError: Quantization is on, but neither scales nor statistics exist.
            QuantGRUError: A shape does not fit.
        """
        if isinstance(input, Proxy) or isinstance(hx, Proxy):
            found: Tensor = watchers.leaf(self, input, hx)
            return found
        if self.calibrating or (not self.use_quantization and self._is_plain(None)):
            output = torch.nn.GRUCell.forward(self, input, hx)
            if self.calibrating:
                self._collect(input, hx)
            elif self._float_unexpected:
                self._warn_of_float()
            return output
        y, _ = super().forward(*_as_sequence(input, hx))
        return y[0] if input.dim() == 2 else y[0, 0]

    def _normalize(
        self, input: Any, hx: Tensor | None, dtype: torch.dtype | None = None
    ) -> Sequence:
        # forward passes a sequence of one step, all other methods what the user gave
        if not isinstance(input, Tensor) or input.dim() != 3:
            input, hx = _as_sequence(input, hx)
        return super()._normalize(input, hx, dtype)

    def forward_integer(  # type: ignore[override]
        self, x_codes: Tensor, h_codes: Tensor | None = None
    ) -> Tensor:
        """Run one step on codes.

        Args:
            x_codes: Codes of input.x (N, C) or (C,), any integer dtype.
            h_codes: Codes of output.h (N, H) or (H,); None for the zero point.

        Returns:
            Codes of the new state, of the shape of `h_codes`.

        Raises:
            QuantGRUError: Codes have a wrong shape, dtype or range.
        """
        return _integer_step(super().forward_integer, x_codes, h_codes)

    def quantize_state(self, hx: Tensor) -> Tensor:
        """Return the codes of a real state (N, H) or (H,); see `QuantGRU.quantize_state`."""
        return super().quantize_state(_as_states(hx))[0]

    def freeze(self) -> FrozenQuantGRUCell:
        """Return an inference-only cell with only the integer plan, with the same codes."""
        plan = self._plan(tell_again=True)
        return FrozenQuantGRUCell(self._state.document(), False, plan)


class FrozenQuantGRUCell(FrozenQuantGRU):
    """The integer plan of a QuantGRUCell as a module; see `FrozenQuantGRU`.

    Example:
        >>> cell = calibrate_model(convert_model(torch.nn.GRUCell(8, 16), "int8"), list(x))
        >>> state = cell.freeze()(x[:, 0])
        >>> state.shape
        torch.Size([4, 16])
    """

    def forward(  # type: ignore[override]
        self, input: Tensor, hx: Tensor | None = None
    ) -> Tensor:
        """Run one step; shapes and values as for `QuantGRUCell.forward` in quantized mode."""
        if isinstance(input, Proxy) or isinstance(hx, Proxy):
            found: Tensor = watchers.leaf(self, input, hx)
            return found
        y, _ = super().forward(*_as_sequence(input, hx))
        assert isinstance(y, Tensor)
        return y[0] if input.dim() == 2 else y[0, 0]

    def _normalize(self, input: Any, hx: Tensor | None) -> Sequence:
        if not isinstance(input, Tensor) or input.dim() != 3:
            input, hx = _as_sequence(input, hx)
        return super()._normalize(input, hx)

    def forward_integer(  # type: ignore[override]
        self, x_codes: Tensor, h_codes: Tensor | None = None
    ) -> Tensor:
        """See `QuantGRUCell.forward_integer`."""
        return _integer_step(super().forward_integer, x_codes, h_codes)

    def quantize_state(self, hx: Tensor) -> Tensor:
        """See `QuantGRUCell.quantize_state`."""
        return super().quantize_state(_as_states(hx))[0]


def _as_states(hx: object) -> Tensor:
    """Return a cell's real state (N, H) or (H,) as the states of one layer.

    Raises:
        QuantGRUError: It has another number of dimensions.
    """
    if not isinstance(hx, Tensor) or hx.dim() not in (1, 2):
        got = tuple(hx.shape) if isinstance(hx, Tensor) else type(hx).__name__
        raise QuantGRUError(f"Expected hx of a cell to be (N, H) or (H,), got {got}")
    return hx[None]


def _integer_step(
    run: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]], x: Tensor, h: Tensor | None
) -> Tensor:
    y, _ = run(*_as_sequence(x, h, "x_codes", "h_codes"))
    return y[0] if x.dim() == 2 else y[0, 0]
