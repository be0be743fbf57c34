"""Random plans in the integer profile of ONNX: every code that ONNX Runtime gives is the plan's."""

import pytest
import torch
from random_plans import random_case
from random_stacks import random_stack
from torch.nn.utils.rnn import pack_padded_sequence

from quant_gru import QuantGRUError, export_onnx
from quant_gru.config.fields import ROUNDINGS
from quant_gru.integer import cell as reference
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import build_table
from quant_gru.integer.weighted_sum import WeightedSum

ir = pytest.importorskip("onnx_ir")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from quant_gru.interchange.onnx.boundary import moved  # noqa: E402
from quant_gru.interchange.onnx.builder import (  # noqa: E402
    CONTAINERS,
    Builder,
    graph_input,
    model_of,
)
from quant_gru.interchange.onnx.exact import Term, clipped, rule_of, weighted_sum  # noqa: E402
from quant_gru.interchange.onnx.integer import IntegerCell  # noqa: E402
from quant_gru.interchange.onnx.layers import codes_of_scan, steps_that_run  # noqa: E402
from quant_gru.interchange.onnx.lookups import limits, look_up  # noqa: E402
from quant_gru.interchange.onnx.verify import session_of  # noqa: E402


def run(model, **feeds):
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    found = session_of(proto.SerializeToString()).run(
        None, {name: codes.numpy() for name, codes in feeds.items()}
    )
    return [torch.from_numpy(each) for each in found]


def on_codes(case):
    """A model of one layer and direction with codes as inputs and outputs."""
    plan, b = case.plan, Builder()
    cell = IntegerCell(plan)
    C, H = plan.input_size, plan.hidden_size
    x = graph_input("x", CONTAINERS[str(plan.x.container)], "T", "N", C)
    h0 = graph_input("h0", cell.code_type, "N", H)
    lengths = graph_input("lengths", "INT64", "N")
    v = moved(b, x, plan.x, cell.state_type)
    runs = None if case.lengths is None else steps_that_run(b, x, lengths)
    last, collected = codes_of_scan(b, cell, v, cell.from_codes(b, h0), runs, case.reverse)
    outputs = {
        "out": (
            cell.to_codes(b, b.cast(collected, cell.state_type)),
            cell.code_type,
            ("T", "N", H),
        ),
        "last": (cell.to_codes(b, last), cell.code_type, ("N", H)),
    }
    inputs = [x, h0] if runs is None else [x, h0, lengths]
    return model_of(b, inputs, outputs)


def of_one_step(plan, N):
    """A model of one step of real values, with codes as outputs."""
    b, cell = Builder(), IntegerCell(plan)
    C, H = plan.input_size, plan.hidden_size
    x, h0 = graph_input("x", "FLOAT", 1, N, C), graph_input("h0", "FLOAT", 1, N, H)
    _, h = cell.once(b, x, None, h0)
    return model_of(b, [x, h0], {"h": (cell.to_codes(b, h), cell.code_type, (1, N, H))})


@pytest.mark.parametrize("rule", ROUNDINGS)
@pytest.mark.parametrize("kind", ["w8a8", "w8a16", "w16a16", "mixed", "few"])
def test_a_step_of_its_own(kind, rule):
    """It has other nodes than a Scan has; the rows are fixed or not."""
    for seed in range(2300, 2304):
        case = random_case(seed, kind, rule, apart=seed % 2 == 1)
        plan, codes = case.plan, case.x.flatten(0, 1)[None]
        x, h0 = plan.border.dequantize(codes), case.h0[torch.arange(codes.shape[1]) % len(case.h0)]
        h0 = plan.h.dequantize(h0)
        given = plan.border.quantize(x), plan.h.quantize(h0)
        expected, _ = reference.run(plan, *given, None, False)
        N = codes.shape[1] if seed < 2302 else "N"
        (found,) = run(of_one_step(plan, N), x=x, h0=h0[None])
        assert torch.equal(found, expected), (seed, N)


def difference(case, model):
    feeds = {"x": case.x, "h0": case.h0}
    if case.lengths is not None:
        feeds["lengths"] = case.lengths
    found = run(model, **feeds)
    expected = reference.run(case.plan, case.x, case.h0, case.lengths, case.reverse)
    return [int((ours != theirs).sum()) for ours, theirs in zip(found, expected, strict=True)]


@pytest.mark.parametrize("kind", ["w8a8", "w8a16", "w16a16", "mixed"])
def test_codes_up_to_16_bits_are_those_of_the_plan(kind):
    for seed in range(2000, 2008):
        case = random_case(seed, kind)
        assert difference(case, on_codes(case)) == [0, 0], seed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["w8a8", "w8a16", "w16a16", "mixed"])
@pytest.mark.parametrize("rule", ["half_away", "half_up", "floor", "double"])
def test_every_rule_of_rounding(rule, kind):
    for seed in range(2100, 2106):
        case = random_case(seed, kind, rule)
        assert difference(case, on_codes(case)) == [0, 0], seed


@pytest.mark.parametrize("kind", ["w8a8", "w8a16", "w16a16", "mixed"])
def test_scales_apart(kind):
    """Scales that do not fit the values: multipliers of 0, and sums far beyond all limits."""
    for seed in (0, 1, 2, 3, 4, 14, 30):
        case = random_case(seed, kind, ROUNDINGS[seed % len(ROUNDINGS)], apart=True)
        assert difference(case, on_codes(case)) == [0, 0], seed


