"""Whole calls in prepared launches, on the host: as the reference, NaN included."""

import threading

import pytest
import torch
from bits import assert_same_bits
from gate_structs import cell_of
from gpu_pairs import of_random_ranges
from host_machine import COMPILER, Host

from kept import calibrated_gru
from quant_gru import QuantConfig, QuantGRU
from quant_gru.config.fields import ROUNDINGS
from quant_gru.integer import cell as reference
from quant_gru.integer.backward import Kept
from quant_gru.kernels import dispatch
from quant_gru.kernels._native import shared_form
from quant_gru.kernels.cuda.forward import executor, stack
from quant_gru.kernels.cuda.plan import structure
from quant_gru.kernels.cuda.plan.tensors import numbers_of
from quant_gru.kernels.cuda.projection.select import POLICY
from quant_gru.kernels.cuda.recurrence import planner

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
]

C, H = 5, 20
nan = float("nan")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setenv(planner.VARIABLE, "1,1,1,4")
    with torch.no_grad():
        yield


def quantized(config="int8", H=H, **options):
    return calibrated_gru(C, H, config, **options)


def checked(gru, host, x, hx=None, lengths=None):
    """The stack's result, which has to be the reference's."""
    found = stack.Stack(gru._plan(), host).run(x, hx, lengths)
    if lengths is None:
        expected = gru(x, hx)
    else:
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        y, h_n = gru(packed, hx)
        expected = torch.nn.utils.rnn.pad_packed_sequence(y, total_length=x.shape[0])[0], h_n
        inside = torch.arange(x.shape[0])[:, None] < lengths
        found = found[0].masked_fill(~inside[..., None], 0), found[1]
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_bits(ours, theirs)
    return found


def test_first_calls_of_threads(host, monkeypatch):
    """A thread does not read arrays that another one has asked for, but not written."""
    x = torch.randn(5, 3, C)
    checked(quantized(), host, x)  # compiles the kernels
    gru, launch, found = quantized(), host.launch, []
    plan, expected = gru._plan(), gru(x)

    def call():
        with torch.no_grad():
            found.append(stack.Stack(plan, host).run(x, None))

    other, emulator = threading.Thread(target=call), threading.Lock()

    def late(kernel, *given):
        if kernel.function == "begin_derived" and other.ident is None:
            other.start()
            other.join(0.5)
        with emulator:  # it runs one kernel at a time
            launch(kernel, *given)

    monkeypatch.setattr(host, "launch", late)
    call()
    other.join()
    assert len(found) == 2
    for results in found:
        for ours, theirs in zip(results, expected, strict=True):
            assert_same_bits(ours, theirs)


def unsigned(config):
    for name in ("input.x", "output.h"):
        config = config.replace(name, is_unsigned=True, is_symmetric=False)
    return config


FEWEST, FEW, MANY = (2, 3), (7, 3), (9, 8)


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (QuantConfig.int8(), FEWEST),
        (QuantConfig.w8a16(), MANY),
        (QuantConfig.int16(), FEW),
        (unsigned(QuantConfig.int8()), MANY),
    ],
)
def test_whole_calls(host, config, rows):
    check_calls(quantized(config, num_layers=2, bidirectional=True), host, rows)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (unsigned(QuantConfig.int8()), "1,1,1,2"),
        (QuantConfig.w8a16(), "1,1,1,8"),
    ],
)
def test_whole_calls_by_groups_of_warps(host, monkeypatch, config, shape):
    """The first layer's projection, of both directions, where products of four warps are."""
    monkeypatch.setenv(planner.VARIABLE, shape)
    monkeypatch.setattr(host, "arch", "sm_90a")
    monkeypatch.setattr(POLICY, "group_rows", 0)
    monkeypatch.setattr(POLICY, "group_work", 0)
    gru = quantized(config, num_layers=2, bidirectional=True)
    host.launched.clear()
    check_calls(gru, host, (9, 8))
    names = [name for name, _ in host.launched]
    # four calls, one with lengths among them, of two directions
    assert names.count("project_groups") == 2 * names.count("requantize_layers")
    assert "project_groups" in names
    x = torch.randn(9, 8, C)
    x[3, 5, 1] = nan
    checked(gru, host, x)


def test_whole_calls_with_zoneout(host):
    check_calls(quantized(num_layers=2, bidirectional=True, zoneout=0.3), host, (9, 8))


