"""Widths under a budget: exact, with what they take and what they cost."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant_gru import (
    ConfigError,
    QuantConfig,
    QuantGRUError,
    allocate_bits,
    calibrate_model,
    convert_model,
)
from quant_gru.analysis.allocation import _bounded, _by_operator, _first
from quant_gru.analysis.fronts import Block, front, undominated
from quant_gru.analysis.sizes import code_bytes, sizes_of
from quant_gru.config import OPERATORS
from quant_gru.parameters.document import bytes_of_table
from quant_gru.whole_models.convert import find_grus

DATA = torch.randn(40, 6, 5, generator=torch.Generator().manual_seed(1))


def small_gru(**options):
    torch.manual_seed(0)
    return torch.nn.GRU(5, 8, **options)


def decibels(model, quantized, x):
    with torch.no_grad():
        pairs = [(a.double(), b.double()) for a, b in zip(model(x), quantized(x), strict=True)]
    signal = sum(float(a.square().sum()) for a, _ in pairs)
    return 10 * math.log10(signal / sum(float((a - b).square().sum()) for a, b in pairs))


@pytest.fixture(scope="module")
def allocation():
    return allocate_bits(small_gru(), DATA, {"flash": 1200}, progress=False)


# --- the front


blocks = st.lists(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(-2, 9)), min_size=1, max_size=4
    ),
    min_size=1,
    max_size=4,
)


@given(blocks, st.integers(1, 2), st.integers(0, 40))
@settings(max_examples=300, deadline=None)
def test_the_front_has_the_best_of_all_combinations(choices, costs, limit):
    given_blocks = [
        Block(
            np.array([each[:costs] for each in block], dtype=float),
            np.array([each[2] for each in block], dtype=float),
        )
        for block in choices
    ]
    every = [
        (*(sum(each[k] for each in picked) for k in range(costs)), sum(e[2] for e in picked))
        for picked in itertools.product(*choices)
    ]
    within = [each for each in every if all(cost <= limit for cost in each[:-1])]
    names = ["flash", "state"][:costs]
    if not within:
        with pytest.raises(QuantGRUError, match="Expected a budget that some widths meet"):
            front(given_blocks, [limit] * costs, names)
        return
    found = front(given_blocks, [limit] * costs, names)
    best = {
        a
        for a in within
        if not any(b != a and all(x <= y for x, y in zip(b, a, strict=True)) for b in within)
    }
    rows = [
        (*cost, error)
        for cost, error in zip(found.costs.tolist(), found.errors.tolist(), strict=True)
    ]
    assert len(rows) == len(set(rows))
    assert set(rows) == best
    for row, picked in zip(rows, found.choices.tolist(), strict=True):
        parts = [block[i] for block, i in zip(choices, picked, strict=True)]
        assert row == (*(sum(e[k] for e in parts) for k in range(costs)), sum(e[2] for e in parts))


@pytest.mark.parametrize("costs", [1, 2, 3])
def test_undominated_rows(costs):
    values = np.random.default_rng(0).integers(0, 12, (200, costs + 1)).astype(float)
    found = undominated(values[:, :costs], values[:, costs])
    unique = {tuple(row) for row in values.tolist()}
    best = {a for a in unique if not any(b != a and all(np.less_equal(b, a)) for b in unique)}
    assert sorted(map(tuple, values[found].tolist())) == sorted(best)


# --- sizes


def test_codes_of_few_bits_share_bytes():
    assert [code_bytes(9, bits) for bits in (1, 2, 3, 4, 5, 8, 9, 16, 17)] == [
        2, 3, 5, 5, 9, 9, 18, 18, 36,
    ]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
def test_sizes_are_those_of_the_plan(options):
    gru = calibrate_model(convert_model(small_gru(**options), "int8"), [DATA], progress=False)
    sizes = sizes_of([gru])
    numbers = sum(each.numel() for each in small_gru(**options).parameters())
    cells = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    plans = [cell for layer in gru._plan().cells for cell in layer]
    tables = [table for cell in plans for table in cell.frozen.tables.values()]
    assert sizes.packed == numbers + sum(map(bytes_of_table, tables))
    assert sizes.tables == cells * 3 * 256
    assert (sizes.numbers, sizes.bits, sizes.average_bits) == (numbers, 8 * numbers, 8.0)
    assert sizes.state == 8 * cells
    inputs = sum(
        gru._plan().cells[layer][d].input_size
        for layer in range(gru.num_layers)
        for d in range(cells // gru.num_layers)
    )
    assert sizes.activations == inputs + cells * (1 + 3 + 3 + 9) * 8


def test_weights_of_any_width_are_packed_without_gaps_as_in_a_file():
    config = QuantConfig.int8().replace("W", bitwidth=5).replace("R", bitwidth=3)
    gru = calibrate_model(convert_model(small_gru(), config), [DATA], progress=False)
    sizes = sizes_of([gru])
    parts = {part.name: part.bytes for part in gru.freeze()._parts() if "_l0" in part.name}
    del parts["integers_l0"]  # biases, multipliers and sums
    assert parts == {"W_l0": 120 * 5 // 8, "R_l0": 192 * 3 // 8}
    tables = sum(bytes_of_table(table) for table in gru._plan().cells[0][0].frozen.tables.values())
    assert sizes.packed == sum(parts.values()) + 2 * 24 + tables


@pytest.mark.filterwarnings("ignore:one signed bit")
@pytest.mark.parametrize("preset", ["int8", "int8_wide", "w8a16", "int16"])
@pytest.mark.parametrize("bits", [1, 2, 3, 6, 16])
def test_flash_is_what_c_source_takes(preset, bits, tmp_path):
    config = getattr(QuantConfig, preset)().replace("W", bitwidth=bits)
    quantized = calibrate_model(convert_model(small_gru(), config), [DATA], progress=False)
    source, sizes = quantized.export_c(tmp_path, "gru"), sizes_of([quantized])
    assert (sizes.flash, sizes.tables) == (source.flash_bytes, source.table_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "changes"),
    [
        ((4, 8, 16), {}),
        ({"W": (1, 2, 3, 5), "gate.*": (5, 7, 8, 12), "*": (8, 16)}, {}),
        ((8, 16), {"scale_kind": "free"}),
        ((8, 16), {"rounding": "double"}),
        ({"*": (8,), "x": (8, 24)}, {}),
    ],
)
@pytest.mark.filterwarnings("ignore:one signed bit")
def test_no_allocation_takes_more_than_was_counted(widths, changes):
    """The form of weights in C source may depend on other widths, so that it is at most this."""
    config = QuantConfig.int16().replace_globals(**changes)
    found = allocate_bits(small_gru(), DATA, 1 << 20, widths, config=config, progress=False)
    problem = found._problem
    every, _ = problem.front({"flash": math.inf})
    for at in range(0, len(every.errors), max(len(every.errors) // 8, 1)):
        problem.measure(problem.widths(every, at))
        taken = sizes_of(problem.trials.grus.values()).flash
        assert taken <= every.costs[at, 0]
        if "x" not in widths:
            assert taken == every.costs[at, 0]


# --- the choice


def test_the_budget_is_kept_and_what_is_said_is_so(allocation):
    gru, chosen = small_gru(), allocation.chosen
    assert chosen.sizes.flash <= 1200
    assert sizes_of(find_grus(allocation.model).values()) == chosen.sizes
    assert decibels(gru, allocation.model, DATA) == pytest.approx(chosen.measured, abs=1e-5)
    assert abs(chosen.predicted - chosen.measured) < 1
    widths = {name: allocation.config[name].bitwidth for name in OPERATORS}
    assert {"": widths} == chosen.widths
    own = calibrate_model(convert_model(gru, allocation.config), [DATA], progress=False)
    assert sizes_of([own]) == chosen.sizes
    assert abs(decibels(gru, own, DATA) - chosen.measured) < 1


def test_it_is_better_than_uniform_widths_of_as_many_bytes(allocation):
    uniform = convert_model(small_gru(), QuantConfig.uniform(8, is_symmetric=False))
    calibrate_model(uniform, [DATA], progress=False)
    found = allocation.with_budget({"flash": sizes_of([uniform]).flash}, progress=False)
    assert found.chosen.measured > decibels(small_gru(), uniform, DATA) + 4


def test_no_widths_have_less_predicted_error():
    """All widths of a few operators, one after the other."""
    fixed = {
        name: 8 for name in OPERATORS if not name.startswith(("weight.W", "weight.R", "gate.r"))
    }
    found = allocate_bits(small_gru(), DATA, 1 << 20, fixed=fixed, progress=False)
    problem = found._problem
    every = [
        dict(zip(("weight.W", "weight.R", "gate.r_pre", "gate.r_out"), bits, strict=True))
        for bits in itertools.product((4, 8, 16), repeat=4)
    ]
    least = min(
        problem.least + sum(problem.errors["", name, bits] for name, bits in (fixed | each).items())
        for each in every
    )
    signal = problem.trials.signal
    assert found.chosen.predicted == pytest.approx(10 * math.log10(signal / least), abs=1e-9)


def test_predictions_are_finite_where_each_operator_alone_takes_away_most_of_the_error():
    errors = {("", name, bits): -0.6 * (bits == 8) for name in "abc" for bits in (4, 8)}
    errors["", "a", 2] = 5.0
    found = _bounded(errors, 0.9)
    assert found["", "a", 2] == 5.0
    assert [found["", name, 8] for name in "abc"] == pytest.approx([-0.3] * 3)
    assert _bounded(errors, 2.0) == errors


@pytest.mark.slow
def test_all_predictions_are_finite_at_few_bits():
    for widths in ((1, 4), (2, 3, 4)):
        found = allocate_bits(small_gru(), DATA, 1500, widths, progress=False)
        assert all(math.isfinite(point.predicted) for point in found.front)
        assert abs(found.chosen.predicted - found.chosen.measured) <= 0.5


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 39))
@settings(max_examples=200, deadline=None)
def test_the_first_that_is_enough(enough, guess):
    asked = []

    def is_enough(item):
        asked.append(item)
        return enough[item]

    at = _first(is_enough, range(len(enough)), guess % len(enough))
    assert at in asked
    assert len(asked) == len(set(asked)) <= 13
    if enough[at]:
        assert at == 0 or (at - 1 in asked and not enough[at - 1])
    else:
        assert at == len(enough) - 1
    if sorted(enough) == enough and any(enough):
        assert at == enough.index(True)


def test_an_error_as_budget_takes_the_fewest_bytes(allocation):
    for sqnr in (22, 25, 28, 31):
        found = allocation.with_budget({"sqnr": sqnr}, progress=False)
        chosen = found.chosen
        assert chosen.measured >= sqnr
        lost = max(chosen.predicted - chosen.measured, 0)
        below = [each for each in found.front if each.sizes.flash < chosen.sizes.flash]
        assert all(each.predicted < sqnr + 0.5 + lost for each in below)


@pytest.mark.parametrize(
    ("budget", "size"),
    [
        ({"state": 8}, lambda sizes: sizes.state),
        ({"activations": 150}, lambda sizes: sizes.activations),
        ({"bits": 6}, lambda sizes: sizes.average_bits),
        ({"packed": 700}, lambda sizes: sizes.packed),
    ],
)
def test_other_budgets(allocation, budget, size):
    ((_, most),) = budget.items()
    found = allocation.with_budget({**budget, "flash": 3000}, progress=False)
    assert size(found.chosen.sizes) <= most
    assert found.chosen.sizes.flash <= 3000


def test_groups_and_fixed_operators():
    found = allocate_bits(
        small_gru(),
        DATA,
        {"flash": 1000},
        groups=["gate.*", ["W", "R"]],
        fixed={"x": 8, "op.*": 4},
        progress=False,
    )
    (widths,) = found.chosen.widths.values()
    assert len({bits for name, bits in widths.items() if name.startswith("gate.")}) == 1
    assert widths["weight.W"] == widths["weight.R"]
    assert widths["input.x"] == 8
    assert {bits for name, bits in widths.items() if name.startswith("op.")} == {4}


def test_widths_of_operators_and_packed_bytes():
    found = allocate_bits(
        small_gru(),
        DATA,
        {"packed": math.inf, "sqnr": 25},
        {"weight.*": (2, 3, 4, 5, 6, 8), "x": (8, 16)},
        progress=False,
    )
    weights = {name for name in OPERATORS if name.startswith("weight.")}
    used = {
        bits
        for point in found.front
        for own in point.widths.values()
        for name, bits in own.items()
        if name in weights
    }
    assert used >= {3, 5, 6}
    for point in found.front:
        (own,) = point.widths.values()
        assert own["input.x"] in (8, 16)
        assert {bits for name, bits in own.items() if name not in weights} <= {4, 8, 16}
    # the fewest packed bytes that reach the decibels, not the fewest of flash
    assert found.chosen.measured >= 25
    below = [each for each in found.front if each.sizes.packed < found.chosen.sizes.packed]
    assert below
    assert all(each.predicted < 25.5 for each in below)


def test_names_decide_before_patterns_and_the_first_pattern_before_others():
    found = _by_operator({"weight.*": 4, "*": 8, "W": 2})
    assert found == dict.fromkeys(OPERATORS, 8) | {
        name: 2 if name == "weight.W" else 4 for name in OPERATORS if name.startswith("weight.")
    }
    for twice in ({"*": 8, "weight.*": 4}, {"W": 2, "weight.W": 4}):
        with pytest.raises(ConfigError, match="each name or pattern to decide for an operator"):
            _by_operator(twice)


def test_tied_operators_share_a_width():
    config = QuantConfig.int8().replace_globals(tie_x_and_h=True)
    found = allocate_bits(small_gru(), DATA, {"state": 8}, config=config, progress=False)
    (widths,) = found.chosen.widths.values()
    assert widths["input.x"] == widths["output.h"]


@pytest.mark.slow
def test_several_grus_get_a_configuration_each():
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.first, model.last = torch.nn.GRU(5, 8), torch.nn.GRU(8, 4)
    run = lambda m, x: m.last(m.first(x)[0])[0]  # noqa: E731
    found = allocate_bits(model, DATA, 1500, forward_fn=run, progress=False)
    assert set(found.config) == {"first", "last"}
    own = calibrate_model(convert_model(model, found.config), [DATA], run, progress=False)
    assert sizes_of(find_grus(own).values()) == found.chosen.sizes


def test_measured_on_other_data():
    other = torch.randn(40, 6, 5, generator=torch.Generator().manual_seed(2))
    found = allocate_bits(small_gru(), DATA, 800, test=other, progress=False)
    assert "dB on the test data; " in str(found)
    assert "best allocations, measured on the data of the choice:" in str(found)
    assert decibels(small_gru(), found.model, other) == pytest.approx(
        found.chosen.measured, abs=1e-5
    )


def test_bytes_may_be_a_text(allocation):
    found = allocation.with_budget({"flash": "1.5 kB", "state": "1 KiB"}, progress=False)
    assert found.budget == {"flash": 1500, "state": 1024}
    assert allocation.with_budget("1.5 kB", progress=False).chosen == found.chosen


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"budget": {}}, "Expected a budget of flash"),
        ({"budget": {"flesh": 1}}, "did you mean 'flash'"),
        ({"budget": {"flash": "1 kb"}}, "a number, or a text such as '60 kB', got '1 kb'"),
        ({"budget": {"sqnr": "1 kB"}}, "Expected a budget to be a number, got '1 kB' .'sqnr'"),
        ({"budget": math.nan}, "Expected a budget to be bytes: a number, or a text .* got nan"),
        ({"budget": 100}, "the least of each is flash"),
        ({"budget": {"sqnr": 200}}, "Expected widths that reach 200 dB"),
        ({"budget": 800, "widths": ()}, "Expected widths to choose from"),
        ({"budget": 800, "widths": {"W": ()}}, r"Expected widths to choose from, got none \('W'\)"),
        ({"budget": 800, "widths": (4, 33)}, "Expected widths to be integers from 1 to 32, got 33"),
    ],
)
def test_bad_budgets(options, text):
    with pytest.raises(QuantGRUError, match=text):
        allocate_bits(small_gru(), DATA, progress=False, **options)


def test_bad_names():
    with pytest.raises(
        ConfigError, match=r"Expected a pattern that fits an operator, got 'gates\.\*'"
    ):
        allocate_bits(small_gru(), DATA, 800, groups=["gates.*"], progress=False)
    with pytest.raises(ConfigError, match="Expected one width for the operators of a group"):
        allocate_bits(
            small_gru(), DATA, 800, groups=[["W", "R"]], fixed={"W": 4, "R": 8}, progress=False
        )


def test_widths_of_a_group_must_have_one_in_common():
    with pytest.raises(ConfigError, match=r"none in common: weight\.W \[4\], weight\.R \[8\]"):
        allocate_bits(small_gru(), DATA, 800, {"W": (4,), "R": (8,)}, groups=[["W", "R"]])


def test_forms_of_the_result(allocation):
    text = str(allocation)
    assert "no other widths have less predicted error within the budget" in text
    assert text.count("\n") > 17 + len(allocation.front)
    document = json.loads(allocation.to_json())
    assert document["chosen"]["widths"] == allocation.chosen.widths
    assert document["chosen"]["sizes"]["flash"] == allocation.chosen.sizes.flash
    assert "<svg" in allocation._repr_html_()
    assert allocation.to_svg().count("<circle") == len(allocation.front) + 1
