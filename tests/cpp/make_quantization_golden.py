"""Write the golden file of `cpp/tests/quantization_test.cpp`: Python's results.

    python tests/cpp/make_quantization_golden.py cpp/tests/quantization.bin

The file consists of words of 8 bytes, and of arrays, each after its size in bytes and padded to
words. It has three lists, each after its length: calibrations, float passes, passes over codes.
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from code_passes import Codes
from float_passes import reference
from make_golden import saved
from random_calibrations import float_weights
from torch import Tensor

from quant_gru import QuantConfig, QuantGRU
from quant_gru.integer.plan import update_first

CONFIGS = [
    QuantConfig.int8(),
    QuantConfig.int8_wide().replace_globals(activation="pwl", tie_x_and_h=True),
    QuantConfig.w8a16().replace_globals(rounding="half_up", rounding_input="floor"),
    QuantConfig.uniform(4)
    .replace_globals(activation="quadratic", rounding="floor")
    .replace("W", granularity="gate"),
]
METHODS = ("histogram", "minmax", "percentile", "ema")


def word(*values: int) -> bytes:
    """Words of 8 bytes."""
    return struct.pack(f"<{len(values)}q", *values)


def array(value: Tensor | bytes | None) -> bytes:
    """An array with its size."""
    raw = value if isinstance(value, bytes) else b""
    if isinstance(value, Tensor):
        raw = value.detach().contiguous().numpy().tobytes()
    return word(len(raw)) + raw + bytes(-len(raw) % 8)


def calibration(index: int) -> bytes:
    """Configuration, method, sizes, x, float weights; the parameter file and the frozen file."""
    torch.manual_seed(index)
    config, method = CONFIGS[index], METHODS[index]
    gru = QuantGRU(3, 4, 1 + index % 2, bidirectional=index == 1, config=config)
    gru.calibration_method = method
    x = torch.randn(12, 3, 3)
    gru.calibrate(x)
    gru.finalize_calibration()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "params.json"
        gru.export_quant_params(path)
        text = path.read_bytes()
    weights = [each for w in float_weights(gru) for each in (w.W, w.R, w.bw, w.br)]
    parts = [array(json.dumps(config.to_dict()).encode()), array(method.encode())]
    parts.append(word(3, 4, gru.num_layers, gru.bidirectional, 12, 3))
    parts += [*map(array, (x, *weights)), array(text), array(saved(gru.freeze()))]
    return b"".join(parts)


def float_pass(index: int) -> bytes:
    """Sizes, arguments of both passes in float64, and all results."""
    T, N, C, H = ((4, 3, 5, 7), (3, 2, 9, 18))[index]
    torch.manual_seed(index)
    gru = torch.nn.GRU(C, H).double()
    x, h0 = torch.randn(T, N, C).double(), torch.randn(N, H).double()
    x, h0 = x.requires_grad_(), h0.requires_grad_()
    mask = (torch.rand(T, N, H) < 0.7).double() if index else None
    y = reference(gru, x, h0, mask)
    grad = torch.randn(T, N, H).double()
    y.backward(grad)
    columns = [update_first(each).t() for each in gru.parameters()]
    gradients = [update_first(each.grad).t() for each in gru.parameters()]
    values: Sequence[Tensor | None] = [*columns, x, h0, mask, grad, y, x.grad, h0.grad, *gradients]
    return word(T, N, C, H) + b"".join(map(array, values))


def codes(index: int) -> bytes:
    """Bits, sizes, arguments, and the codes of all states."""
    case = Codes(index, 0.0)
    qx, qh = case.q["input.x"], case.q["output.h"]
    x = torch.randint(qx.lo, qx.hi + 1, (case.T, case.N, case.C))
    h0 = torch.randint(qh.lo, qh.hi + 1, (case.N, case.H))
    y = case.gru.forward_integer(x, h0[None])[0]
    integers = (case.W, case.R, case.bx, case.br, x, h0, y)
    parts = [array(each.to(torch.int32)) for each in integers]
    parts += [array(case.scale), array(case.zero)]
    return word(case.bits, case.T, case.N, case.C, case.H) + b"".join(parts)


def main() -> None:
    """Write the file."""
    lists = (
        [calibration(i) for i in range(len(CONFIGS))],
        [float_pass(i) for i in range(2)],
        [codes(seed) for seed in (5, 7, 9)],
    )
    found = b"".join(word(len(each)) + b"".join(each) for each in lists)
    Path(sys.argv[1]).write_bytes(found)


if __name__ == "__main__":
    main()
