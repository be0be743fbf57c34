"""The input projection from real values, on the host: as quantizing first, NaN included."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from derived import exact_of
from host_machine import COMPILER
from projection_blocks import (
    MOST_SHARED,
    SMALL_TILE,
    TALL,
    Projection,
    choose_reals,
    epilogue_of,
    medium,
    small,
    two_planes,
    weight_stationary,
)
from test_projection import UNSIGNED, WIDE, by_unit, in_one, plan_of

from quant_gru import QuantConfig
from quant_gru.kernels._native import (
    Epilogue,
    TiledReals,
    Warpgroups,
    WeightStationary,
    blocks_of,
    choose_tiled,
    choose_warpgroups,
)
from quant_gru.kernels.cuda.plan.tensors import numbers_of
from quant_gru.kernels.cuda.recurrence import planner

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
]
nan, inf = float("nan"), float("inf")
NARROW = QuantConfig.int8().replace("matmul.Wx", bitwidth=7)


def reals(plan, T, N, C, layout):
    """Values around ties of codes, limits, NaN, infinity; (T, N, C), strided as asked."""
    generator = torch.Generator().manual_seed(T * N + C)
    lo, hi = plan.x.lo - plan.x.zero_point, plan.x.hi - plan.x.zero_point
    halves = torch.randint(2 * lo - 6, 2 * hi + 7, (T, N, C), generator=generator)
    x = halves.to(torch.float32) * 0.5 * plan.x.scale
    bits = x.view(torch.int32) + torch.randint(-2, 3, x.shape, generator=generator)
    x = torch.where(x == 0, x, bits.to(torch.int32).view(torch.float32))
    x[0, -1, 0], x[-1, 0, -1] = 3e38, -3e38
    x[0, 0, 0], x[-1, -1, -1] = inf, -inf
    x[T // 2, N // 2, C // 2] = nan
    if layout == "batch_first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "unaligned":
        room = torch.empty(x.numel() + 1)
        return room[1:].view(x.shape).copy_(x)
    return x


CASES = [
    # T, N, C, H, rows of a tile of the recurrence; of weights, so that biases are large beside
    (QuantConfig.int8(), (2, 2, 2, 4, 1, 2), (3, 11, 21, 37, 8), 1),
    (QuantConfig.int8(), (1, 2, 3, 3, 1, 1), (3, 11, 20, 37, 8), 1e-5),
    (UNSIGNED, (2, 1, 2, 4, 1, 1), (35, 1, 7, 16, 1), 1),
    (UNSIGNED, (2, 2, 1, 3, 1, 3), (5, 13, 72, 66, 2), 1),
    (WIDE, (2, 2, 2, 4, 1, 2), (4, 9, 80, 33, 4), 1e-5),
    (WIDE, (2, 2, 2, 4, 1, 2), (4, 9, 80, 33, 8), 1),
    (QuantConfig.int8(), (8, 1, 13, 3, 1, 1, 128), (113, 1, 1, 20, 1), 1),
    (QuantConfig.int8(), (2, 2, 5, 4, 1, 2, 128), (5, 15, 132, 65, 8), 1),
    (NARROW, (2, 2, 2, 4, 1, 1), (7, 5, 44, 35, 1), 1),
    (QuantConfig.w8a16(), (2, 2, 2, 4, 1, 1, 128), (3, 6, 21, 37, 4), 1),
    (QuantConfig.w8a16(), (2, 2, 3, 3, 1, 2), (7, 11, 132, 50, 2), 1),
    # columns and blocks that share units, of groups of warps
    (QuantConfig.int8(), "8 1", (3, 11, 21, 37, 8), 1),
    (QuantConfig.int8(), "8 1", (11, 11, 20, 150, 2), 1e-5),
    (UNSIGNED, "8 2", (70, 1, 7, 330, 1), 1),
    (UNSIGNED, "12 1", (5, 13, 72, 66, 4), 1),
    (QuantConfig.int8(), "14 4", (9, 11, 140, 290, 2), 1),
    (NARROW, "8 1", (7, 5, 300, 35, 1), 1),
    (QuantConfig.int8(), "13 1", (9, 15, 140, 250, 2), 1),
    (QuantConfig.w8a16(), "7 2", (11, 13, 72, 250, 2), 1),
    (QuantConfig.w8a16(), "5 1", (5, 15, 140, 60, 8), 1),
    (QuantConfig.w8a16(), "4 1", (7, 9, 20, 140, 4), 1e-5),
    (WIDE, "8 2", (5, 15, 140, 250, 8), 1),
    (WIDE, "10 1", (9, 11, 72, 66, 2), 1e-5),
    (UNSIGNED, "12 1", (9, 13, 257, 70, 2), 1),
    (QuantConfig.w8a16(), "4 1", (7, 9, 300, 70, 4), 1),
    (QuantConfig.int8(), None, (3, 11, 20, 37, 8), 1),
    (UNSIGNED, None, (35, 1, 300, 16, 1), 1e-5),
    (QuantConfig.w8a16(), None, (4, 3, 260, 21, 4), 1),
]
NAMES = [
    *("int8", "int8 doubles", "unsigned single", "unsigned"),
    *("wide doubles", "wide eights", "one feature"),
    *("int8 odd", "narrow", "w8a16", "w8a16 odd"),
    *("groups", "groups doubles", "groups single", "groups unsigned"),
    *("groups in parts", "groups narrow", "groups odd"),
    *("groups w8a16", "groups w8a16 eights", "groups w8a16 doubles"),
    *("groups wide eights", "groups wide pairs"),
    *("groups many", "groups w8a16 many"),
    *("few", "few unsigned", "few w8a16"),
]
# Other strides and addresses, for each way to read rows.
OTHER_LAYOUTS = {
    "batch_first": ["int8", "w8a16 odd", "groups", "groups w8a16", "few"],
    "unaligned": ["unsigned", "groups doubles", "groups wide pairs"],
}


@pytest.mark.parametrize(
    ("config", "block", "sizes", "scale", "layout"),
    [
        pytest.param(*case, layout, id=f"{name}-{layout}")
        for case, name in zip(CASES, NAMES, strict=True)
        for layout in ("rows", *(each for each, names in OTHER_LAYOUTS.items() if name in names))
    ],
)
def test_codes(host, config, block, sizes, scale, layout):
    T, N, C, H, NB = sizes
    plan = plan_of(config, C, H, scale)
    real = reals(plan, T, N, C, layout)
    x = plan.x
    steps = torch.nan_to_num((real / torch.tensor(x.scale)), 0, inf, -inf).round()
    codes = (steps.clamp(x.lo - x.zero_point, x.hi - x.zero_point) + x.zero_point).to(torch.int64)
    shape = planner.make_shape(H, 1, 1, 1, NB)
    expected = by_unit(plan, codes, shape, host)
    there = expected[:, 0] != -1
    assert there.sum() == T * N * H
    if block is None:
        block = True
    elif isinstance(block, str):
        columns, parts = map(int, block.split())
        padded, planes = -(-C // 16) * 16, numbers_of(plan).x_planes
        block = Warpgroups(columns, parts, shape.units, padded, planes)
    else:
        block = TiledReals(*block)
    size, guard = expected.shape[0], 4096
    Wx = torch.full((size + guard, expected.shape[1]), -7, dtype=torch.int32)
    flags = torch.full((N, -(-T // 4) * 4), 7, dtype=torch.uint8)
    step, following = real.stride()[:2]
    fours = not (real.data_ptr() % 16 or step % 4 or following % 4 or C % 4)
    assert fours == (layout != "unaligned" and C % 4 == 0)
    Projection(plan, shape, T, N, block).run(host, real, Wx, flags, fours=fours)
    assert (Wx[size:] == -7).all()
    assert torch.equal(Wx[:size][there], expected[there])
    assert torch.equal(flags[:, :T].t() == 1, real.isnan().any(dim=2))
    assert (flags[:, :T] < 2).all()


W8A16 = QuantConfig.w8a16()
FREE = W8A16.replace_globals(scale_kind="free")
# bits of W x and its zero point, (M, k), largest bias; how the kernel ends, what is exact
TWO_PLANES_CASES = {
    "even": (W8A16, (16, -540), (1 << 15, 17), 1 << 18, (3, True), [1, 1]),
    "odd": (W8A16, (16, 1), (1 << 15, 17), 1 << 18, (3, True), [1, 1]),
    "13 bits": (W8A16, (13, -3), (1 << 15, 18), 1 << 15, (2, True), [1, 1]),
    "8 bits": (W8A16, (8, -4), (1 << 15, 22), 1 << 15, (1, True), [1, 1]),
    "7 bits": (W8A16, (7, -5), (1 << 15, 22), 1 << 15, (0, True), [1, 1]),
    "free even": (FREE, (16, -540), (40001, 33), 1 << 30, (3, False), [1, 0]),
    "free odd": (FREE, (16, 17), (3, 4), 1 << 18, (3, False), [1, 1]),
    "free 13 bits": (FREE, (13, -3), (3, 9), 1 << 18, (2, False), [1, 1]),
    "many digits": (W8A16, (16, -541), (40001, 33), 1 << 30, (3, True), [1, 0]),
    "large": (W8A16, (16, -540), (1 << 15, 8), 1 << 9, (3, True), [0, 0]),
    "large bias": (W8A16, (16, 9), (1 << 15, 32), 1 << 32, (3, True), [0, 0]),
    "twice": (W8A16, (16, 1), (1 << 15, 14), 1 << 14, (3, True), [1, 1]),
    "long": (W8A16, (16, 1), (1 << 15, 25), 1 << 24, (3, True), [1, 1]),
    "long free": (FREE, (16, 2), (40001, 33), 1 << 24, (3, False), [1, 0]),
    "none": (W8A16, (16, 1), (0, 14), 1 << 14, (3, True), [1, 1]),
}


# Sums end alike in all kernels. The others have every width, and sums that int32 does not hold.
OF_CODES = ("even", "free odd", "13 bits", "8 bits", "7 bits", "large", "long", "long free")


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        *(("reals", name) for name in TWO_PLANES_CASES if not name.startswith("long")),
        *((("bytes", "passing")[i % 2], name) for i, name in enumerate(OF_CODES)),
    ],
)
def test_ends_of_two_planes(host, kernel, name):
    """Ties, limits and what int32 does not hold, of all zero points and widths of codes of W x."""
    config, (bits, zero), (M, k), most, (codes, powers), exact = TWO_PLANES_CASES[name]
    T, N, C, H = 4, 16, {"twice": 5, "long": 2000, "long free": 2000}.get(name, 20), 37
    generator = torch.Generator().manual_seed(k)
    plan = plan_of(config.replace("matmul.Wx", bitwidth=bits), C, H, 1)
    quantizers, part = dict(plan.frozen.quantizers), plan.weights
    quantizers["matmul.Wx"] = replace(quantizers["matmul.Wx"], zero_point=zero)
    Ms, ks = torch.full((3 * H,), M), torch.full((3 * H,), k)
    biases = torch.randint(-most, most + 1, (3 * H,), generator=generator)
    part = replace(part, Bw=biases, Wx=replace(part.Wx, multipliers=(Ms,), shift=ks))
    plan = replace(plan, weights=part, frozen=replace(plan.frozen, quantizers=quantizers))
    x = plan.x
    values = torch.randint(-3, 4, (T, N, C), generator=generator) + x.zero_point
    values[0, ::2], values[0, 1::2] = x.lo, x.hi
    # the largest sums; the last step keeps small ones, for ties
    values[2, :8] = torch.where(part.W[:8] > 0, x.hi, x.lo)
    values[2, 8:] = torch.where(part.W[:8] > 0, x.lo, x.hi)
    values[1] = torch.randint(x.lo, x.hi + 1, (N, C), generator=generator)
    numbers = numbers_of(plan)
    assert epilogue_of(numbers) == Epilogue(2, codes, powers, C > 512)
    assert exact_of(plan, host)[0] == exact
    largest = part.W[:8].abs().sum(dim=1, dtype=torch.int64).max() * 32000
    assert (largest > 1 << 31) == (C > 512)
    shape = planner.make_shape(H, 1, 1, 1, 4 if name == "even" else 8)
    expected = by_unit(plan, values, shape, host)
    there = expected[:, 0] != -1
    if kernel == "reals":
        real = ((values - x.zero_point) * x.scale).to(torch.float32)
        block = TiledReals(2, 2, 3, 3, 1, 1)
        got = torch.full_like(expected, -7)
        flags = torch.zeros((N, -(-T // 4) * 4), dtype=torch.uint8)
        Projection(plan, shape, T, N, block).run(host, real, got, flags, fours=C % 4 == 0)
    else:
        tile = SMALL_TILE if kernel == "bytes" else WeightStationary(2, 2, 2, 4, 1)
        got = in_one(plan, values, shape, tile, host)
    assert torch.equal(got[there], expected[there])


FREE8 = QuantConfig.int8().replace_globals(scale_kind="free")
POT8 = QuantConfig.int8()
# zero point of W x, (M, k), largest bias; what is exact
ONE_PLANE_CASES = {
    "even": (POT8, -4, (1 << 14, 23), 1 << 14, [1, 1]),
    "odd": (POT8, 1, (1 << 14, 23), 1 << 14, [1, 1]),
    "lowest": (POT8, -128, (1 << 14, 24), 1 << 14, [1, 1]),
    "highest": (POT8, 127, (1 << 14, 24), 1 << 14, [1, 1]),
    "once": (POT8, 6, (1, 0), 1 << 7, [1, 1]),
    "twice": (POT8, 7, (2, 0), 1 << 7, [1, 1]),
    "many times": (POT8, 6, (1 << 5, 0), 1 << 17, [1, 1]),
    "too many times": (POT8, 6, (1 << 10, 0), 1 << 17, [0, 0]),
    "many bits": (POT8, 3, (1 << 14, 29), 1 << 22, [1, 1]),
    "many more bits": (POT8, 3, (1 << 14, 35), 1 << 22, [1, 1]),
    "too many bits": (POT8, 3, (1 << 14, 36), 1 << 23, [1, 0]),
    "all bits": (POT8, 0, (1 << 14, 34), 1 << 23, [1, 1]),
    "all bits but one": (POT8, -1, (1 << 14, 37), 1 << 23, [1, 1]),
    "far too many bits": (POT8, 70, (1 << 14, 34), 1 << 23, [1, 0]),
    "far below": (POT8, 6, (3, 0), 5 << 20, [0, 0]),
    "far below, a power": (POT8, 6, (2, 0), 7 << 20, [0, 1]),
    "free, far below": (FREE8, 5, (20001, 13), 6 << 20, [0, 0]),
    "large bias": (POT8, 3, (1 << 14, 24), 1 << 24, [0, 0]),
    "many digits": (POT8, 2, (20001, 24), 1 << 14, [1, 0]),
    "none": (POT8, 2, (0, 4), 1 << 14, [1, 0]),
    "free": (FREE8, 1, (1 << 14, 23), 1 << 14, [1, 1]),
    "free digits": (FREE8, 5, (20001, 24), 1 << 14, [1, 0]),
}


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        *((8, name) for name in ONE_PLANE_CASES),
        (13, "even"),
        (13, "large bias"),
        (13, "free digits"),
    ],
)
def test_ends_of_one_plane(host, columns, name):
    """Ties and limits where instructions round and limit, and where they may not."""
    config, zero, (M, k), most, exact = ONE_PLANE_CASES[name]
    found, codes = ends_of_one_plane(host, columns, config, zero, M, k, most)
    assert found == exact
    # results of these two are next to nothing or far beyond the limits
    fewer = name in ("too many times", "all bits but one")
    assert M == 0 or codes.unique().numel() > (20 if fewer else 40)


def test_any_ends_of_one_plane(host):
    """Of any zero point, power of two and size of biases."""
    draw, held = random.Random(0), []
    for _ in range(10):
        k = draw.randrange(-12, 24)
        most = 1 << draw.randrange(max(k, 0), 24)
        zero = draw.choice([draw.randrange(-128, 128), draw.randrange(-2, 3)])
        held.append(ends_of_one_plane(host, 8, POT8, zero, 1 << 14, k + 14, most)[0][1])
    assert 2 < sum(held) < 8, held


@pytest.mark.parametrize("rule", ["half_away", "half_up", "floor"])
def test_any_ends_of_one_plane_by_other_rules(host, rule):
    config, held = POT8.replace_globals(rounding=rule, rounding_input="half_even"), []
    draw = random.Random(1)
    for _ in range(6):
        k = draw.randrange(-3, 24)
        most = 1 << draw.randrange(max(k, 0), 24)
        zero = draw.choice([-128, 127, draw.randrange(-128, 128), draw.randrange(-2, 3)])
        held.append(ends_of_one_plane(host, 8, config, zero, 1 << 14, k + 14, most)[0][1])
    assert 0 < sum(held) < 6, held


def ends_of_one_plane(host, columns, config, zero, M, k, most):
    """Compares ends of sums with their definition; what is exact of them, and codes of W x."""
    T, N, C, H, NB = 4, 40, 20, 37, 2 if columns == 8 else 8
    generator = torch.Generator().manual_seed(k)
    plan = plan_of(config, C, H, 1)
    quantizers, part = dict(plan.frozen.quantizers), plan.weights
    quantizers["matmul.Wx"] = replace(quantizers["matmul.Wx"], zero_point=zero)
    biases = torch.randint(-most, most + 1, (3 * H,), generator=generator)
    if M:  # ties and what is beside them, where x is its zero point
        farthest = min(most * M >> k, 150)
        steps = torch.randint(-farthest, farthest + 1, (3 * H,), generator=generator)
        beside = torch.randint(-1, 2, (3 * H,), generator=generator)
        ties = ((steps + 0.5) * 2.0**k / M).round().to(torch.int64) + beside
        biases[2:] = ties[2:].clamp(-most, most)
    biases[:2] = torch.tensor([-most, most])
    multipliers = (torch.full((3 * H,), M),)
    Wx = replace(part.Wx, multipliers=multipliers, shift=torch.full((3 * H,), k))
    part = replace(part, Bw=biases, Wx=Wx)
    plan = replace(plan, weights=part, frozen=replace(plan.frozen, quantizers=quantizers))
    x = plan.x
    values = torch.randint(-3, 4, (T, N, C), generator=generator) + x.zero_point
    values[0] = x.zero_point
    values[1] = torch.randint(x.lo, x.hi + 1, (N, C), generator=generator)
    values[2, :20] = torch.where(part.W[:20] > 0, x.hi, x.lo)
    values[2, 20:] = torch.where(part.W[:20] > 0, x.lo, x.hi)
    # one product each, so that many results are ties or a step beside
    values[3] = torch.where(torch.arange(C) == 3, torch.arange(N)[:, None] + x.lo, x.zero_point)
    if M >> k > 2:  # results that are small while what is added up is not
        sums = (part.W.to(torch.int64) * (values[2, :1] - x.zero_point)).sum(dim=1)
        part.Bw[2:] = -sums[2:] + torch.randint(-1, 2, (3 * H - 2,), generator=generator)
    numbers = numbers_of(plan)
    assert numbers.form.rounding or epilogue_of(numbers) == Epilogue(1, 1, config is POT8)
    shape = planner.make_shape(H, 1, 1, 1, NB)
    expected = by_unit(plan, values, shape, host)
    there = expected[:, 0] != -1
    real = ((values - x.zero_point) * torch.tensor(x.scale)).to(torch.float32)
    block = Warpgroups(columns, 1, shape.units, -(-C // 16) * 16)
    got = torch.full_like(expected, -7)
    flags = torch.zeros((N, -(-T // 4) * 4), dtype=torch.uint8)
    Projection(plan, shape, T, N, block).run(host, real, got, flags, fours=True)
    assert torch.equal(got[there], expected[there]), (zero, M, k, most)
    return exact_of(plan, host)[0], expected[there]


def with_scale(plan, scale):
    """The plan with another scale of x beside the same multipliers."""
    quantizers = {**plan.frozen.quantizers, "input.x": replace(plan.x, scale=scale)}
    frozen = replace(plan.frozen, quantizers=quantizers)
    return replace(plan, frozen=frozen, weights=replace(plan.weights))


@pytest.mark.parametrize("scale", [2.0**-90, 3e-5, 0.0123, 1 / 3, 1.0, 1.9999999, 7e8, 2.0**90])
def test_the_division_rounds_as_division(host, scale):
    """Values beside all ties give the codes of a true division, which are their own at scale 1."""
    plan = plan_of(QuantConfig.w8a16(), 4, 16, 1)
    shape = planner.make_shape(16, 1, 1, 1, 1)
    block = TiledReals(1, 1, 2, 3, 1, 1)
    generator = torch.Generator().manual_seed(5)
    halves = torch.randint(-66000, 66000, (200, 1, 4), generator=generator)
    one = torch.tensor(scale, dtype=torch.float32)
    x = (halves.to(torch.float64) * 0.5 * one).to(torch.float32)
    bits = x.view(torch.int32) + torch.randint(-1, 2, x.shape, generator=generator)
    x = torch.where(x == 0, x, bits.to(torch.int32).view(torch.float32))
    lo, hi = plan.x.lo - plan.x.zero_point, plan.x.hi - plan.x.zero_point
    codes = (x / one).round().clamp(lo, hi)
    found = []
    flags = torch.zeros(1, 200, dtype=torch.uint8)
    for real, unit in ((x, one.item()), (codes, 1.0)):
        Wx = torch.zeros((200 * 16, 2), dtype=torch.int32)
        made = Projection(with_scale(plan, unit), shape, 200, 1, block)
        made.run(host, real, Wx, flags, fours=True)
        found.append(Wx)
    assert torch.equal(*found)
    assert found[0].unique().numel() > 100


def test_kernels_have_what_scales_and_features_need():
    known = {}
    for C in (128, 129, 132):
        plan = plan_of(QuantConfig.int8(), C, 16, 1)
        for scale in (0.25, 0.375):
            shape = planner.make_shape(16, 1, 1, 1, 1)
            macros = dict(Projection(with_scale(plan, scale), shape, 1, 1, small()).kernel.macros)
            known[C, scale] = macros["SHORT"], macros["FOURS"], macros["EXACT"]
    assert known == {
        (128, 0.25): (1, 1, 1),
        (128, 0.375): (1, 1, 0),
        (129, 0.25): (0, 0, 1),
        (129, 0.375): (0, 0, 0),
        (132, 0.25): (0, 1, 1),
        (132, 0.375): (0, 1, 0),
    }


def test_threads_and_memory_follow_blocks():
    block = TiledReals(4, 2, 7, 3, 2, 2)
    assert (block.units, block.rows, block.threads) == (64, 112, 256)
    shared = 3 * 64 * 192 + 120 * 272 + 12 * 112 + 36 * 128
    assert (blocks_of(block, 12800), block.shared_bytes(256, 256, 1)) == (230, shared)


def test_choices_follow_sizes():
    """Few rows go to many small blocks, many rows to large ones, many features come as codes."""
    assert choose_tiled(128, 100, 64, 1, 132) == small(4)
    assert choose_tiled(256, 1000, 128, 1, 132) == small(8)
    assert choose_tiled(256, 6400, 128, 1, 132, alone=False) == medium(2)
    assert choose_tiled(256, 32000, 80, 1, 132) == TALL
    assert choose_tiled(512, 12800, 256, 1, 132, alone=False) == medium()
    assert choose_tiled(1024, 12800, 512, 1, 132) is None
    assert choose_tiled(256, 12800, 256, 2, 132, alone=False) == two_planes(2)
    for block, planes in ((small(), 1), (medium(), 1), (TALL, 1), (two_planes(), 2)):
        assert block.shared_bytes(512, 384, planes) <= 99 << 10


def test_many_weights_stay_and_take_codes():
    hopper = SimpleNamespace(clusters=lambda: {1: 132, 2: 66}, arch="sm_90a")
    numbers = numbers_of(plan_of(QuantConfig.int8(), 256, 16, 1))
    for H, reals in ((512, True), (1024, False)):
        shape = planner.make_shape(H, 1, 1, 1, 8)
        assert weight_stationary(hopper, numbers, shape, 200, 64)
        assert bool(choose_reals(hopper, numbers, shape, 200, 64)) is reals


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("rows", [4100, 6400, 8000, 10240, 12800])
def test_large_blocks_have_a_multiprocessor_each(rows, planes):
    block = choose_tiled(512, rows, 384, planes, 132)
    assert block.blocks == 1
    assert -(-rows // block.rows) * block.parts <= 132
    assert block.shared_bytes(512, 384, planes) <= MOST_SHARED
    # larger ones have no room for so many units
    assert choose_tiled(8192, rows, 384, 1, 132).shared_bytes(4096, 384, 1) <= MOST_SHARED


def test_groups_take_many_rows_where_there_are_groups():
    """Blocks have a multiprocessor each, and most of these are busy."""
    hopper = SimpleNamespace(clusters=lambda: {1: 132, 2: 66}, arch="sm_90a")
    shape = planner.make_shape(256, 2, 1, 1, 2)
    numbers = numbers_of(plan_of(QuantConfig.int8(), 256, 256, 1))
    found = choose_reals(hopper, numbers, shape, 100, 128)
    assert found == Warpgroups(13, 1, 256, 256)
    assert (blocks_of(found, 12800), found.group_tiles, found.stages) == (124, 2, 3)
    assert found.shared_bytes == 128 * (2 * 3 * 192 + 2 * 104) + 48 + 12 * 104 + 24 * 256
    assert choose_reals(hopper, numbers, shape, 100, 64) == Warpgroups(13, 2, 256, 256)
    assert choose_reals(hopper, numbers, shape, 100, 32) == Warpgroups(8, 2, 256, 256)
    assert isinstance(choose_reals(hopper, numbers, shape, 100, 8), TiledReals)
    # one that is over sooner than others of as much work, which would start again and again
    assert choose_warpgroups(512, 12800, 256, 1, 132) == Warpgroups(14, 1, 512, 256)
    for arch in ("sm_80", "sm_100"):
        other = SimpleNamespace(clusters=hopper.clusters, arch=arch)
        assert isinstance(choose_reals(other, numbers, shape, 100, 128), TiledReals)
    numbers = numbers_of(plan_of(WIDE, 256, 256, 1))
    assert choose_reals(hopper, numbers, shape, 100, 128) == found
    assert choose_warpgroups(128, 12800, 128, 1, 132) == Warpgroups(13, 1, 128, 128)
    assert choose_warpgroups(128, 12800, 128, 2, 132) == Warpgroups(7, 1, 128, 128, 2)
    assert choose_warpgroups(64, 12800, 128, 2, 132) is None
    # a plane takes the room of a row
    numbers = numbers_of(plan_of(QuantConfig.w8a16(), 256, 256, 1))
    assert choose_reals(hopper, numbers, shape, 100, 64) == Warpgroups(7, 1, 256, 256, 2)


@pytest.mark.parametrize("units", [16, 100, 256, 1024, 4096])
@pytest.mark.parametrize("padded", [16, 128, 144, 384])
@pytest.mark.parametrize("planes", [1, 2])
def test_groups_have_room(units, padded, planes):
    for rows in (3072, 9600, 25600, 1 << 20):
        found = choose_warpgroups(units, rows, padded, planes, 132)
        if rows * units * padded < 20_000_000:
            assert found is None
            continue
        if found is None:  # two planes of one tile, where all would start twice
            assert (planes, units <= 64, rows) in {(2, True, 9600), (2, True, 25600)}
            continue
        assert found.shared_bytes <= MOST_SHARED
        assert found.panels <= found.stages
        assert found.parts <= -(-units // 64)
    assert choose_warpgroups(units, 1500, padded, planes, 132) is None
    assert choose_warpgroups(units, 1 << 20, 400, planes, 132) is None
