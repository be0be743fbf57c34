"""Pinned blocks of host memory are little larger than what they hold."""

import pytest
import torch

from actnn.saving.offload import _bytes_of, part_sizes


@pytest.mark.parametrize("base", [*range(70), 1000, 2**20, 3 * 2**20, 2**30 + 4096, 2**33 - 1])
@pytest.mark.parametrize("more", [-1, 0, 1, 12345])
def test_blocks_hold_all_bytes_and_at_most_a_sixteenth_more(base, more):
    nbytes = max(0, base + more)
    sizes = part_sizes(nbytes)
    assert sum(sizes) == nbytes
    assert all(size > 0 for size in sizes)
    assert len(sizes) <= 5
    taken = sum(1 << (size - 1).bit_length() for size in sizes)
    assert nbytes <= taken <= nbytes + nbytes // 16


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64], ids=str
)
@pytest.mark.parametrize("shape", [(0,), (), (3, 5, 2)], ids=str)
def test_bytes_of_dense_tensors_are_those_of_their_memory(dtype, shape):
    tensor = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)
    if len(shape) == 3:
        tensor = tensor.transpose(0, 1)
    found = _bytes_of(tensor)
    assert found.nbytes == tensor.nbytes
    sizes = part_sizes(tensor.nbytes)
    copies = [part.clone() for part in found.split(sizes)]
    back = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    for part, target in zip(copies, _bytes_of(back).split(sizes), strict=True):
        target.copy_(part)
    assert torch.equal(back, tensor)
