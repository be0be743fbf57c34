"""The shortcut through inference calls: never stale, and of the same dtype as the long way."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from gru_helpers import C, quantized, seeded
from torch.nn.utils import parametrize, prune

X = seeded(5, 3, C)


class Same(torch.nn.Module):
    def forward(self, w):
        return w * 1


def warm(gru):
    for _ in range(2):
        y, _ = gru(X)
    return y


def assert_fresh(gru):
    y, _ = gru(X)
    expected, _ = copy.deepcopy(gru)(X)
    assert torch.equal(y, expected)


@torch.no_grad()
def test_parametrized_weight():
    gru = quantized()
    parametrize.register_parametrization(gru, "weight_ih_l0", Same())
    before = warm(gru)
    gru.parametrizations.weight_ih_l0.original.neg_()
    assert not torch.equal(gru(X)[0], before)


@torch.no_grad()
def test_pruned_weight():
    gru = quantized()
    prune.identity(gru, "weight_ih_l0")
    before = warm(gru)
    gru.weight_ih_l0_mask.zero_()
    assert not torch.equal(gru(X)[0], before)


@torch.no_grad()
def test_storage_at_an_address_used_before():
    gru = quantized()
    warm(gru)
    for _ in range(8):
        gru.weight_hh_l0.data = gru.weight_hh_l0.data * -1.5
        assert_fresh(gru)


@torch.no_grad()
def test_fused_optimizer_in_eval_mode():
    gru = quantized()
    optimizer = torch.optim.Adam(gru.parameters(), lr=0.5, fused=True)
    warm(gru)
    with torch.enable_grad():
        gru(X)[0].sum().backward()
    optimizer.step()
    assert_fresh(gru)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_dtype_of_weights_is_that_of_the_output(dtype):
    gru = quantized().to(dtype)
    assert {part.dtype for _ in range(3) for part in gru(X)} == {dtype}


@torch.no_grad()
def test_changed_weights_get_a_quick_way_again():
    gru = quantized()
    warm(gru)
    gru.weight_ih_l0.neg_()
    assert_fresh(gru)
    assert gru._state.plans.quick.holds(gru._parameters.values())
    assert_fresh(gru)


FORKED = """
import os, torch
from quant_gru import QuantConfig, QuantGRU
torch.set_num_threads(2)
gru = QuantGRU(40, 64, config=QuantConfig.int8()).eval()
x = torch.randn(50, 64, 40)
gru.calibrate(x)
gru.finalize_calibration()
gru.use_quantization = True
with torch.inference_mode():
    expected = gru(x)[0].numpy().tobytes()
    child = os.fork()
    if child == 0:
        os._exit(0 if gru(x)[0].numpy().tobytes() == expected else 3)
    raise SystemExit(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_goes_on():
    """With threads, too: none of ours is alive between calls."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
