"""The kernels of the backward on the host, thread by thread, against float64: no GPU needed."""

import gc
from dataclasses import replace

import pytest
import torch
from backward_cases import (
    BOUNDS,
    both_directions,
    errors,
    outputs,
    plans_of,
    random_gradients,
    random_tape,
)
from host_machine import COMPILER
from random_plans import random_case

from quant_gru import QuantConfig, QuantGRUError
from quant_gru.integer.backward import Tape, Wanted, complete, straight_through
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.backward import inputs, launch_plan, layer, time_chunks
from quant_gru.kernels.cuda.backward.launch_plan import POLICY
from quant_gru.kernels.cuda.recurrence.planner import our_errors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
]
ALL = Wanted(h=True)
BACK_SHAPE, BACK_GRID = launch_plan.VARIABLES


def check(host, tapes, precision, wanted=Wanted(h=True), seed=0):  # noqa: B008
    given = [random_gradients(tape, seed + i) for i, tape in enumerate(tapes)]
    out, last = zip(*given, strict=True)
    found = layer.backward(tapes, out, last, wanted, precision, host)
    for got, tape, each in zip(found, tapes, given, strict=True):
        worst = errors(got, tape, *each, wanted)
        assert all(error < BOUNDS[precision] for error in worst.values()), worst
    return found


FUSED = {"op.rRh": None, "op.old_contrib": None, "op.new_contrib": None}


def fused(config):
    for name in FUSED:
        config = config.replace(name, bitwidth=None)
    return config


def asymmetric(config):
    for name in ("input.x", "output.h"):
        config = config.replace(name, is_unsigned=True, is_symmetric=False)
    return config


CONFIGS = {
    "int8": QuantConfig.int8(),
    "int8-free": QuantConfig.int8().model_copy(update={"scale_kind": "free"}),
    "int8-fused": fused(QuantConfig.int8()),
    "int8-unsigned": asymmetric(QuantConfig.int8()),
    "w8a16": QuantConfig.w8a16(),
    "w8a16-unsigned": asymmetric(QuantConfig.w8a16()),
    "int16": QuantConfig.int16(),
    "int16-fused": fused(QuantConfig.int16()),
}


@pytest.mark.parametrize("config", CONFIGS)
def test_configurations(host, config):
    (plan,) = plans_of(5, 20, CONFIGS[config])
    for precision in BOUNDS if config in ("int8", "int16") else ("fp32",):
        check(host, [random_tape(plan, 6, 5)], precision)


@pytest.mark.parametrize(
    ("rule", "config"),
    [("half_away", "int8"), ("half_up", "int8"), ("floor", "int8-free"), ("half_away", "int16")],
)
def test_rules_of_rounding(host, rule, config):
    (plan,) = plans_of(5, 20, CONFIGS[config].replace_globals(rounding=rule))
    host.launched.clear()
    check(host, [random_tape(plan, 6, 5)], "fp32")
    assert any("QG_RULE" in macros for _, macros in host.launched)


@pytest.mark.parametrize(("C", "config"), [(530, "int8"), (532, "int8-unsigned"), (532, "w8a16")])
def test_more_features_than_a_warp_reads_at_once(host, C, config):
    (plan,) = plans_of(C, 20, CONFIGS[config])
    check(host, [random_tape(plan, 2, 3)], "fp32")


# blocks, tiles, split, rows; units
SHAPES = [
    ("1,1,1,8", 24, "bf16"),
    ("1,2,1,4", 24, "fp32"),
    ("1,1,4,2", 24, "bf16"),
    ("2,1,1,8", 24, "tf32"),
    ("2,2,1,1", 40, "bf16"),
    ("4,1,2,8", 56, "bf16"),
    ("4,3,1,8", 56, "bf16"),
    ("4,3,1,2", 56, "fp32"),
]


@pytest.mark.parametrize(("shape", "H", "precision"), SHAPES)
def test_shapes(host, monkeypatch, shape, H, precision):
    """Every way to lay the recurrence out, with rows that fill no tile."""
    monkeypatch.setenv(BACK_SHAPE, shape)
    (plan,) = plans_of(3, H, weights=2)
    check(host, [random_tape(plan, 5, 9, lengths=True)], precision)
    macros = [macros for name, macros in host.launched if name == "back"][-1]
    assert shape == ",".join(str(macros[name]) for name in ("CL", "MT", "KS", "NB"))