@pytest.mark.parametrize(
    ("rule", "width", "scales", "rows", "arch"),
    [
        # rules by kernel and configuration: test_host_emulation.py, test_real_projection.py
        ("half_away", "int8", "pot", (9, 8), "sm_90a"),
        ("half_up", "w8a16", "pot", (9, 8), "sm_90a"),
        ("floor", "int8", "free", (2, 3), "sm_80"),
    ],
)
def test_whole_calls_by_other_rules(host, monkeypatch, rule, width, scales, rows, arch):
    """The kernels of ties to even, at both ends of a call, too."""
    monkeypatch.setattr(host, "arch", arch)
    monkeypatch.setattr(POLICY, "group_rows", 0)
    monkeypatch.setattr(POLICY, "group_work", 0)
    config = getattr(QuantConfig, width)().replace_globals(rounding=rule, scale_kind=scales)
    gru = quantized(config, num_layers=2, bidirectional=True)
    x, hx = torch.randn(*rows, C), torch.randn(4, rows[1], H)
    # many ties, and values between 0 and the first code
    step = gru.get_quant_config("x")["scale"]
    x[0], x[1] = (x[0] / step).round() * step + step / 2, -1e-30
    host.launched.clear()
    checked(gru, host, x, hx)
    names = [name for name, _ in host.launched]
    assert "recurrent" in names
    assert "generic" not in names
    assert ("project_groups" in names) == (arch == "sm_90a")


@pytest.mark.parametrize("rule", ROUNDINGS)
def test_calls_by_every_rule_but_double_are_whole(host, monkeypatch, rule):
    monkeypatch.setattr("quant_gru.kernels.cuda.machine.machine_of", lambda device: host)
    plan = quantized(QuantConfig.int8().replace_globals(rounding=rule))._plan()
    cuda = dispatch.CUDA()
    whole = rule != "double"
    assert (cuda.stack_of(plan) is not None) == whole
    assert (cuda.prepared_backward(plan, "bf16") is not None) == whole


def check_calls(gru, host, rows):
    x, hx = torch.randn(*rows, C), torch.randn(4, rows[1], H)
    checked(gru, host, x)
    checked(gru, host, x, hx)
    checked(gru, host, x.transpose(0, 1).contiguous().transpose(0, 1), hx)
    lengths = torch.randint(1, rows[0] + 1, (rows[1],))
    lengths[0] = rows[0]
    for each, length in enumerate(lengths):
        x[length:, each] = 0
    checked(gru, host, x, hx, lengths)


@pytest.mark.parametrize(
    ("config", "shape", "H"),
    [
        ("int8", "2,2,1,16", 37),
        ("w8a16", "2,1,1,2", 48),
    ],
)
def test_ends_of_every_layout(host, monkeypatch, config, shape, H):
    """Tiles that are not full, rows with NaN beside others, units that fill no group."""
    monkeypatch.setenv(planner.VARIABLE, shape)
    gru = quantized(getattr(QuantConfig, config)(), H, num_layers=2, bidirectional=True)
    T, N = 5, 19
    x, hx = torch.randn(T, N, C), torch.randn(4, N, H) * 4
    x[0, 0, 0] = x[T - 1, 3, 2] = x[2, 9, 1] = x[1, 18, 4] = nan
    checked(gru, host, x)
    hx[0, 5, 0] = hx[1, 17, H - 1] = hx[3, 2, 1] = nan
    checked(gru, host, x, hx)
    lengths = torch.randint(1, T + 1, (N,))
    lengths[:2] = T
    for each, length in enumerate(lengths):
        x[length:, each] = 0
    checked(gru, host, x, hx, lengths)


@pytest.mark.parametrize(("config", "H"), [("int8", 21), ("w8a16", 32)])
def test_what_is_kept_for_a_backward(host, config, H):
    """Codes of all layers, and which of their rows are NaN; results stay the same."""
    gru = quantized(getattr(QuantConfig, config)(), H, num_layers=2, bidirectional=True)
    T, N = 6, 5
    x, hx = torch.randn(T, N, C), torch.randn(4, N, H)
    x[3, 1, 0] = hx[2, 3, 0] = nan
    whole = stack.Stack(gru._plan(), host)
    y, h_n = whole.run(x, hx)
    kept = Kept()
    for got, expected in zip(whole.run(x, hx, None, kept), (y, h_n), strict=True):
        assert_same_bits(got, expected)
    assert torch.equal(kept.nan.isnan(), h_n.isnan().any(-1))
    assert (kept.nan.nan_to_num() == 0).all()
    for state, out in enumerate(kept.out):
        layer, d = divmod(state, 2)
        h = gru._plan().cells[layer][d].h
        real = h.dequantize(out)
        last = real[0 if d else -1]
        assert torch.equal(torch.where(h_n[state].isnan(), last, h_n[state]), last)
        if layer == 1:
            values = y[..., d * H : (d + 1) * H]
            assert torch.equal(torch.where(values.isnan(), real, values), real)
        else:
            plan = gru._plan().cells[0][d]
            codes = plan.x.quantize(x), plan.h.quantize(hx[d])
            assert torch.equal(out, reference.run(plan, *codes, None, bool(d))[0])


