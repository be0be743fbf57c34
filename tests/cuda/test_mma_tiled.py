"""Products of bytes on tensor cores, on the host: the sums of an integer matrix product."""

import ctypes

import pytest
import torch
from host_machine import COMPILER

from quant_gru.kernel_runtime.cuda.ctypes_structs import structure
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

POINTERS = ("weights", "rows", "signed_sums", "unsigned_sums")
CaseC = structure(
    "CaseC",
    **dict.fromkeys(POINTERS, ctypes.c_void_p),
    **dict.fromkeys(("H", "padded", "count"), ctypes.c_int64),
)


@pytest.mark.slow
# unit warps, row warps, columns, stages; H, features, rows
@pytest.mark.parametrize(
    ("tile", "sizes"),
    [
        ((2, 2, 2, 4), (37, 16, 41)),
        ((2, 2, 2, 4), (32, 336, 33)),
        ((1, 2, 4, 3), (20, 80, 5)),
        ((4, 2, 8, 4), (65, 128, 130)),
        ((2, 1, 4, 2), (16, 208, 70)),
        ((1, 2, 2, 2), (1, 48, 1)),
    ],
    ids=str,
)
def test_sums(host, tile, sizes):
    """Values of all bytes, units and rows of no tile, features of no stage."""
    H, padded, count = sizes
    generator = torch.Generator().manual_seed(H)
    weights = torch.randint(-128, 128, (3 * H, padded), generator=generator).to(torch.int8)
    rows = torch.randint(-128, 128, (count, padded), generator=generator).to(torch.int8)
    weights[0], rows[0] = -128, -128
    found = torch.full((2, count, 3 * H), -7, dtype=torch.int32)
    record = CaseC(weights.data_ptr(), rows.data_ptr(), found[0].data_ptr(), found[1].data_ptr())
    record.H, record.padded, record.count = H, padded, count
    unit_warps, row_warps, columns, stages = tile
    macros = dict(zip(("UNIT_WARPS", "ROW_WARPS", "COLUMNS", "STAGES"), tile, strict=True))
    units, block_rows = 16 * unit_warps, 8 * columns * row_warps
    grid = Grid(
        (-(-count // block_rows), -(-H // units)),
        32 * unit_warps * row_warps,
        shared_bytes=stages * 64 * (3 * units + block_rows),
    )
    host.launch(Kernel.of("multiply_case", "multiply_case", macros), grid, record)
    expected = rows.to(torch.int64) @ weights.to(torch.int64).t()
    assert torch.equal(found[0].to(torch.int64), expected)
    unsigned = rows.view(torch.uint8).to(torch.int64) @ weights.to(torch.int64).t()
    assert torch.equal(found[1].to(torch.int64), unsigned + 1)
