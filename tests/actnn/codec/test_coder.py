"""Prepared coders return what `encode` and `decode` return, for every layout, also under modes."""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import actnn
from actnn import codec
from actnn.codec.codes import DTYPES
from quant_gru.kernel_runtime.cuda import driver

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(
            not torch.cuda.is_available() or driver.missing(torch.device("cuda", 0)) is not None,
            reason="needs a GPU",
        ),
    ),
]
LAYOUTS = {
    "vector": lambda x: x,
    "matrix": lambda x: x.view(30, -1),
    "transposed": lambda x: x.view(30, -1).t(),
    "channels_last": lambda x: x.view(2, 5, 3, -1).to(memory_format=torch.channels_last),
    "one pixel": lambda x: x.view(30, -1, 1, 1).to(memory_format=torch.channels_last),
    "odd strides of single elements": lambda x: x.as_strided((30, 1, 21), (21, 5, 1)),
    "empty": lambda x: x[:0],
}


class Watching(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("bounds", [codec.UNBOUNDED, (-1.0, 1.0)], ids=["unbounded", "bounded"])
def test_a_coder_returns_the_same_codes(device, layout, bits, bounds):
    for dtype in DTYPES:
        x = LAYOUTS[layout](torch.randn(630, device=device).tanh().mul(0.9).to(dtype))
        state = codec.noise_state(5, device=device)
        coder = codec.coder_of(x, bits, 64, True, bounds)
        codes = codec.encode(x, bits, codec.Key(state, 7), group=64, bounds=bounds)
        with Watching() as watching:
            watched = coder.encode(x, state, 7)
        found = coder.encode(x, state, 7)
        expected = codec.decode(codes)
        for each in (found, watched):
            y = coder.decode(each)
            assert torch.equal(y, expected)
            assert y.stride() == x.stride() == coder.strides
            with watching:
                assert torch.equal(coder.decode(each), expected)
        parts = found if isinstance(found, tuple) else (found,)
        assert sum(part.nbytes for part in parts) == codes.nbytes
        assert watching.seen


@pytest.mark.parametrize("device", DEVICES)
def test_saved_tensors_with_gaps_are_not_read_as_dense_ones(device):
    made = torch.randn(64, 48, device=device, requires_grad=True)
    with actnn.Saving(bits=8, min_bytes=0) as saving:
        for _ in range(2):
            wide = made * 1
            part = wide[:, ::6]  # a share of the whole that is too small for holding the whole
            y = part.sin().sum() + part.expand(3, 64, 8)[:, 1:].cos().sum()
    (found,) = torch.autograd.grad(y, made)
    (expected,) = torch.autograd.grad(
        made[:, ::6].sin().sum() + made[:, ::6].expand(3, 64, 8)[:, 1:].cos().sum(), made
    )
    assert any(record.reason == "compressed" for record in saving.records)
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.slow
def test_what_a_thread_uses_when_the_interpreter_exits_is_no_leak():
    script = """
import threading, torch
from actnn import codec
begun = threading.Event()
def work():
    coder = codec.coder_of(torch.ones(64), 4, 32, False)
    begun.set()
    threading.Event().wait()
threading.Thread(target=work, daemon=True).start()
assert begun.wait(60)
"""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], check=True, capture_output=True, text=True
    )
    assert "leaked" not in found.stderr