def test_a_call_is_few_launches(host):
    gru = quantized()
    whole = stack.Stack(gru._plan(), host)
    host.launched.clear()
    whole.run(torch.randn(1, 2, C), torch.randn(1, 2, H))
    assert [name for name, _ in host.launched] == ["project_few", "recurrent"]


def test_a_schedule_is_used_again(host):
    gru = quantized(bidirectional=True)
    whole = stack.stack_of(gru._prepared(None).plan, host)
    assert stack.stack_of(gru._prepared(None).plan, host) is whole
    kept = [torch.randn(9, 8, C) for _ in range(3)]
    for x in [*kept, *(x.flip(0)[:5] for x in kept), torch.randn(8, 9, C).transpose(0, 1)]:
        for got, expected in zip(whole.run(x, None), gru(x), strict=True):
            assert torch.equal(got, expected)
    with torch.no_grad():
        gru.weight_hh_l0.mul_(1.5)
    assert stack.stack_of(gru._plan(), host) is not whole


class Frugal(Host):
    """A chip without clusters, whose blocks have 99 KB of shared memory."""

    def launch(self, kernel, grid, arguments):
        assert grid.shared_bytes <= 99 << 10
        assert not grid.early
        super().launch(kernel, grid, arguments)


@pytest.mark.parametrize("rows", [(2, 3), (9, 8)], ids=["fewest", "many"])
def test_a_chip_without_clusters(host, rows):
    check_calls(quantized(num_layers=2, bidirectional=True), Frugal(host.folder, {1: 84}), rows)


@pytest.mark.parametrize("config", ["int8", "w8a16"])
def test_calibrating_again_compiles_nothing(host, config):
    """Kernels know the structure of a plan; its numbers are data."""
    gru = quantized(getattr(QuantConfig, config)(), num_layers=2, bidirectional=True)
    kernels, scales = [], []
    for scale in (1.0, 5.0):
        gru.reset_calibration()
        gru.calibrate(torch.randn(12, 4, C) * scale + scale)
        gru.finalize_calibration()
        host.launched.clear()
        check_calls(gru, host, (9, 8))
        kernels.append({(name, *sorted(macros.items())) for name, macros in host.launched})
        scales.append([gru.get_quant_config(name)["scale"] for name in ("x", "Wx")])
    assert all(a != b for a, b in zip(*scales, strict=True))
    assert kernels[0] == kernels[1]


def forms_of(cells):
    return [numbers_of(cell).form for cell in cells]


@pytest.mark.parametrize("config", ["int8", "w8a16", "int16"])
def test_directions_are_one_launch_whatever_their_scales(config):
    ranges = set()
    for seed in range(3):
        gru = of_random_ranges(C, H, getattr(QuantConfig, config)(), seed)
        cells = gru._plan().cells[0]
        one, other = forms_of(cells)
        assert one == other
        ranges |= {cell.frozen.quantizers["gate.g_pre"].scale for cell in cells}
    assert len(ranges) > 1


def tables_in(macros):
    return macros["TZ"], macros["TR"], macros["TG"]


def recurrences(host):
    """Macros of the recurrences that were launched, and forgets them."""
    found = [macros for name, macros in host.launched if name == "recurrent"]
    host.launched.clear()
    return found


@pytest.mark.parametrize(
    # seeds whose directions differ; few of others do
    ("activation", "seeds", "config"),
    [("pwl", (0,), "int16"), ("quadratic", (4,), "w8a16")],
    ids=["pwl", "quadratic"],
)
def test_directions_are_one_launch_however_their_tables_are_read(host, activation, seeds, config):
    config = getattr(QuantConfig, config)().replace_globals(activation=activation)
    for seed in seeds:
        gru = of_random_ranges(C, H, config, seed)
        one, other = forms_of(gru._plan().cells[0])
        assert one != other
        host.launched.clear()
        checked(gru, host, torch.randn(4, 3, C))
        assert [macros["DIRS"] for macros in recurrences(host)] == [2]
        assert forms_of(gru._plan().cells[0]) == [one, other]


