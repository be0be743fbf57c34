import copy
import pickle
from collections.abc import Mapping

import pytest
from pydantic import BaseModel

from quant_gru.config import (
    ACTIVATIONS,
    FUSIBLE,
    OPERATORS,
    WEIGHTS,
    OperatorConfig,
    QuantConfig,
)
from quant_gru.config.operators import SIGMOIDS
from quant_gru.errors import ConfigError


def message(call, *args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_defaults():
    config = QuantConfig()
    assert isinstance(config.operators, Mapping)
    assert tuple(config.operators) == OPERATORS
    for name, operator in config.operators.items():
        assert operator == OperatorConfig(
            bitwidth=8,
            is_symmetric=True,
            is_unsigned=name in SIGMOIDS,
            granularity="channel" if name in WEIGHTS else None,
        )
    assert (config.scale_kind, config.activation, config.segments) == ("pot", "exact", None)
    assert config.disable_quantization is False


def test_absent_fields_take_the_default_of_their_operator():
    config = QuantConfig(
        operators={
            "z_out": OperatorConfig(bitwidth=16),
            "gate.r_out": {"bitwidth": 4},
            "weight.W": {"granularity": None},
            "h": OperatorConfig(bitwidth=12, is_symmetric=False),
        }
    )
    assert config["z_out"] == OperatorConfig(bitwidth=16, is_unsigned=True)
    assert config["r_out"] == OperatorConfig(bitwidth=4, is_unsigned=True)
    assert config["W"].granularity == "channel"
    assert config["output.h"] == OperatorConfig(bitwidth=12, is_symmetric=False)


def test_given_fields_win_over_defaults():
    config = QuantConfig(operators={"z_out": OperatorConfig(is_unsigned=False)})
    assert config["z_out"].is_unsigned is False


def test_operators_by_short_full_and_older_name():
    config = QuantConfig().replace("bx", bitwidth=3)
    assert config["bw"] is config["weight.bw"] is config["weight.bx"]
    assert config["bw"].bitwidth == 3
    assert "did you mean 'gate.z_out'?" in message(lambda: config["z_oot"])


@pytest.mark.parametrize("name", FUSIBLE)
def test_products_may_be_passed_on_unrounded(name):
    config = QuantConfig().replace(name, bitwidth=None)
    assert config[name].bitwidth is None
    assert config.with_all_bitwidths(4)[name].bitwidth == 4


@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in FUSIBLE])
def test_other_operators_need_a_width(name):
    expected = f"Expected bitwidth to be an integer from 1 to 32, got None (operator {name!r})"
    assert message(QuantConfig().replace, name, bitwidth=None) == expected


@pytest.mark.parametrize("bitwidth", [1, 2, 8, 16, 32])
def test_widths_in_range(bitwidth):
    assert OperatorConfig(bitwidth=bitwidth).bitwidth == bitwidth
    widths = {entry.bitwidth for entry in QuantConfig.uniform(bitwidth).operators.values()}
    assert widths == {bitwidth}


@pytest.mark.parametrize("bitwidth", [0, -1, 33, True, False, 8.0, "8", None, float("nan"), [8]])
def test_widths_out_of_range_or_of_another_type(bitwidth):
    rule = "Expected bitwidth to be an integer from 1 to 32"
    assert message(QuantConfig.uniform, bitwidth) == f"{rule}, got {bitwidth!r}"
    where = "(operator 'input.x')"
    assert message(QuantConfig().replace, "x", bitwidth=bitwidth) == (
        f"{rule}, got {bitwidth!r} {where}"
    )
    if bitwidth is not None:
        expected = f"{rule}, or null, got {bitwidth!r}"
        assert message(OperatorConfig, bitwidth=bitwidth) == expected
        assert message(OperatorConfig.model_validate, {"bitwidth": bitwidth}) == expected


@pytest.mark.parametrize("flag", [0, 1, "true", None, 1.0])
@pytest.mark.parametrize("field", ["is_symmetric", "is_unsigned"])
def test_flags_are_booleans(field, flag):
    assert message(OperatorConfig, **{field: flag}) == (
        f"Expected {field} to be true or false, got {flag!r}"
    )


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_symmetric_and_signed(name):
    text = message(QuantConfig().replace, name, is_symmetric=False, is_unsigned=True)
    assert text.splitlines() == [
        "Expected is_symmetric to be true, because weights and biases are always symmetric, "
        f"got False (operator {name!r})",
        "Expected is_unsigned to be false, because weights and biases are always signed, "
        f"got True (operator {name!r})",
    ]


@pytest.mark.parametrize("granularity", ["tensor", "gate", "channel"])
def test_granularity_belongs_to_weights(granularity):
    config = QuantConfig().replace("R", granularity=granularity)
    assert config["R"].granularity == granularity
    text = message(config.replace, "Rh", granularity=granularity)
    assert "only weights and biases have a granularity" in text