@pytest.mark.parametrize(("config", "p"), [("int8", 0.3), ("int8", 1.0), ("int16-fused", 0.1)])
@pytest.mark.parametrize("held", [False, True])
def test_zoneout(host, config, p, held):
    """Of units that keep a share of their state, unless some of them keep all of it."""
    (plan,) = plans_of(5, 20, CONFIGS[config], zoneout=p)
    tape = random_tape(plan, 6, 5, lengths=True, reverse=True, held=held)
    check(host, [tape], "fp32")
    check(host, [tape], "bf16")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_lengths_and_held_units(host, reverse, lengths, held):
    (plan,) = plans_of(5, 20)
    check(host, [random_tape(plan, 6, 5, lengths=lengths, reverse=reverse, held=held)], "fp32")


def test_both_directions_share_their_launches(host):
    plans = plans_of(5, 20, bidirectional=True)
    tapes = both_directions(plans, random_tape(plans[0], 6, 5))
    host.launched.clear()
    check(host, tapes, "fp32")
    names = [name for name, _ in host.launched]
    assert names == ["operands", "derivatives_bytes", "back", "outer", "outer_sums"]


def test_directions_that_differ_run_apart(host):
    plans = [plans_of(5, 20, CONFIGS[name])[0] for name in ("int8", "w8a16")]
    check(host, [random_tape(plan, 6, 5) for plan in plans], "fp32")


@pytest.mark.parametrize("kind", ["w8a8", "w8a16", "w16a16", "mixed", "wide"])
def test_random_plans(host, monkeypatch, kind):
    """Saturation at every operator, zero points anywhere."""
    for seed in range(2):
        case = random_case(seed, kind)
        tape = Tape(
            case.plan,
            case.x,
            case.h0,
            outputs(case.plan, case.x, case.h0, case.lengths, case.reverse),
            case.lengths,
            case.reverse,
        )
        check(host, [tape], "fp32", seed=seed)


@pytest.mark.parametrize(("config", "precision"), [("int8", "bf16"), ("int16", "fp32")])
def test_weights_that_fit_no_registers(host, monkeypatch, config, precision):
    monkeypatch.setattr(POLICY, "in_clusters", False)
    (plan,) = plans_of(5, 20, CONFIGS[config])
    check(host, [random_tape(plan, 6, 5, lengths=True, reverse=True)], precision)


# blocks, tiles, columns, warps, parked, chunk, ahead; units, rows
GRIDS = [
    ("1,1,1,2,0,1,1", 24, 9),
    ("1,2,1,1,2,2,1", 56, 5),
    ("2,1,2,2,1,1,2", 40, 20),
    ("2,4,2,2,2,2,0", 64, 17),
    ("4,2,3,1,0,1,1", 72, 25),
]


@pytest.mark.parametrize(("shape", "H", "N"), GRIDS)
def test_the_whole_gpu(host, monkeypatch, shape, H, N):
    """Blocks that are there at once, with units and rows that fill no tile."""
    monkeypatch.setenv(BACK_GRID, shape)
    (plan,) = plans_of(3, H, CONFIGS["int8-free"], weights=2)
    tape = random_tape(plan, 5, N, lengths=True)
    (found,) = check(host, [tape], "bf16")
    macros = [macros for name, macros in host.launched if name == "back_grid"][-1]
    names = ("CL", "MT", "NT", "WARPS", "PARKED", "CHUNK", "AHEAD")
    assert shape == ",".join(str(macros[name]) for name in names)
    (again,) = check(host, [tape], "bf16")
    assert fields_equal(found, again, NAMES)


@pytest.mark.parametrize("config", ["int8", "w8a16-unsigned", "int16"])
@pytest.mark.parametrize("held", [False, True])
def test_the_whole_gpu_takes_what_others_take(host, monkeypatch, config, held):
    """Both directions, all lengths, units that stay or keep a share, pieces of time."""
    monkeypatch.setenv(BACK_GRID, "2,1,1,2,0,1,1")
    plans = plans_of(5, 24, CONFIGS[config], zoneout=0.0 if held else 0.3, bidirectional=True)
    tapes = both_directions(plans, random_tape(plans[0], 11, 5, lengths=True, held=held))
    host.launched.clear()
    whole = check(host, tapes, "bf16")
    assert [name for name, _ in host.launched].count("back_grid") == 2
    monkeypatch.setattr(layer, "most_steps", lambda *_: 4)
    found = check(host, tapes, "bf16")
    for a, b in zip(found, whole, strict=True):
        assert fields_equal(a, b, ("h0", "h"))
    # no gradient of outputs, real inputs, a state that is zero before the first step, a NaN
    nan = torch.tensor([0.0, torch.nan, 0.0, 0.0, 0.0])
    tape = replace(tapes[1], x=torch.randn(11, 5, 5), h0=None, nan=nan)
    last = random_gradients(tape)[1]
    (got,) = layer.backward([tape], [None], [last], ALL, "bf16", host)
    assert got.h0[1].isnan().all()
    assert not got.h0[[0, 2, 3, 4]].isnan().any()
    # what is more exact goes its own way
    host.launched.clear()
    check(host, tapes, "tf32")
    assert "back" in [name for name, _ in host.launched]


