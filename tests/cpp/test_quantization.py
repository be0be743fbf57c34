"""Configuration, observers, tables, calibration and plans of the C++ library equal Python's."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from c_access import Access
from c_library import Library
from cpp_build import NEEDS_TOOLS, run
from hypothesis import given, settings
from hypothesis import strategies as st
from make_golden import first_version
from random_calibrations import (
    Calibration,
    calibration,
    float_weights,
    random_calibration,
    random_config,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from quant_gru import (
    ConfigError,
    FrozenQuantGRU,
    ParameterError,
    QuantConfig,
    QuantGRU,
    float_state_dict,
)
from quant_gru.calibration.observers import make_observer
from quant_gru.calibration.search import choose_quantizer
from quant_gru.config import default_config_path
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import build_table
from quant_gru.integer.weighted_sum import several_terms
from quant_gru.modules.bias_overflow import cut_biases_of
from quant_gru.parameters.document import from_document

pytestmark = NEEDS_TOOLS


def written(config: QuantConfig, path: Path) -> bytes:
    """The bytes of a configuration file."""
    config.to_json(path)
    return path.read_bytes()


def test_configuration_files_are_equal(access: Access, tmp_path: Path) -> None:
    rng = random.Random(0)
    configs = [random_config(rng) for _ in range(20)]
    configs += [
        QuantConfig(),
        QuantConfig.int8_wide(),
        QuantConfig.from_json(default_config_path()),
    ]
    configs.append(QuantConfig(comment='ü "\\ \n\U0001f600'))
    for config in configs:
        text = written(config, tmp_path / "config.json")
        assert access.config_text(text) == text


def config_file(operators: str = "", defaults: str = "") -> str:
    """The text of a configuration file."""
    return (
        '{"GRU_config": {"default_config": {'
        + defaults
        + '}, "operator_config": {'
        + operators
        + "}}}"
    )


ACCEPTED = [
    '{"GRU_config": {}}',
    config_file('"input.h": {"bitwidth": 4}, "weight.bx": {"granularity": null}'),
    config_file('"op.rRh": {"bitwidth": null}, "op.Rh_add_br": {"bitwidth": 3}'),
    config_file(defaults='"activation": "pwl", "segments": 5, "comment": null'),
]


@pytest.mark.filterwarnings("ignore::quant_gru.QuantGRUWarning")
@pytest.mark.parametrize("text", ACCEPTED)
def test_accepted_configurations(access: Access, text: str, tmp_path: Path) -> None:
    expected = written(QuantConfig.from_dict(json.loads(text)), tmp_path / "config.json")
    assert access.config_text(text.encode()) == expected


REFUSED = [
    ("", "JSON"),
    ("{", "JSON"),
    ("[1]", "object"),
    ("{}", "GRU_config"),
    ('{"GRU_config": {}} x', "JSON"),
    ('{"GRU_config": {}, "GRU_config": {}}', "GRU_config"),
    ('{"GRU_config": {"other": 1}}', "'other'"),
    ('{"GRU_config": []}', "GRU_config"),
    ('{"comment": 3, "GRU_config": {}}', "comment"),
    ('{"comment": "\\ud800", "GRU_config": {}}', ""),
    ('{"GRU_config": {"comment": NaN}}', ""),
    (config_file('"gate.z_oot": {}'), "did you mean 'gate.z_out'?"),
    (config_file('"input.x": 8'), "input.x"),
    (config_file('"input.x": {"bitwidth": 0}'), "got 0"),
    (config_file('"input.x": {"bitwidth": 33}'), "got 33"),
    (config_file('"input.x": {"bitwidth": 8.0}'), "bitwidth"),
    (config_file('"input.x": {"bitwidth": true}'), "bitwidth"),
    (config_file('"input.x": {"bitwidth": null}'), "bitwidth"),
    (config_file('"input.x": {"bitwidth": 99999999999999999999}'), "bitwidth"),
    (config_file('"input.x": {"is_symmetric": 1}'), "is_symmetric"),
    (config_file('"input.x": {"is_symetric": true}'), "did you mean 'is_symmetric'?"),
    (config_file('"input.x": {"granularity": "gate"}'), "granularity"),
    (config_file('"weight.W": {"granularity": "row"}'), "granularity"),
    (config_file('"weight.W": {"is_symmetric": false}'), "is_symmetric"),
    (config_file('"weight.W": {"is_unsigned": true}'), "is_unsigned"),
    (config_file('"input.h": {}, "output.h": {}'), "got both"),
    (config_file(defaults='"scale_kind": "log"'), "scale_kind"),
    (config_file(defaults='"segments": 4'), "segments"),
    (config_file(defaults='"activation": "pwl", "segments": 257'), "segments"),
    (config_file(defaults='"disable_quantization": null'), "disable_quantization"),
    (config_file(defaults='"tie_x_and_h": 1'), "tie_x_and_h"),
]


@pytest.mark.parametrize(("text", "part"), REFUSED)
def test_refused_configurations(access: Access, text: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    if "ud800" not in text:  # Python accepts half a pair of surrogates in a comment
        with pytest.raises(ConfigError):
            QuantConfig.from_json(path)
    with pytest.raises(ValueError, match="Expected") as error:
        access.config_text(text.encode())
    assert part in str(error.value)


def test_text_is_utf8(access: Access) -> None:
    text = '{"comment": "ü", "GRU_config": {}}'.encode()
    assert access.config_text(b"\xef\xbb\xbf" + text) == access.config_text(text)
    for wrong in (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xc3"):
        with pytest.raises(ValueError, match="Expected UTF-8 text, got another byte at 13"):
            access.config_text(text.replace("ü".encode(), wrong))


@pytest.mark.parametrize("seed", range(60))
def test_observers(access: Access, seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    method = rng.choice(("histogram", "histogram", "minmax", "percentile", "ema"))
    percentile = rng.choice((99.99, 99.0, 60.0, 100.0))
    spread, offset = 2.0 ** rng.choice((0, 0, 3, -20, 100, -130)), rng.choice((0, 0, 1, -3))
    batches = []
    for _ in range(rng.randint(1, 4)):
        values = torch.randn(rng.randint(1, 2000), generator=generator) + offset
        values = rng.choice((values, values.relu(), (values * 4).round(), values * 0))
        batches.append(values * spread)
    bits, symmetric = rng.choice((8, rng.randint(1, 32))), rng.random() < 0.5
    unsigned, free = rng.random() < 0.3, rng.random() < 0.4
    observer = make_observer(method, percentile_value=percentile)
    for batch in batches:
        observer.update(batch)
        observer.end_batch()
    expected = choose_quantizer(
        observer,
        operator="input.x",
        bits=bits,
        signed=not unsigned,
        symmetric=symmetric,
        scale_kind="free" if free else "pot",
    )
    found = access.observed(method, percentile, batches, bits, symmetric, unsigned, free)
    assert found == (expected.scale, expected.zero_point)


def test_observers_refuse_what_python_refuses(access: Access) -> None:
    bad = torch.tensor([1.0, torch.nan, torch.inf])
    with pytest.raises(ValueError, match=r"got 2 NaN or infinite \(operator 'input.x'\)"):
        access.observed("minmax", 99.0, [bad], 8, True, False, False)
    with pytest.raises(ValueError, match="at least one value"):
        access.observed("minmax", 99.0, [torch.zeros(0)], 8, True, False, False)
    with pytest.raises(ValueError, match="percentile"):
        access.observed("percentile", 50.0, [torch.ones(1)], 8, True, False, False)
    with pytest.raises(ValueError, match="method"):
        access.observed("middle", 99.0, [torch.ones(1)], 8, True, False, False)


@pytest.mark.parametrize("seed", range(40))
def test_tables(access: Access, seed: int) -> None:
    rng = random.Random(seed)
    bits, out_bits = rng.choice((2, 8, 12, 13, 16, 20)), rng.choice((1, 4, 8, 12, 16, 20))
    scale = float(torch.tensor(2.0 ** (rng.uniform(-2, 7) - bits)))
    pre = Quantizer(bits, rng.random() < 0.8, scale)
    pre = Quantizer(bits, pre.signed, scale, rng.choice((0, rng.randint(pre.lo, pre.hi))))
    is_tanh = rng.random() < 0.5
    n = out_bits - is_tanh
    out_scale = rng.choice((2.0**-n, float(torch.tensor(1 / max(2**n - 1, 1)))))
    out = Quantizer(out_bits, is_tanh, out_scale)
    activation = rng.choice(("exact", "pwl", "quadratic"))
    segments = None if activation == "exact" else rng.choice((None, 1, 5, 40))
    table = build_table("tanh" if is_tanh else "sigmoid", pre, out, activation, segments)
    u = -1 if table.segment_shift is None else table.segment_shift
    expected = [table.coefficients.shape[1] - 1, table.last, table.shift, table.zero_point]
    expected += [table.lo, table.hi, u, *table.bounds.tolist()]
    expected += table.coefficients.flatten().tolist()
    operator = "gate.g_out" if is_tanh else "gate.z_out"
    assert access.table_words(operator, pre, out, activation, segments) == expected


@settings(max_examples=150, deadline=None)
@given(
    exponents=st.tuples(st.integers(-200, 200), st.integers(-200, 200)),
    mantissas=st.tuples(st.floats(1, 2, exclude_max=True), st.floats(1, 2, exclude_max=True)),
    bounds=st.tuples(st.integers(1, 1 << 74), st.integers(1, 1 << 74)),
    bits=st.integers(1, 32),
    pot=st.booleans(),
)
def test_sums_of_two_terms(
    access: Access, exponents: Any, mantissas: Any, bounds: Any, bits: int, pot: bool
) -> None:
    pairs = zip(exponents, mantissas, strict=True)
    ratios = [2.0**e * (1.0 if pot else m) for e, m in pairs]
    expected = several_terms(ratios, bounds, bits=bits, lo=0, hi=1, zero_point=0, pot=pot)
    found = access.two_terms(ratios, bounds, bits, pot)
    assert found == (expected.shift, list(expected.multipliers))


@pytest.mark.parametrize(("layers", "bias"), [(1, True), (2, False)])
def test_files_of_gru_example(build: Path, tmp_path: Path, layers: int, bias: bool) -> None:
    """From float weights of Python to files of C++, from which Python makes the same integers."""
    weights, config = tmp_path / "weights.safetensors", tmp_path / "config.json"
    params, frozen = tmp_path / "params.json", tmp_path / "gru.safetensors"
    both = layers == 2
    gru = QuantGRU(5, 6, layers, bias=bias, bidirectional=both)
    save_file(float_state_dict(gru), weights)
    QuantConfig.int8_wide().to_json(config)
    files = {"weights": weights, "config": config, "params": params, "save": frozen}
    options = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    printed = run(build / "gru_example", *options, "--method", "minmax", "--repeats", "0")
    assert "GRU(5, 6)" in printed
    gru.load_quant_params(params)
    gru.freeze().save(tmp_path / "python.safetensors")
    assert frozen.read_bytes() == (tmp_path / "python.safetensors").read_bytes()


def test_weights_must_fit(build: Path, tmp_path: Path) -> None:
    state = float_state_dict(QuantGRU(5, 6))
    path = tmp_path / "weights.safetensors"
    for wrong, said in (
        ({"weight_hh_l0": torch.zeros(18, 5)}, "weight_hh_l0.*fit"),
        ({"bias_hh_l0": torch.zeros(18, dtype=torch.int32)}, "bias_hh_l0.*float32"),
        ({"more": torch.zeros(1)}, "no tensors but those of nn.GRU"),
    ):
        save_file({**state, **wrong}, path)
        with pytest.raises(AssertionError, match=said):
            run(build / "gru_example", "--weights", path, "--repeats", "0")


def test_weights_must_be_finite(access: Access) -> None:
    case = random_calibration(0)
    case.weights[0].R[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"Expected weights to be finite.*weight\.R"):
        access.frozen_bytes(json.dumps(case.gru._state.document()).encode(), case.weights, False)


@pytest.mark.filterwarnings("ignore:Expected biases that sums of")
@pytest.mark.parametrize("amplitude", [1.0, 1e-7, 1e-8])
@pytest.mark.parametrize("config", ["int8", "int8_wide", "int16"])
def test_cut_biases(access: Access, amplitude: float, config: str) -> None:
    """C++ finds the biases of which Python warns."""
    torch.manual_seed(0)
    gru = QuantGRU(4, 6, 2, bidirectional=True, config=config)
    with torch.no_grad():
        gru.weight_hh_l1_reverse.mul_(amplitude**2)
    gru.calibrate(torch.randn(20, 3, 4) * amplitude)
    gru.finalize_calibration()
    expected = [
        (2 * layer + direction, name, count)
        for (layer, direction, name), count, *_ in cut_biases_of(gru._plan())
    ]
    assert (amplitude == 1) == (not expected)
    weights = [cell for layer in gru._float_weights() for cell in layer]
    found = access.cut_biases(json.dumps(gru._state.document()).encode(), weights)
    assert found == expected


def test_accumulators_must_fit_64_bits(access: Access, library: Library) -> None:
    """C++ allows as many features as Python."""
    wide = QuantConfig.uniform(8).replace("weight.W", bitwidth=32).replace("x", bitwidth=32)
    gru = QuantGRU(65535, 1, config=wide.replace_globals(correct_bias=False))
    gru.calibrate(torch.randn(3, 2, 65535) / 256)
    gru.finalize_calibration()
    document = gru._state.document()
    library.free("qgru_free_model", library.load(frozen_by(access, gru, document)))
    document["gru"]["input_size"] += 1
    with torch.no_grad():
        gru.weight_ih_l0.set_(torch.zeros(3, 65536))
    with pytest.raises(ValueError, match=r"65535 features .* 32 bits.* got 65536 .*matmul\.Wx"):
        frozen_by(access, gru, document)


def far_gru(
    method: str = "histogram", free: bool = False, offset: float = 100, **options: Any
) -> tuple[QuantGRU, list[Tensor]]:
    """A calibrated GRU whose zero point of the input is no code, and its data."""
    torch.manual_seed(0)
    config = QuantConfig.int8().replace_globals(input_excludes_zero=True, **options)
    if free:
        config = config.replace_globals(scale_kind="free")
    gru = QuantGRU(4, 5, 2, bidirectional=True, config=config, use_quantization=True).eval()
    batches = [torch.rand(12, 3, 4) * 2 + offset for _ in range(2)]
    with torch.no_grad():
        for name in ("l0", "l0_reverse"):
            bias, W = getattr(gru, f"bias_ih_{name}"), getattr(gru, f"weight_ih_{name}")
            bias -= W.sum(1) * offset
    case = calibration(gru, method, [(x, None, None) for x in batches])
    quantizer = case.gru._plan().cells[0][0].border
    assert quantizer.is_outside
    return gru, batches


@pytest.mark.parametrize("method", ["histogram", "minmax", "percentile", "ema"])
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("offset", [3, -100, 3000])
def test_ranges_of_the_input_that_exclude_0(
    access: Access, library: Library, method: str, free: bool, offset: float, tmp_path: Path
) -> None:
    """Scales, files and outputs are Python's, every bit."""
    gru, batches = far_gru(method, free, offset, correct_bias=offset != 3)
    case = Calibration(gru, method, [(x, None, None) for x in batches])
    params = access.calibrated(case)
    gru.export_quant_params(tmp_path / "params.json")
    assert params == (tmp_path / "params.json").read_bytes()
    assert access.parameters_text(params) == params
    gru.freeze().save(tmp_path / "gru.safetensors")
    frozen = access.frozen_bytes(params, case.weights, False)
    assert frozen == (tmp_path / "gru.safetensors").read_bytes()
    x = batches[0].clone()
    x[1, 0] = 0  # beyond all codes, as silence is
    x[2, 1, 2] = torch.inf
    x[3, 2, 1] = torch.nan
    with torch.no_grad():
        expected = gru(x)
    model = library.load(frozen)
    found = library.run(model, x, None, None, expected, False)
    library.free("qgru_free_model", model)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