def test_every_problem_is_listed():
    text = message(
        QuantConfig,
        operators={"z_out": {"bitwidth": 99}, "W": {"is_symmetric": False}, "nothing": {}},
        scale_kind="linear",
    )
    assert len(text.splitlines()) == 4
    for part in ("got 99 (operator 'gate.z_out')", "'weight.W'", "'nothing'", "'linear'"):
        assert part in text
    assert "validation error" not in text


def test_unknown_arguments_suggest_the_nearest():
    assert "did you mean 'scale_kind'?" in message(QuantConfig, scale_knd="pot")
    assert "did you mean 'is_unsigned'?" in message(OperatorConfig, is_unsined=True)
    text = message(QuantConfig().replace, "z_out", bitwith=3)
    assert text == (
        "Expected a known field, got 'bitwith'; did you mean 'bitwidth'? (operator 'gate.z_out')"
    )
    assert "did you mean 'segments'?" in message(QuantConfig().replace_globals, segment=3)
    assert "global field" in message(QuantConfig().replace_globals, operators={})


def test_one_operator_under_two_names():
    text = message(QuantConfig, operators={"z_out": {}, "gate.z_out": {}})
    assert "'z_out' and 'gate.z_out'" in text
    assert "mapping" in message(QuantConfig, operators=8)


@pytest.mark.parametrize(
    ("activation", "segments", "count"),
    [
        ("exact", None, None),
        ("pwl", None, 16),
        ("pwl", 256, 256),
        ("quadratic", None, 8),
        ("quadratic", 1, 1),
    ],
)
def test_segments(activation, segments, count):
    config = QuantConfig(activation=activation, segments=segments)
    assert config.segments == segments
    assert config.segment_count == count


def test_segments_go_with_fitted_tables_only():
    text = message(QuantConfig, segments=16)
    assert text == "Expected segments to be null with activation 'exact', got 16"
    fitted = QuantConfig(activation="pwl", segments=32)
    assert message(fitted.replace_globals, activation="exact").startswith("Expected segments")
    assert fitted.replace_globals(activation="exact", segments=None) == QuantConfig()


def test_changed_copies_leave_the_original_alone():
    config = QuantConfig()
    changed = config.replace("z_out", bitwidth=14, is_symmetric=False)
    assert changed["z_out"] == OperatorConfig(bitwidth=14, is_symmetric=False, is_unsigned=True)
    assert config == QuantConfig() != changed
    assert changed.replace("z_out", bitwidth=8, is_symmetric=True) == config
    free = config.replace_globals(scale_kind="free", disable_quantization=True)
    assert (free.scale_kind, free.disable_quantization) == ("free", True)
    assert config.scale_kind == "pot"


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_with_all_bitwidths(is_symmetric):
    start = (
        QuantConfig(scale_kind="free").replace("x", is_unsigned=True).replace("rRh", bitwidth=None)
    )
    config = start.with_all_bitwidths(16, is_symmetric)
    for name, operator in config.operators.items():
        assert operator.bitwidth == 16
        assert operator.is_symmetric is (is_symmetric or name in WEIGHTS)
        assert operator.is_unsigned is (name in (*SIGMOIDS, "input.x"))
    assert config.scale_kind == "free"
    assert "is_symmetric" in message(start.with_all_bitwidths, 16, None)


@pytest.mark.parametrize(
    ("preset", "weights", "biases", "activations"),
    [("int8", 8, 8, 8), ("int16", 16, 16, 16), ("w8a16", 8, 16, 16)],
)
def test_presets(preset, weights, biases, activations):
    config = getattr(QuantConfig, preset)()
    assert {config[name].bitwidth for name in ("W", "R")} == {weights}
    assert {config[name].bitwidth for name in ("bw", "br")} == {biases}
    assert {config[name].bitwidth for name in ACTIVATIONS} == {activations}
    for name, operator in config.operators.items():
        assert operator.is_symmetric is (name in WEIGHTS)
        assert operator.is_unsigned is (name in SIGMOIDS)
    assert len(getattr(QuantConfig, preset).__doc__.strip().splitlines()) == 1


def test_the_preset_of_wide_registers_stores_8_bits():
    wide, int8 = QuantConfig.int8_wide(), QuantConfig.int8()
    assert len(QuantConfig.int8_wide.__doc__.strip().splitlines()) == 1
    stored = [*WEIGHTS, "input.x", "output.h"]
    assert {name: wide[name] for name in stored} == {name: int8[name] for name in stored}
    assert all(wide[name].bitwidth is None for name in FUSIBLE)
    rest = set(wide.operators) - {*stored, *FUSIBLE}
    assert all(8 <= wide[name].bitwidth <= 14 for name in rest)
    narrow = {name: dict(bitwidth=8) for name in (*rest, *FUSIBLE)}
    for name, fields in narrow.items():
        wide = wide.replace(name, **fields)
    assert wide == int8