@pytest.mark.slow
def test_wider_codes_are_those_of_the_plan_or_refused():
    refused = 0
    for seed in range(2000, 2030):
        case = random_case(seed, "wide")
        try:
            model = on_codes(case)
        except QuantGRUError:
            with pytest.raises(QuantGRUError, match=r"below 2\^62"):
                on_codes(case)
            refused += 1
            continue
        assert difference(case, model) == [0, 0], seed
    assert refused < 15


def test_a_sum_of_narrow_codes_beyond_62_bits():
    case = random_case(10667, "w16a16")
    assert case.plan.frozen.sums["output.h"].tier == "e"
    assert difference(case, on_codes(case)) == [0, 0]


@pytest.mark.parametrize("k", [20, 40, 62, 63, 64, 70, 80])
@pytest.mark.parametrize("rule", ROUNDINGS)
def test_split_sums_round_by_every_rule(rule, k):
    """Python integers are the yardstick; halves and their neighbours are among the values."""
    M, most = (1 << 40) + 1, 1 << 33
    total = WeightedSum((M, 3), k, 0, -(1 << 31), (1 << 31) - 1, "e", rule)
    halves = [each * (1 << max(k - 41, 0)) for each in range(-6, 7)]
    v = torch.tensor([each for each in halves if abs(each) < most] + [most - 1, 1 - most, 1, -1])
    v, w = (each.flatten() for each in torch.meshgrid(v, v[-8:], indexing="ij"))
    b = Builder()
    x, y = graph_input("x", "INT64", "n"), graph_input("y", "INT64", "n")
    terms = [Term((b.cast(each, "DOUBLE"),), most << 2) for each in (x, y)]
    found = weighted_sum(b, "op", rule_of(total), terms, "DOUBLE")
    (found,) = run(model_of(b, [x, y], {"out": (found, "DOUBLE", ("n",))}), x=v, y=w)
    assert torch.equal(found.long(), total(v, w))


@pytest.mark.slow
def test_stacks_of_layers_and_directions(tmp_path):
    """`export_onnx` compares the file with the plan, on other sizes, too."""
    for seed in range(12):
        case = random_stack(seed)
        x = torch.nan_to_num(case.x)
        if case.lengths is not None:
            x = pack_padded_sequence(x, case.lengths, enforce_sorted=False)
        h0 = None if case.h0 is None else torch.nan_to_num(case.h0)
        report = export_onnx(case.gru, tmp_path / "gru.onnx", x if h0 is None else (x, h0))
        assert set(report) == {"output", "h_n"}, seed
        assert all(each.values and not each.differing for each in report.values()), seed


@pytest.mark.slow
@pytest.mark.parametrize("k", [-40, -3, 0, 1, 7, 30, 45, 61, 62, 63, 70])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rule", ROUNDINGS)
def test_rounding_at_every_shift(rule, k, wide):
    M, most = (3, 1 << 59) if wide else (5, 1 << 49)
    total = WeightedSum((M, M), k, 2, -(1 << 15), (1 << 15) - 1, "d", rule)
    step = max(1 << max(k - 1, 0), 1)
    ends = [each * step // M + near for each in range(-9, 10) for near in (-1, 0, 1)]
    v = torch.tensor([each for each in ends if abs(each) < most] + [most - 1, 1 - most, 0])
    b = Builder()
    x = graph_input("x", "INT64", "n")
    terms = [Term((b.cast(x, "DOUBLE"),), most // 2), Term((b.float64(0),), most // 2)]
    if wide:
        # float64 does not hold every int64, so the values are products
        v = torch.tensor(sorted({int(each) >> 20 for each in v}))
        terms[0] = Term((b.cast(x, "DOUBLE"), b.float64(1 << 20)), most // 2)
    found = weighted_sum(b, "op", rule_of(total), terms, "DOUBLE")
    model = model_of(b, [x], {"y": (found, "DOUBLE", ("n",))})
    (found,) = run(model, x=v)
    factor = 1 << 20 if wide else 1
    expected = total(v * factor, torch.zeros_like(v)) - 2
    assert found.to(torch.int64).tolist() == expected.tolist()


@pytest.mark.parametrize("activation", ["exact", "pwl", "quadratic"])
@pytest.mark.parametrize("bits", [1, 8, 16, 20, 28])
@pytest.mark.parametrize("function", ["sigmoid", "tanh"])
def test_tables(function, bits, activation):
    pre = Quantizer(bits, True, 2.0 ** (4 - bits), min(3, (1 << (bits - 1)) - 1))
    out = Quantizer(bits, True, 2.0 ** (1 - bits))
    table = build_table(function, pre, out, activation)
    b = Builder()
    x = graph_input("x", "DOUBLE", "n")
    v = clipped(b, x, *limits(table, pre), "DOUBLE")
    y = look_up(b, "gate.z_out", [table], [pre], v, "DOUBLE", 1)
    model = model_of(b, [x], {"y": (y, "DOUBLE", ("n",))})
    count = min(1 << bits, 1 << 14)
    codes = torch.linspace(pre.lo, pre.hi, count, dtype=torch.float64).round().long()
    (found,) = run(model, x=(codes - pre.zero_point).double())
    assert torch.equal(found.long() + table.zero_point, table(codes))