def test_zero_points_outside_of_the_codes_have_limits(
    access: Access, library: Library, tmp_path: Path
) -> None:
    """Without the option, beyond the first layer and too far away they are refused."""
    gru, _ = far_gru()
    document = gru._state.document()
    zero_point = gru.get_quant_config("x")["zero_point"]
    assert zero_point < -128
    without = changed(
        document, ["config", "GRU_config", "default_config", "input_excludes_zero"], False
    )
    with pytest.raises(ValueError, match=rf"zero_point.*got {zero_point}.*input\.x"):
        frozen_by(access, gru, without)
    place = ["operators", "input.x", "zero_point"]
    with pytest.raises(ValueError, match=r"zero_point to be in.*got -129.*input\.x.*layer 1"):
        frozen_by(access, gru, changed(document, ["cells", 2, *place], -129))
    limit = 127 - (1 << 21)
    too_far = changed(document, ["cells", 0, *place], limit - 1)
    with pytest.raises(ValueError, match=r"zero_point to be within 2097152.*input\.x"):
        frozen_by(access, gru, too_far)
    frozen = frozen_by(access, gru, changed(document, ["cells", 0, *place], limit))
    library.free("qgru_free_model", library.load(frozen))
    (tmp_path / "gru.safetensors").write_bytes(frozen)
    # of version 1, whose numbers are tensors
    first = first_version(FrozenQuantGRU.load(tmp_path / "gru.safetensors"))
    (tmp_path / "gru.safetensors").write_bytes(first)
    library.free("qgru_free_model", library.load(first))
    tensors = load_file(tmp_path / "gru.safetensors")
    with safe_open(tmp_path / "gru.safetensors", "pt") as file:
        metadata = file.metadata()
    for name, value, said in (
        ("quantizer.input.x_l1", -129, r"zero point in \[-128, 127\], got -129"),
        ("quantizer.output.h_l0", 128, r"zero point in \[-128, 127\], got 128"),
        ("quantizer.input.x_l0", limit - 1, r"zero point within 2097152 of all codes"),
    ):
        wrong = {**tensors, name: torch.tensor([-128, 127, value])}
        save_file(wrong, tmp_path / "wrong.safetensors", metadata)
        with pytest.raises(RuntimeError, match=said):
            library.load((tmp_path / "wrong.safetensors").read_bytes())


