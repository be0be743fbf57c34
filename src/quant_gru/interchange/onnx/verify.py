"""Comparison of an ONNX model, run by ONNX Runtime, with the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quant_gru.config.files import read_bytes
from quant_gru.errors import QuantGRUError
from quant_gru.execution.layers import run_real
from quant_gru.integer.plan import GRUPlan
from quant_gru.interchange.onnx.builder import OPERATORS
from quant_gru.interchange.onnx.operator import onnx_operator_library


@dataclass(frozen=True)
class Difference:
    """How an output of a model differs from the plan.

    Attributes:
        values: Number of values compared.
        differing: Number of values whose code differs.
        largest: Largest difference, in codes of output.h.
        largest_real: Largest difference of real values.
    """

    values: int
    differing: int
    largest: int
    largest_real: float

    def __add__(self, other: Difference) -> Difference:
        return replace(
            self,
            values=self.values + other.values,
            differing=self.differing + other.differing,
            largest=max(self.largest, other.largest),
            largest_real=max(self.largest_real, other.largest_real),
        )

    @property
    def wrong(self) -> bool:
        """Whether a file of profile 'integer' must not differ like this."""
        return self.differing > 0 or self.largest_real > 0

    def __str__(self) -> str:
        if not self.wrong:
            return f"equal ({self.values} codes)"
        share = 100 * self.differing / max(self.values, 1)
        return (
            f"{self.differing} of {self.values} codes differ ({share:.3g} %), by at most "
            f"{self.largest} codes ({self.largest_real:.3g})"
        )


@dataclass(frozen=True)
class OutputDifference(Difference):
    """How a value that float layers compute differs from PyTorch's: an output of a model.

    Attributes:
        values: Number of values compared.
        differing: Number of values that differ by more than rounding in the float layers explains.
        largest: Largest difference in multiples of what rounding explains; 0 for less than that.
        largest_real: Largest difference of real values, with rounding at the quantizers included.
    """

    @property
    def wrong(self) -> bool:
        """Whether a file of profile 'integer' must not differ like this."""
        return self.differing > 0

    def __str__(self) -> str:
        largest = f"the largest difference is {self.largest_real:.3g}"
        if not self.wrong:
            return f"equal but for rounding ({self.values} values); {largest}"
        return f"{self.differing} of {self.values} values differ beyond rounding; {largest}"


def session_of(model: bytes | str) -> Any:
    """Return a session of ONNX Runtime on the CPU, with one thread.

    Args:
        model: A serialized model, or the path of one.

    Raises:
        QuantGRUError: onnxruntime is not installed, or it refuses the model.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise QuantGRUError(
            f"Expected onnxruntime to verify a model, got an ImportError ({error}); install it "
            'with pip install "quant-gru[onnx]", or give verify=False'
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    content = model if isinstance(model, bytes) else read_bytes(model)
    if OPERATORS.encode() in content:
        options.register_custom_ops_library(onnx_operator_library())
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions share no other class
        reason = " ".join(str(error).split())
        raise QuantGRUError(
            f"Expected a model that ONNX Runtime loads, got: {reason:.300}"
        ) from error


def run_session(session: Any, names: Sequence[str], feed: Mapping[str, Any]) -> dict[str, Any]:
    """Return outputs of a session by name.

    Args:
        session: Of `session_of`.
        names: The outputs.
        feed: Name of an input -> array.

    Raises:
        QuantGRUError: ONNX Runtime refuses the feed.
    """
    try:
        found = session.run(list(names), feed)
    except Exception as error:  # its exceptions share no other class
        reason = " ".join(str(error).split())
        raise QuantGRUError(
            f"Expected a model that ONNX Runtime runs, got: {reason:.300}"
        ) from error
    return dict(zip(names, found, strict=True))


def difference(found: Any, expected: Tensor, scales: Tensor) -> Difference:
    """Compare real values that are codes of output.h.

    Args:
        found: Real values of the model, an array.
        expected: Real values of the plan, same shape.
        scales: float64, of a shape that broadcasts.
    """
    ours, theirs = torch.from_numpy(found).to(torch.float64), expected.detach().cpu().double()
    if ours.shape != theirs.shape:
        raise QuantGRUError(
            f"Expected an output of shape {tuple(theirs.shape)}, got {tuple(ours.shape)}"
        )
    if not ours.numel():
        return Difference(0, 0, 0, 0.0)
    real = torch.nan_to_num((ours - theirs).abs(), nan=torch.inf)
    codes = torch.round(real / scales).clamp(max=float(1 << 32))
    return Difference(ours.numel(), int((codes > 0).sum()), int(codes.max()), float(real.max()))


def compare(plan: GRUPlan, values: Mapping[str, NDArray[Any] | None]) -> dict[str, Difference]:
    """Compare output and last states of a model with those of the plan on the same inputs.

    Args:
        plan: The plan.
        values: 'x' float32 (T, N, C); 'h0' (layers * directions, N, H), or none for zeros;
            'lengths' int64 (N,), or none; and what the model gave of 'y' (T, N, D*H) and 'h_n'
            (layers * directions, N, H).

    Returns:
        'output' and 'h_n', as far as the model gave them.
    """
    cells = [cell for layer in plan.cells for cell in layer]
    device, H = cells[0].weights.W.device, cells[0].hidden_size
    x, h0, rows = (values.get(name) for name in ("x", "h0", "lengths"))
    assert x is not None
    inputs = torch.from_numpy(np.array(x, np.float32)).to(device)
    before = None if h0 is None else torch.from_numpy(np.array(h0, np.float32)).to(device)
    lengths = None if rows is None else torch.from_numpy(np.array(rows)).to(device)
    with torch.no_grad():
        y, h_n = run_real(plan, inputs, before, lengths)
    if lengths is not None:
        runs = torch.arange(len(x), device=device)[:, None] < lengths
        y = y.where(runs[..., None], 0.0)
    top = torch.tensor([cell.h.scale for cell in plan.cells[-1]], dtype=torch.float64)
    scales = torch.tensor([cell.h.scale for cell in cells], dtype=torch.float64)
    found = {}
    if values.get("y") is not None:
        found["output"] = difference(values["y"], y, top.repeat_interleave(H))
    if values.get("h_n") is not None:
        found["h_n"] = difference(values["h_n"], h_n, scales[:, None, None])
    return found


def expect_none(report: Mapping[str, Difference]) -> None:
    """Raise if any code differs, or an output by more than rounding in float layers.

    Raises:
        QuantGRUError: One does.
    """
    wrong = {name: each for name, each in report.items() if each.wrong}
    if wrong:
        listed = "; ".join(f"{name}: {each}" for name, each in wrong.items())
        raise QuantGRUError(
            f"Expected the codes of the plan and the outputs of the model from ONNX Runtime, got "
            f"others ({listed})"
        )