def test_directions_whose_tables_are_read_in_different_ways(host):
    """Two layers, states, lengths, what a backward needs, codes, and each direction alone."""
    config = QuantConfig.w8a16().replace_globals(activation="quadratic")
    gru = of_random_ranges(C, H, config, 0, num_layers=2)
    layers = gru._plan().cells
    forms = [forms_of(cells) for cells in layers]
    assert all(one.recurrence != other.recurrence for one, other in forms)
    host.launched.clear()
    check_calls(gru, host, (9, 8))
    assert [macros["DIRS"] for macros in recurrences(host)] == [2] * 8
    x, hx = torch.randn(6, 5, C), torch.randn(4, 5, H)
    x[3, 1, 0] = hx[2, 3, 0] = nan
    kept = Kept()
    whole = stack.Stack(gru._plan(), host)
    for each in (None, None, kept):  # prepared, again, and in training
        for got, expected in zip(whole.run(x, hx, None, each), gru(x, hx), strict=True):
            assert_same_bits(got, expected)
    assert [macros["DIRS"] for macros in recurrences(host)] == [2] * 6
    codes, lengths = layers[0][0].x.quantize(x), torch.tensor([6, 1, 4, 6, 2])
    directions = [
        executor.Direction(plan, plan.h.quantize(hx[d]), bool(d))
        for d, plan in enumerate(layers[0])
    ]
    together = executor.run_directions(directions, codes, lengths, host)
    assert [macros["DIRS"] for macros in recurrences(host)] == [2]
    for d, (each, form) in enumerate(zip(directions, forms[0], strict=True)):
        expected = reference.run(each.plan, codes, each.h0, None, each.reverse)
        assert torch.equal(kept.out[d], expected[0])
        alone = executor.run(each.plan, codes, each.h0, lengths, each.reverse, host)
        expected = reference.run(each.plan, codes, each.h0, lengths, each.reverse)
        for got in (together[d], alone):
            assert all(map(torch.equal, got, expected))
        (macros,) = recurrences(host)
        gates = form.recurrence
        assert (macros["DIRS"], macros["REAL"], tables_in(macros)) == (1, gates.real, gates.tables)


def test_directions_that_fill_a_device_run_as_fast_as_each_can(host, monkeypatch):
    monkeypatch.delenv(planner.VARIABLE)
    gru = of_random_ranges(C, H, QuantConfig.w8a16().replace_globals(activation="pwl"), 1)
    layer = stack.Stack(gru._plan(), host).layers[0]
    one, other = forms_of(gru._plan().cells[0])
    assert (one.recurrence.real, other.recurrence.real) == ("float", "double")

    def launches(cells, N):
        forms = [(cell.numbers.form, cell.numbers.frozen.native) for cell in cells]
        return shared_form(forms, H, N, host.clusters())

    assert launches(layer, 64).recurrence.real == "double"
    assert launches(layer, 1 << 20) is None
    # equal ones share it, however many rows there are
    assert launches([layer[0]] * 2, 1 << 20) == one


INT8, W8A16 = QuantConfig.int8(), QuantConfig.w8a16()
BOTH_OUTPUTS = {name: {"bitwidth": 16} for name in ("z_out", "g_out")}


