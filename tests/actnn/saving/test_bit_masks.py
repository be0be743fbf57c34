"""Boolean tensors as bits."""

import pytest
import torch

from actnn.saving.bit_masks import fusible_mask, pack_mask, unpack_flat, unpack_mask


@pytest.mark.parametrize("n", [0, 1, 7, 8, 64, 1003])
def test_compiled_code_packs_the_same_bits(n):
    mask = torch.rand(n) > 0.5
    bits = pack_mask(mask)
    assert bits.dtype is torch.uint8
    assert len(bits) == -(-n // 8)
    assert torch.equal(fusible_mask(mask), bits)
    assert torch.equal(unpack_flat(bits)[:n], mask)
    assert [int(bits[i // 8]) >> i % 8 & 1 for i in range(n)] == mask.int().tolist()


def test_bits_are_in_the_order_of_memory():
    mask = torch.rand(3, 5, 4) > 0.5
    turned = mask.permute(2, 0, 1)
    assert torch.equal(pack_mask(turned), pack_mask(mask))
    assert torch.equal(unpack_mask(pack_mask(turned), turned.shape, turned.stride()), turned)