def fields_equal(a, b, names):
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


NAMES = ("x", "h0", "W", "R", "bw", "br", "h")


def test_a_gradient_that_is_not_there_is_a_zero_that_stays():
    """Captured graphs read it for as long as they are replayed."""
    (plan,) = plans_of(5, 20, CONFIGS["int8"])
    tape = random_tape(plan, 6, 5)
    _, last = random_gradients(tape)
    first = inputs.Call(tape, None, last).grad_out
    at = first.data_ptr()
    assert (first.shape, first.stride(), first.abs().sum()) == ((6, 5, 20), (0, 0, 0), 0)
    del first
    gc.collect()
    kept = [torch.ones(()) for _ in range(100)]
    again = inputs.Call(random_tape(plan, 4, 3), None, None).grad_out
    assert again.data_ptr() == at not in [each.data_ptr() for each in kept]
    assert not again.any()


@pytest.mark.parametrize(
    ("config", "C", "reverse"),
    [("int8", 8, False), ("int8-unsigned", 5, True), ("w8a16", 8, True), ("int16", 5, False)],
)
def test_values_none_and_nan_stand_for_codes_and_zeros(host, config, C, reverse):
    """As `complete` has it, in fewer launches: the same bits."""
    (plan,) = plans_of(C, 20, CONFIGS[config])
    T, N = 6, 5
    # beyond the limits, and in another order of memory
    x = (3 * torch.randn(N, T, C)).transpose(0, 1)
    x[1, 2, 3] = torch.nan
    codes = plan.x.quantize(x).to(plan.x.container)
    out = outputs(plan, codes, torch.full((N, 20), plan.h.zero_point, dtype=plan.h.container))
    nan = torch.tensor([0.0, 0.0, torch.nan, 0.0, 0.0])
    tape = Tape(plan, x, None, out, None, reverse, None, nan)
    grads = random_gradients(tape)
    for given in (grads, (grads[0], None), (None, grads[1]), (None, None)):
        (got,) = layer.backward([tape], *([each] for each in given), ALL, "fp32", host)
        whole, *both = complete(tape, *given)
        assert whole.nan is None
        assert not whole.x.is_floating_point()
        (expected,) = layer.backward([whole], *([each] for each in both), ALL, "fp32", host)
        for name in NAMES:
            a, b = getattr(got, name), getattr(expected, name)
            assert torch.equal(a.isnan(), b.isnan()), name
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), name
        rows = [0, 1, 3, 4]
        assert got.h0[2].isnan().all()
        assert not got.h0[rows].isnan().any()
        names = [name for name in NAMES if name not in ("W", "R", "bw", "br")]
        exact = straight_through(whole, *both, ALL)
        for name in names:
            a, b = (getattr(g, name)[..., rows, :] for g in (got, exact))
            assert (a - b).norm() <= 1e-5 * b.norm(), name


@pytest.mark.parametrize(
    ("config", "C", "H"),
    [
        ("int8", 16, 24),
        ("int8-unsigned", 12, 20),
        ("w8a16", 12, 24),
        ("int16", 8, 20),
        ("w8a16", 7, 12),
    ],
)
def test_codes_go_in_groups_where_rows_are_aligned(host, monkeypatch, config, C, H):
    """Few or many of a thread, from codes and from values at any address: the same bits."""
    (plan,) = plans_of(C, H, CONFIGS[config])
    T, N = 21, 10
    tape = random_tape(plan, T, N)
    out, last = random_gradients(tape)
    (expected,) = check(host, [tape], "fp32")
    monkeypatch.setattr(POLICY, "codes_blocks", 1)
    layer._schedules.clear()
    aligned = torch.zeros(N, T, C).transpose(0, 1)
    for x in (aligned, torch.zeros(T, N, C + 1)[..., 1:]):
        x.copy_((tape.x.float() - plan.x.zero_point) * plan.x.scale)
        given = [replace(tape, x=x)]
        (found,) = layer.backward(given, [out], [last], ALL, "fp32", host)
        assert fields_equal(found, expected, NAMES)