def table_bytes(cell, modes):
    """Room for the tables of a cell wherever they begin: outputs in pairs, lines in pairs."""
    sizes = {
        structure.DIRECT: lambda codes: 8 * ((codes + 1) // 2),
        structure.DIRECT_GLOBAL: lambda codes: 0,
        structure.COMPRESSED: lambda codes: 8 + 8 * 2 * -(-(codes + 15) // 32),
    }
    tables = zip((cell.z, cell.r, cell.g), modes, strict=True)
    return sum(sizes[mode](table.entries) for table, mode in tables)


@pytest.mark.parametrize(
    ("config", "changes", "real", "tables", "words"),
    [
        (W8A16, {"g_pre": {"bitwidth": 10}}, "double", (3, 3, 1), 0),
        (QuantConfig.int16(), {"z_pre": {"bitwidth": 12}}, "double", (1, 3, 3), 0),
        (W8A16, {"Wx": {"exp2_inv": 30}}, "double", (3, 3, 3), 0),
        (INT8, {"z_pre": {"bitwidth": 12}}, "float", (0, 0, 0), 0),
        (INT8, {"r_pre": {"bitwidth": 16}}, "float", (0, 1, 0), 0),
        (INT8, BOTH_OUTPUTS, "double", (0, 0, 0), 0),
        (INT8, {"rRh": {"bitwidth": 16}}, "float", (0, 0, 0), 0),
        (
            W8A16.replace("rRh", bitwidth=None),
            {"Wx": {"exp2_inv": 55}},
            "double",
            (3, 3, 3),
            1,
        ),
    ],
    ids=["w8a16", "int16", "sums", "two sizes", "near and far", "double", "not saturated", "words"],
)
def test_a_launch_is_exact_for_both_directions(host, config, changes, real, tables, words):
    gru = quantized(config, bidirectional=True)
    for name, change in changes.items():
        gru.adjust_quant_config(name, reverse=True, **change)
    one, other = forms_of(gru._plan().cells[0])
    assert one != other
    host.launched.clear()
    checked(gru, host, torch.randn(6, 3, C), torch.randn(2, 3, H))
    (macros,) = recurrences(host)
    assert (macros["DIRS"], macros["REAL"], tables_in(macros)) == (2, real, tables)
    assert (macros["QG_WORDS"], macros["SATURATED"]) == (words, 0)
    assert macros["QG_POT"] == (real == "float")
    layer = stack.Stack(gru._plan(), host).layers[0]
    forms = [(cell.numbers.form, cell.numbers.frozen.native) for cell in layer]
    form = shared_form(forms, H, 3, host.clusters())
    sizes = [table_bytes(cell_of(cell.numbers.frozen, "double"), tables) for cell in layer]
    assert form.recurrence.table_bytes == max(sizes)


def test_multipliers_that_are_powers_in_one_direction(host):
    gru = quantized(QuantConfig.int8().replace_globals(scale_kind="free"), bidirectional=True)
    for name in ("z_out", "r_out", "g_out", "Rh", "rRh", "h", "old_contrib", "new_contrib"):
        gru.adjust_quant_config(name, scale=2.0**-8, reverse=True)
    assert [form.powers for form in forms_of(gru._plan().cells[0])] == [False, True]
    host.launched.clear()
    checked(gru, host, torch.randn(6, 3, C), torch.randn(2, 3, H))
    (macros,) = recurrences(host)
    assert (macros["DIRS"], macros["REAL"], macros["QG_POT"]) == (2, "float", 0)


def test_directions_whose_tables_are_quadratics(host):
    """One direction has compressed tables, too."""
    gru = QuantGRU(C, H, config=QuantConfig.w8a16(), bidirectional=True).eval()
    gru.weight_ih_l0_reverse.mul_(300)
    gru.calibration_method = "minmax"  # pre-activations of large ranges
    gru.calibrate(torch.randn(12, 4, C))
    gru.finalize_calibration()
    gru.use_quantization = True
    one, other = forms_of(gru._plan().cells[0])
    assert set(one.recurrence.tables) == {structure.COMPRESSED}
    assert structure.QUADRATIC in other.recurrence.tables
    host.launched.clear()
    checked(gru, host, torch.randn(6, 3, C), torch.randn(2, 3, H))
    (macros,) = recurrences(host)
    assert (macros["DIRS"], tables_in(macros)) == (2, other.recurrence.tables)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "h", "bitwidth": 8},
        {"name": "Wx", "bitwidth": 8},
        {"name": "z_pre", "bitwidth": 20},
    ],
    ids=["states", "projection", "wide"],
)
def test_directions_of_different_structure_are_two_launches(host, change):
    gru = quantized(QuantConfig.w8a16(), bidirectional=True)
    gru.adjust_quant_config(**change, reverse=True)
    plans = gru._plan().cells[0]
    x, hx = torch.randn(6, 3, C), torch.randn(2, 3, H)
    codes = plans[0].x.quantize(x)
    directions = [
        executor.Direction(plan, plan.h.quantize(hx[d]), bool(d)) for d, plan in enumerate(plans)
    ]
    host.launched.clear()
    got = executor.run_directions(directions, codes, None, host)
    names = [name for name, _ in host.launched]
    assert names.count("recurrent") + names.count("generic") == 2
    for each, found in zip(directions, got, strict=True):
        expected = reference.run(each.plan, codes, each.h0, None, each.reverse)
        assert all(map(torch.equal, found, expected))
    if all(form.narrow for form in forms_of(plans)):
        host.launched.clear()
        checked(gru, host, x, hx)
        assert [macros["DIRS"] for macros in recurrences(host)] == [1, 1]


