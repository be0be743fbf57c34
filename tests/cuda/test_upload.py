"""Numbers of the host that reach a GPU as arguments of launches, in kernels on the host."""

import ctypes

import pytest
import torch
from host_machine import COMPILER
from torch.nn.utils.rnn import pack_padded_sequence

from quant_gru.execution import sequence_layout
from quant_gru.kernels import dispatch
from quant_gru.kernels.cuda import machine
from quant_gru.kernels.cuda.boundary.upload import Upload, upload_on

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
]

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [1, 495, 496, 497, 1500])
def test_all_numbers_arrive_whatever_the_number_of_launches(host, count):
    numbers = (ctypes.c_int64 * count)(*(7**20 * i - 3 for i in range(count)))
    made = Upload(host, CPU)(numbers)
    assert made.dtype is torch.int64
    assert made.tolist() == list(numbers)


def test_a_copy_keeps_its_numbers_when_others_are_copied(host):
    upload = Upload(host, CPU)
    first = upload((ctypes.c_int64 * 3)(1, 2, 3))
    upload((ctypes.c_int64 * 3)(4, 5, 6))
    assert first.tolist() == [1, 2, 3]


@pytest.mark.parametrize("lengths", [[3, 7, 1], [400, 600, 2]])
def test_layouts_of_packed_rows_are_those_of_a_cpu(host, monkeypatch, lengths):
    packed = pack_padded_sequence(
        torch.zeros(max(lengths), len(lengths), 1), torch.tensor(lengths), enforce_sorted=False
    )
    sizes = packed.batch_sizes.numpy().tobytes()
    expected = sequence_layout._made_layout(CPU, sizes, len(lengths))
    monkeypatch.setattr(machine, "machine_of", lambda device: host)
    monkeypatch.setattr(sequence_layout, "executor_of", lambda device: dispatch.CUDA())
    made = sequence_layout._made_layout(CPU, sizes, len(lengths))
    upload_on.cache_clear()
    assert host.launched[-1][0] == "upload"
    assert torch.equal(made, expected)
    assert expected[: len(lengths)].tolist() == sorted(lengths, reverse=True)
