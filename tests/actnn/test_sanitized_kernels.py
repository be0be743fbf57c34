"""The program for compute-sanitizer, on a CPU."""

import torch
from sanitized_kernels import cases


def test_every_case_is_right_on_a_cpu():
    torch.manual_seed(0)
    wrong = [name for name, run in cases("cpu") if not run()]
    assert wrong == []