def frozen_by(access: Access, gru: QuantGRU, document: dict[str, Any]) -> bytes:
    """The frozen file that C++ makes of a document and the weights of a GRU."""
    return access.frozen_bytes(json.dumps(document).encode(), float_weights(gru), False)


def changed(document: dict[str, Any], keys: list[Any], value: Any) -> dict[str, Any]:
    """A copy of a document with another value at a place; `...` removes it."""
    found = json.loads(json.dumps(document))
    place = found
    for key in keys[:-1]:
        place = place[key]
    if value is ...:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    return found


X, Z = ["cells", 0, "operators", "input.x"], ["cells", 0, "tables", "gate.z_out"]
WEIGHT, MEAN = ["cells", 0, "operators", "weight.W"], ["cells", 0, "input_mean"]
WRONG: list[tuple[list[Any], Any]] = [
    (["format"], "other"),
    (["version"], 3),
    (MEAN, [1.0, 1.0]),
    ([*MEAN, "more"], 1),
    ([*MEAN, "values"], [1]),
    ([*MEAN, "values"], [1, 0.5]),
    ([*MEAN, "values"], [1, (1 << 24) + 1]),
    ([*MEAN, "values"], 1),
    ([*MEAN, "exp2_inv"], 150),
    ([*MEAN, "exp2_inv"], -120),
    ([*MEAN, "exp2_inv"], None),
    (["config", "GRU_config", "default_config", "correct_bias"], 1),
    (["version"], True),
    (["more"], 1),
    (["gru", "hidden_size"], 0),
    (["gru", "zoneout"], 1.5),
    (["gru", "bias"], ...),
    (["config", "GRU_config"], ...),
    (["cells"], []),
    (["cells", 0, "layer"], 1),
    (["cells", 0, "reverse"], True),
    ([*X[:-1], "input.y"], {}),
    (X, ...),
    ([*X, "bitwidth"], None),
    ([*X, "bitwidth"], 40),
    ([*X, "scale"], None),
    ([*X, "scale"], 0.3),
    ([*X, "scale"], -0.5),
    ([*X, "scale"], 1e-60),
    ([*X, "zero_point"], 1 << 20),
    ([*X, "zero_point"], 0.5),
    ([*X, "exp2_inv"], 99),
    ([*X, "granularity"], "gate"),
    ([*X, "is_symmetric"], "yes"),
    ([*WEIGHT, "zero_point"], 0),
    ([*WEIGHT, "scale"], [0.5, 0.5]),
    ([*WEIGHT, "scale"], [0.3]),
    ([*WEIGHT, "is_unsigned"], True),
    (Z, ...),
    ([*Z, "bounds"], []),
    ([*Z, "bounds", 1], -500),
    ([*Z, "last"], 1 << 40),
    ([*Z, "shift"], 63),
    ([*Z, "lo"], -1),
    ([*Z, "zero_point"], 3),
    ([*Z, "coefficients", 0], [1, 2, 3, 4]),
    ([*Z, "coefficients", 0], [1 << 62]),
    ([*Z, "segment_shift"], 3),
    ([*Z, "coefficients"], [[0]] * 256),
]