CONFIGS = [
    QuantConfig(),
    QuantConfig.w8a16().replace("rRh", bitwidth=None, comment="in the accumulator"),
    QuantConfig(
        activation="pwl",
        segments=32,
        comment="board",
        section_comments={"default_config": {"description": "globals"}},
    ),
]


@pytest.mark.parametrize("config", CONFIGS, ids=["default", "w8a16", "commented"])
@pytest.mark.parametrize(
    "twin",
    [
        copy.copy,
        copy.deepcopy,
        lambda config: pickle.loads(pickle.dumps(config)),
        lambda config: config.model_copy(),
        lambda config: config.model_copy(deep=True),
        lambda config: QuantConfig(**config.model_dump()),
        lambda config: QuantConfig.model_validate(config.model_dump()),
        lambda config: QuantConfig.model_validate_json(config.model_dump_json()),
        lambda config: QuantConfig.from_dict(config.to_dict()),
    ],
    ids=[
        "copy",
        "deepcopy",
        "pickle",
        "model_copy",
        "model_copy_deep",
        "model_dump",
        "model_validate",
        "model_validate_json",
        "to_dict",
    ],
)
def test_copies_are_equal(config, twin):
    other = twin(config)
    assert other == config
    assert hash(other) == hash(config)
    assert tuple(other.operators) == OPERATORS
    assert isinstance(other["z_out"], OperatorConfig)
    assert other.replace("x", bitwidth=5) == config.replace("x", bitwidth=5) != config


def test_different_configurations_differ():
    assert len({QuantConfig(), QuantConfig.int8(), QuantConfig.int16(), QuantConfig.w8a16()}) == 4


def test_nothing_can_be_assigned():
    config = QuantConfig()
    assert "'scale_kind'" in message(setattr, config, "scale_kind", "free")
    assert "'bitwidth'" in message(setattr, config["x"], "bitwidth", 4)
    with pytest.raises(TypeError):
        config.operators["input.x"] = OperatorConfig()
    given = {"x": {"bitwidth": 4}}
    config = QuantConfig(operators=given)
    given["x"]["bitwidth"] = 5
    assert config["x"].bitwidth == 4


def test_model_validate_raises_config_errors():
    assert message(QuantConfig.model_validate, {"operators": {"z_out": {"bitwidth": 0}}}) == (
        "Expected bitwidth to be an integer from 1 to 32, got 0 (operator 'gate.z_out')"
    )
    assert "got 0" in message(QuantConfig.model_validate_json, '{"operators":{"x":{"bitwidth":0}}}')
    assert "did you mean" in message(QuantConfig.model_validate, {"operator": {}})
    assert message(QuantConfig, section_comments={"GRU_config": {"comment": 1}}) == (
        "Expected comment to be a string, got 1"
    )


def test_as_a_field_of_another_model():
    class Recipe(BaseModel):
        quantization: QuantConfig

    config = QuantConfig.w8a16()
    assert Recipe(quantization=config).quantization == config
    assert Recipe(quantization=config.model_dump()).quantization == config


def test_repr_is_about_what_is_set():
    assert repr(QuantConfig()["W"]) == (
        "OperatorConfig(bitwidth=8, is_symmetric=True, is_unsigned=False, granularity='channel')"
    )
    assert "comment" in repr(OperatorConfig(comment="a comment"))


@pytest.mark.parametrize(
    "text",
    [
        "QuantConfig()",
        "QuantConfig.int8_wide()",
        "QuantConfig.int16().replace('weight.W', bitwidth=4, granularity='gate')",
        "QuantConfig.uniform(4)",
        "QuantConfig.uniform(12, is_symmetric=False).replace('gate.z_out', is_unsigned=False)",
        "QuantConfig.int8().replace_globals(scale_kind='free', activation='pwl', segments=5)"
        ".replace('op.rRh', bitwidth=None)",
    ],
)
def test_repr_is_the_python_that_makes_it(text):
    assert repr(eval(text)) == text


def test_html_lists_all_operators():
    shown = QuantConfig.int8_wide()._repr_html_()
    assert all(f"<td>{name}</td>" in shown for name in OPERATORS)
    assert "<td>not rounded</td>" in shown
    assert "scale_kind=&#x27;pot&#x27;" in shown


def test_long_values_are_shortened_in_messages():
    assert len(message(OperatorConfig, bitwidth="9" * 10_000)) < 200
    assert len(message(QuantConfig.from_dict, list(range(10_000)))) < 200
