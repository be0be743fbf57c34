import pytest

from quant_gru.config import (
    ACTIVATIONS,
    CALIBRATED,
    FIXED_RANGE,
    FUSIBLE,
    OPERATORS,
    WEIGHTS,
    canonical_name,
)
from quant_gru.config.operators import suggest
from quant_gru.errors import ConfigError


def test_the_seventeen_operators_in_order():
    assert OPERATORS == (
        "input.x",
        "output.h",
        "weight.W",
        "weight.R",
        "weight.bw",
        "weight.br",
        "matmul.Wx",
        "matmul.Rh",
        "gate.z_pre",
        "gate.z_out",
        "gate.r_pre",
        "gate.r_out",
        "gate.g_pre",
        "gate.g_out",
        "op.rRh",
        "op.old_contrib",
        "op.new_contrib",
    )


def test_groups():
    assert len(ACTIVATIONS) == 13
    assert len(CALIBRATED) == 10
    assert set(WEIGHTS) | set(ACTIVATIONS) == set(OPERATORS)
    assert not set(WEIGHTS) & set(ACTIVATIONS)
    assert set(CALIBRATED) | set(FIXED_RANGE) == set(ACTIVATIONS)
    assert not set(CALIBRATED) & set(FIXED_RANGE)
    assert FUSIBLE == ("op.rRh", "op.old_contrib", "op.new_contrib")
    assert FIXED_RANGE == ("gate.z_out", "gate.r_out", "gate.g_out")
    for group in (ACTIVATIONS, CALIBRATED, WEIGHTS, FUSIBLE, FIXED_RANGE):
        assert list(group) == sorted(group, key=OPERATORS.index)


@pytest.mark.parametrize("name", OPERATORS)
def test_full_and_short_names(name):
    assert canonical_name(name) == name
    assert canonical_name(name.partition(".")[2]) == name


@pytest.mark.parametrize(
    ("older", "name"),
    [("input.h", "output.h"), ("weight.bx", "weight.bw"), ("bx", "weight.bw"), ("h", "output.h")],
)
def test_older_names(older, name):
    assert canonical_name(older) == name


@pytest.mark.parametrize(
    ("given", "suggestion"),
    [
        ("gate.z_oot", "gate.z_out"),
        ("z-out", "gate.z_out"),
        ("Z_OUT", "gate.z_out"),
        ("gate.Z_out", "gate.z_out"),
        ("wx", "matmul.Wx"),
        ("weights.W", "weight.W"),
        ("old_contribution", "op.old_contrib"),
    ],
)
def test_unknown_name_suggests_the_nearest(given, suggestion):
    with pytest.raises(ConfigError) as caught:
        canonical_name(given)
    expected = f"Expected a known operator, got {given!r}; did you mean {suggestion!r}?"
    assert str(caught.value) == expected


@pytest.mark.parametrize("given", ["", "12345", None, 3, ("z_out",)])
def test_name_that_resembles_none_lists_all(given):
    with pytest.raises(ConfigError) as caught:
        canonical_name(given)
    assert repr(given) in str(caught.value)
    assert all(name in str(caught.value) for name in OPERATORS)


@pytest.mark.parametrize("given", ["op.Rh_add_br", "Rh_add_br"])
def test_fused_operator_has_no_settings(given):
    with pytest.raises(ConfigError, match=r"it is part of 'matmul\.Rh'"):
        canonical_name(given)


def test_an_older_name_suggests_its_operator():
    assert suggest("input.h", OPERATORS) == "did you mean 'output.h'?"
