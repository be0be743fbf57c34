"""The sweep of every requantizer on the host: a part of the accumulators."""

import pytest
import torch
from host_machine import COMPILER
from requantizer_sweep import WIDTHS, kernel_of, record_of

from quant_gru.config.fields import ROUNDINGS
from quant_gru.kernel_runtime.cuda.launch import Grid

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.mark.slow
@pytest.mark.parametrize("rule", ROUNDINGS)
def test_a_part_of_the_accumulators(host, rule):
    """Those that 64 threads take: 4096 places with 64 neighbours each."""
    for width, bits in WIDTHS.items():
        for shift in (bits - 1, bits, bits + 1, bits + 7, bits + 20, bits + 32):
            differing = torch.zeros(64, dtype=torch.int64)
            host.launch(kernel_of(rule), Grid((1, 1), 64), record_of(differing, width, shift))
            assert int(differing.sum()) == 0, (width, shift)