@pytest.mark.parametrize(("steps", "per_step"), [(4, False), (10, True)])
def test_pieces_of_time_give_the_gradients_of_the_whole(host, monkeypatch, steps, per_step):
    """Both directions at once, rows of all lengths, with units that stay."""
    if per_step:
        monkeypatch.setattr(POLICY, "in_clusters", False)
    plans = plans_of(5, 20, bidirectional=True)
    tapes = both_directions(plans, random_tape(plans[0], 11, 5, lengths=True, held=True))
    given = [random_gradients(tape, i) for i, tape in enumerate(tapes)]
    out, last = zip(*given, strict=True)
    whole = layer.backward(tapes, out, last, ALL, "fp32", host)
    monkeypatch.setattr(layer, "most_steps", lambda *_: steps)
    host.launched.clear()
    found = check(host, tapes, "fp32", ALL)
    names = [name for name, _ in host.launched]
    assert names.count("operands") == -(-11 // steps)
    for a, b in zip(found, whole, strict=True):
        assert fields_equal(a, b, ("h0", "h"))
    # no gradient of outputs, real inputs, a state that is zero before the first step
    bare = [replace(tape, x=torch.randn(11, 5, 5), h0=None) for tape in tapes]
    got = layer.backward(bare, [None, None], last, ALL, "fp32", host)
    monkeypatch.undo()
    whole = layer.backward(bare, [None, None], last, ALL, "fp32", host)
    for a, b in zip(got, whole, strict=True):
        assert per_step or fields_equal(a, b, ("h0", "h"))
        for name in ("x", "W", "R", "bw", "br"):
            ours, theirs = getattr(a, name), getattr(b, name)
            assert (ours - theirs).norm() <= 1e-5 * theirs.norm(), name


def test_memory_bounds_the_steps_of_a_piece(host, monkeypatch):
    (plan,) = plans_of(64, 64)
    tape = random_tape(plan, 12, 8)
    sizes, precision = (8, plan.input_size, plan.hidden_size), inputs.PRECISIONS["bf16"]
    assert time_chunks.most_steps(*sizes, precision, 1) > 12
    monkeypatch.setattr(time_chunks, "MOST_BYTES", 120000)
    # sums of integers have a bound of their own
    monkeypatch.setattr(POLICY, "product_bytes", 1)
    steps = time_chunks.most_steps(*sizes, precision, 1)
    assert 2 < steps < 12
    assert time_chunks.most_steps(*sizes, precision, 2) == steps // 2

    def size(tape):
        one = inputs.Call(tape, None, None)
        return launch_plan.Schedule([one], ALL, precision, host).size

    # weights do not grow with the steps
    per_step = (size(tape) - size(next(time_chunks.pieces(tape, None, 1))[0])) / 11
    assert 0.9 * 120000 / (steps + 1) <= per_step <= 1.1 * 120000 / steps
    monkeypatch.setattr(time_chunks, "MOST_BYTES", 1)
    assert time_chunks.most_steps(*sizes, precision, 1) == 1


def test_integer_products_in_chunks(host, monkeypatch):
    monkeypatch.setattr(POLICY, "product_bytes", 4000)
    for name in ("w8a16", "int16"):
        (plan,) = plans_of(5, 20, CONFIGS[name])
        check(host, [random_tape(plan, 11, 5)], "fp32")


@pytest.mark.parametrize("name", ["x", "W", "R", "bw", "br", "h"])
def test_only_what_is_wanted(host, name):
    (plan,) = plans_of(5, 20)
    tape = random_tape(plan, 6, 5)
    for wanted in (
        replace(Wanted(), **{name: False}),
        replace(Wanted(False, False, False, False, False), **{name: True}),
    ):
        check(host, [tape], "fp32", wanted)


def test_strides_of_gradients(host):
    """Of a slice of both directions, transposed, and of a sum's."""
    (plan,) = plans_of(5, 20)
    tape = random_tape(plan, 6, 5)
    wide = torch.randn(5, 6, 40)
    out = wide.transpose(0, 1)[..., 20:]
    last = torch.randn(20, 5).t()
    for given in (out, torch.ones(()).expand(6, 5, 20)):
        (got,) = layer.backward([tape], [given], [last], None, "fp32", host)
        assert max(errors(got, tape, given, last).values()) < 1e-5


def test_nan_spreads(host):
    (plan,) = plans_of(5, 20)
    tape = random_tape(plan, 6, 5, held=True)
    out, last = random_gradients(tape)
    last[2, 3] = torch.nan
    (got,) = layer.backward([tape], [out], [last], None, "fp32", host)
    assert got.h0[2].isnan().all()
    assert got.x[:-1, 2].isnan().all()
    others = [0, 1, 3, 4]
    assert not got.h0[others].isnan().any()
    assert not got.x[:, others].isnan().any()
    for each in (got.W, got.R, got.bw, got.br):
        assert each.isnan().all()


def test_no_steps_and_no_rows(host):
    (plan,) = plans_of(5, 20)
    for T, N in ((0, 2), (3, 0)):
        tape = Tape(
            plan, torch.zeros(T, N, 5), torch.zeros(N, 20), torch.zeros(T, N, 20, dtype=torch.int8)
        )
        last = torch.randn(N, 20)
        (got,) = layer.backward([tape], [torch.zeros(T, N, 20)], [last], None, "bf16", host)
        assert torch.equal(got.h0, last)
        assert got.x.shape == (T, N, 5)
        assert not any(each.any() for each in (got.W, got.R, got.bw, got.br))


def test_what_is_given_is_checked(host, monkeypatch):
    (plan,) = plans_of(5, 20)
    tape = random_tape(plan, 6, 5)
    out, last = random_gradients(tape)
    with pytest.raises(QuantGRUError, match="Expected precision to be one of bf16, tf32, fp32"):
        layer.backward([tape], [out], [last], None, "int8", host)
    with pytest.raises(QuantGRUError, match=r"Expected grad_out to be of shape \(6, 5, 20\)"):
        layer.backward([tape], [out[:-1]], [last], None, "bf16", host)
    monkeypatch.setenv(BACK_SHAPE, "3,1,1,8")
    rule = (
        f"Expected {BACK_SHAPE} to be a shape that this device can run for 20 units, got '3,1,1,8'"
    )
    with pytest.raises(QuantGRUError, match=rule):
        layer.backward([tape], [out], [last], None, "bf16", host)


RESIDENT = {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}


@pytest.mark.parametrize("H", [1, 16, 64, 100, 128, 256, 300, 512, 640, 1024])
def test_the_planner_finds_a_shape_that_fits(H):
    for planes, weight_planes in ((1, 1), (2, 2), (3, 1), (3, 2)):
        for clusters in (RESIDENT, {1: 108}):
            for N in (1, 8, 500):
                shape = _native.choose_back_shape(H, N, 2, planes, weight_planes, clusters)
                if shape is None:
                    assert H > (512 if clusters is RESIDENT and weight_planes == 1 else 100)
                    continue
                assert shape.fits
                assert shape.blocks in clusters
                assert shape.units * shape.blocks >= H


@pytest.mark.parametrize("H", [608, 648, 800, 1020, 1024, 1536, 2048])
def test_a_whole_gpu_holds_all_blocks_at_once(H):
    for clusters in (RESIDENT, {1: 108}):
        for N in (1, 5, 16, 64, 100, 500):
            for shape in _native.possible_back_grids(H, N, clusters):
                assert shape.clusters(N) <= clusters[shape.blocks]
                assert shape.registers <= 255
                assert shape.shared_bytes <= (200 if len(clusters) > 1 else 96) << 10
                assert shape.loads % shape.chunk == 0
                assert 32 * shape.loads * shape.warps * shape.blocks >= 3 * H
                assert shape.groups * 16 * shape.tiles >= H
                assert shape.rows * -(-N // shape.rows) >= N
            found = _native.choose_back_grid(H, N, clusters)
            assert H % 8 == 0 or found is None
    assert (_native.choose_back_grid(H, 64, RESIDENT) is None) == (H % 8 != 0 or H > 1024)


@pytest.mark.parametrize(
    "wanted", ["4", "1,1,1,8,0,1,a", "3,1,1,8,0,1,1", "1,1,1,8,99,1,1", "1,0,1,8,0,1,1"]
)
def test_the_override_of_the_whole_gpu_is_checked(monkeypatch, wanted):
    monkeypatch.setenv(BACK_GRID, wanted)
    with pytest.raises(QuantGRUError, match=BACK_GRID), our_errors():
        _native.choose_back_grid(64, 8, {1: 132})


@pytest.mark.parametrize("wanted", ["4", "3,1,1,8", "1,5,1,8", "1,1,1,16", "a,b,c,d"])
def test_the_shape_override_is_checked(monkeypatch, wanted):
    monkeypatch.setenv(BACK_SHAPE, wanted)
    with pytest.raises(QuantGRUError, match=BACK_SHAPE), our_errors():
        _native.choose_back_shape(64, 8, 1, 1, 1, {1: 132})