@pytest.mark.parametrize("config", ["int8", "w8a16", "int16"])
def test_tables_that_bend_too_much_are_another_structure(config):
    """Lines hold tables of 16 bits, except for pre-activations whose range is very large."""
    gru = quantized(getattr(QuantConfig, config)())
    gru.reset_calibration()
    gru.calibration_method = "minmax"
    shape, kinds = planner.make_shape(H, 1, 1, 1, 8), []
    for scale in (0.3, 1.0, 3.0, 10.0, 300.0):
        gru.reset_calibration()
        gru.calibrate(torch.randn(12, 4, C) * scale)
        gru.finalize_calibration()
        form = numbers_of(gru._plan().cells[0][0]).form
        kinds.append(shape.macros(form, H, 1))
    assert all(each == kinds[0] for each in kinds[:4])
    assert (kinds[4] == kinds[0]) == (config == "int8")


def test_quantizers_that_differ_between_directions(host):
    gru = quantized(num_layers=2, bidirectional=True)
    gru.adjust_quant_config("x", scale=2.0**-4, reverse=True)
    gru.adjust_quant_config("h", is_unsigned=True, is_symmetric=False, layer=0, reverse=True)
    for rows in ((6, 3), (9, 8)):
        x, hx = torch.randn(*rows, C), torch.randn(4, rows[1], H)
        x[2, 1, 0] = nan
        checked(gru, host, x, hx)


@pytest.mark.parametrize("rows", [(6, 3), (9, 8)], ids=["few", "many"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 3}, {"num_layers": 2, "bidirectional": 1}])
def test_nan_in_x_and_in_hx(host, options, rows):
    gru = quantized(
        **{name: bool(v) if name == "bidirectional" else v for name, v in options.items()}
    )
    T, N = rows
    states = gru.num_layers * (2 if gru.bidirectional else 1)
    for step in (0, 3, T - 1):
        x, hx = torch.randn(T, N, C), torch.randn(states, N, H)
        x[step, 1, 2] = nan
        y, _ = checked(gru, host, x)
        assert y[step, 1, :H].isnan().all()
        assert not y[:, [0, 2]].isnan().any()
        hx[states - 1, 2, 1] = nan
        y, h_n = checked(gru, host, x, hx)
        assert y[:, 2, -H:].isnan().all()
        assert h_n[-1, 2].isnan().all()


def test_nan_over_many_steps(host):
    """More steps than a warp looks at at once."""
    gru = quantized(bidirectional=True)
    for step in (0, 127, 128, 300):
        x = torch.randn(301, 2, C)
        x[step, 1, 0] = nan
        checked(gru, host, x)


@pytest.mark.parametrize("value", [nan, float("inf")])
def test_weights_that_are_not_finite(host, value):
    gru = quantized(bidirectional=True)
    with torch.no_grad():
        gru.weight_hh_l0_reverse[0, 0] = value
    y, h_n = checked(gru, host, torch.randn(6, 3, C))
    assert not y[..., :H].isnan().any()
    assert y[..., H:].isnan().all()
    assert h_n[1].isnan().all()


def test_what_a_stack_does_not_take(host, monkeypatch):
    monkeypatch.delenv(planner.VARIABLE)
    assert stack.stack_of(quantized(QuantConfig.uniform(24, False))._plan(), host) is None
    whole = stack.Stack(quantized()._plan(), host)
    assert whole.run(torch.zeros(5, 0, C), None) is None
    large = stack.Stack(quantized(QuantConfig.int16(), 400)._plan(), Host(host.folder, {1: 108}))
    assert large.run(torch.zeros(5, 1, C), None) is None


def test_few_schedules_are_kept(host, monkeypatch):
    monkeypatch.setattr(stack, "_MOST_SCHEDULES", 2)
    gru = quantized()
    whole = stack.Stack(gru._plan(), host)
    for T in range(1, 6):
        x = torch.randn(T, 2, C)
        assert torch.equal(whole.run(x, None)[0], gru(x)[0])
        assert len(whole._schedules) <= 2