@pytest.mark.parametrize(("keys", "value"), WRONG)
def test_refused_parameter_documents(access: Access, keys: list[Any], value: Any) -> None:
    gru = QuantGRU(2, 3, config=QuantConfig.int8())
    gru.calibrate(torch.linspace(-2, 3, 20).reshape(5, 2, 2))
    gru.finalize_calibration()
    document = gru._state.document()
    assert json.loads(access.parameters_text(json.dumps(document).encode())) == document
    wrong = changed(document, keys, value)
    with pytest.raises(ParameterError):
        from_document(wrong, "text")
    with pytest.raises(ValueError, match=r"(?s)Expected.*text"):
        access.parameters_text(json.dumps(wrong).encode())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_documents_are_refused_or_read(access: Access, data: st.DataObject) -> None:
    text = bytearray(DOCUMENT)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place] = data.draw(st.integers(1, 255))
    try:
        found = access.parameters_text(bytes(text))
    except ValueError as error:
        found = str(error).encode()
        assert found.startswith(b"Expected")
    else:
        assert access.parameters_text(found) == found


def _document() -> bytes:
    gru = QuantGRU(2, 3, config=QuantConfig.uniform(4))
    gru.calibrate(torch.linspace(-2, 2, 20).reshape(5, 2, 2))
    gru.finalize_calibration()
    return json.dumps(gru._state.document()).encode()


DOCUMENT = _document()
