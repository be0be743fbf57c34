import json
import os
import stat
import threading

import pytest
from config_examples import BAD, COMPLETE, CONCISE, EXAMPLES, MIXED, OLDER, of_operator
from hypothesis import given, settings
from hypothesis import strategies as st

from quant_gru.config import (
    FUSIBLE,
    OPERATORS,
    WEIGHTS,
    OperatorConfig,
    QuantConfig,
    QuantGRUWarning,
    default_config_path,
)
from quant_gru.config.fields import ROUNDINGS
from quant_gru.errors import ConfigError, QuantGRUError, forget_notes


def message(call, *args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


@pytest.fixture
def fused_name_not_noted():
    forget_notes()


# --- what the format's description shows


def test_complete_example_is_int8():
    assert QuantConfig.from_dict(COMPLETE) == QuantConfig.int8()


def test_concise_example():
    expected = QuantConfig().replace("z_out", is_symmetric=False)
    assert QuantConfig.from_dict(CONCISE) == expected.replace("r_out", is_symmetric=False)


def test_mixed_example():
    config = QuantConfig.from_dict(MIXED)
    widths = {name: operator.bitwidth for name, operator in config.operators.items()}
    wide = {name for name, bitwidth in widths.items() if bitwidth == 16}
    assert wide == {"weight.W", "weight.R", "matmul.Wx", "matmul.Rh"}
    assert config["Wx"] == OperatorConfig(bitwidth=16, is_symmetric=False)
    assert config["x"] == OperatorConfig()


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_examples_survive_writing(example, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(example), encoding="utf-8")
    config = QuantConfig.from_json(path)
    config.to_json(path)
    assert QuantConfig.from_json(str(path)) == config


def test_older_names(fused_name_not_noted):
    with pytest.warns(QuantGRUWarning, match=r"op\.Rh_add_br is part of matmul\.Rh"):
        config = QuantConfig.from_dict(OLDER)
    assert config["output.h"] == OperatorConfig(bitwidth=12, is_symmetric=False)
    assert config["weight.bw"].bitwidth == 16
    assert config["matmul.Rh"] == OperatorConfig()
    QuantConfig.from_dict(OLDER)  # said once: a second warning would be an error
    assert set(config.to_dict()["GRU_config"]["operator_config"]) == set(OPERATORS)


def test_minimal_file_takes_all_defaults():
    assert QuantConfig.from_dict({"GRU_config": {}}) == QuantConfig()


# --- the file that comes with the library


def test_default_file_is_int8_with_comments():
    path = default_config_path()
    assert path.name == "gru_quant_bitwidth_config.json"
    config = QuantConfig.from_json(path)
    assert config.without_comments() == QuantConfig.int8()
    assert config.description
    assert all(operator.comment for operator in config.operators.values())
    assert config.section_comments.default_config.comment


def test_default_file_is_written_back_as_it_is(tmp_path):
    path = tmp_path / "copy.json"
    QuantConfig.from_json(default_config_path()).to_json(path)
    assert path.read_bytes() == default_config_path().read_bytes()


# --- comments, reports, writing


def commented():
    texts = {"description": "what", "comment": "why"}
    return {
        **texts,
        "GRU_config": {
            **texts,
            "default_config": {**texts, "disable_quantization": True},
            "operator_config": {**texts, "gate.z_out": {**texts, "bitwidth": 4}},
        },
    }


def test_comments_are_kept_at_every_level():
    document = QuantConfig.from_dict(commented()).to_dict()
    gru = document["GRU_config"]
    places = [document, gru, gru["default_config"], gru["operator_config"]]
    for place in [*places, gru["operator_config"]["gate.z_out"]]:
        assert (place["description"], place["comment"]) == ("what", "why")
    assert "comment" not in gru["operator_config"]["gate.r_out"]


def test_comments_survive_changes_and_can_be_left_out():
    config = QuantConfig.from_dict(commented()).replace("z_out", bitwidth=5).with_all_bitwidths(6)
    assert config.comment == config["z_out"].comment == "why"
    assert config.section_comments.operator_config.comment == "why"
    assert config.without_comments() == QuantConfig.uniform(6).replace_globals(
        disable_quantization=True
    )


def test_written_file_is_complete():
    gru = QuantConfig().to_dict()["GRU_config"]
    assert gru["default_config"] == {
        "scale_kind": "pot",
        "activation": "exact",
        "segments": None,
        "correct_bias": True,
        "input_excludes_zero": False,
        "tie_x_and_h": False,
        "rounding": "half_even",
        "rounding_input": None,
        "disable_quantization": False,
    }
    for name, entry in gru["operator_config"].items():
        fields = {"bitwidth", "is_symmetric", "is_unsigned"}
        assert set(entry) == (fields | {"granularity"} if name in WEIGHTS else fields)
    assert tuple(gru["operator_config"]) == OPERATORS


def test_written_file_has_one_operator_per_line(tmp_path):
    path = tmp_path / "config.json"
    QuantConfig(comment="größer").to_json(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert sum(any(f'"{name}"' in line for name in OPERATORS) for line in lines) == 17
    assert any("größer" in line for line in lines)


def test_verbose_names_the_absent_operators_once(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONCISE), encoding="utf-8")
    QuantConfig.from_json(path)
    assert capsys.readouterr().out == ""
    QuantConfig.from_json(path, verbose=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert str(path) in line
    assert "input.x" in line
    assert "gate.z_out" not in line
    QuantConfig.from_dict(COMPLETE, verbose=True)
    assert capsys.readouterr().out == ""


@pytest.mark.filterwarnings("ignore::quant_gru.config.QuantGRUWarning")
def test_verbose_mentions_the_fused_operator_and_knows_older_names(capsys):
    QuantConfig.from_dict(OLDER, verbose=True)
    absent, fused = capsys.readouterr().out.splitlines()
    assert "output.h" not in absent
    assert "weight.bw" not in absent
    assert "op.Rh_add_br" in fused


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text("before", encoding="utf-8")

    def fail(source, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        text = message(QuantConfig().to_json, path)
    assert text == f"Expected a writable file, got No space left on device (file {str(path)!r})"
    assert path.read_text(encoding="utf-8") == "before"
    assert os.listdir(tmp_path) == ["config.json"]
    QuantConfig().to_json(path)
    assert os.listdir(tmp_path) == ["config.json"]
    assert QuantConfig.from_json(path) == QuantConfig()


def test_writing_where_nothing_can_be_written(tmp_path):
    assert "which does not" in message(QuantConfig().to_json, tmp_path / "none" / "config.json")
    assert "directory" in message(QuantConfig().to_json, tmp_path)
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "file" in message(QuantConfig().to_json, tmp_path / "file" / "config.json")


def test_a_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "config.json"
    for mode in (0o600, 0o640, 0o666):
        path.touch()
        path.chmod(mode)
        QuantConfig().to_json(path)
        assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_stays_one(tmp_path):
    path, found = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: found.append(path.read_text(encoding="utf-8")))
    reader.start()
    QuantConfig().to_json(path)
    reader.join()
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert QuantConfig.from_dict(json.loads(found[0])) == QuantConfig()
    assert os.listdir(tmp_path) == ["pipe"]


def test_the_longest_name(tmp_path):
    path = tmp_path / ("a" * 255)
    QuantConfig().to_json(path)
    assert QuantConfig.from_json(path) == QuantConfig()


def test_text_that_is_none_in_utf_8(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"GRU_config": {"comment": "\\ud800"}}', encoding="utf-8")
    config, again = QuantConfig.from_json(path), tmp_path / "again.json"
    assert r"got '\ud800'" in message(config.to_json, again)
    assert not again.exists()


@pytest.mark.parametrize("path", ["a\0b", None, 0, b"config.json"])
def test_what_is_no_path(path):
    for call in (QuantConfig.from_json, QuantConfig().to_json):
        assert message(call, path) == f"Expected the path of a file, got {path!r}"


# --- bad files


@pytest.mark.parametrize(("data", "expected"), BAD.values(), ids=BAD)
def test_bad_file(data, expected, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    text = message(QuantConfig.from_json, path)
    assert text.startswith(expected)
    assert text.endswith(f"file {str(path)!r})")
    assert "\n" not in text
    assert message(QuantConfig.from_dict, data).startswith(expected)


def test_error_names_file_operator_field_rule_and_value(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(of_operator("gate.z_out", bitwidth=99)), encoding="utf-8")
    assert message(QuantConfig.from_json, path) == (
        "Expected bitwidth to be an integer from 1 to 32, got 99 "
        f"(operator 'gate.z_out', file {str(path)!r})"
    )


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "Expected JSON, got an error at line 1, column 1: Expecting value"),
        (b'{\n  "GRU_config": {,\n}', "Expected JSON, got an error at line 2, column 18"),
        (b'{"GRU_config": {}} extra', "Expected JSON, got an error at line 1, column 20"),
        (b'{"GRU_config": {}, "GRU_config": {}}', "named once, got 'GRU_config' twice"),
        (
            b'{"GRU_config": {"operator_config": {"input.x": {}, "input.x": {}}}}',
            "named once, got 'input.x' twice",
        ),
        (b'{"GRU_config": NaN}', "Expected JSON numbers to be finite, got NaN"),
        (
            b'{"GRU_config": {"operator_config": {"input.x": {"bitwidth": -Infinity}}}}',
            "Expected JSON numbers to be finite, got -Infinity",
        ),
        (
            b'{"GRU_config": {"operator_config": {"input.x": {"bitwidth": 1e999}}}}',
            "Expected JSON numbers to be finite, got 1e999",
        ),
        (
            b'{"GRU_config": {"operator_config": {"input.x": {"bitwidth": 8.0}}}}',
            "Expected bitwidth to be an integer from 1 to 32, got 8.0 (operator 'input.x'",
        ),
        (b'{"comment": "\xff"}', "Expected UTF-8 text, got byte 0xff at 13"),
        ('{"GRU_config": {}}'.encode("utf-16"), "Expected UTF-8 text, got byte 0xff at 0"),
        (b"[" * 100_000, "Expected JSON of moderate size"),
        (b'{"GRU_config": ' + b"9" * 10_000 + b"}", "Expected"),
    ],
    ids=[
        "empty",
        "comma",
        "trailing",
        "duplicate_section",
        "duplicate_operator",
        "nan",
        "infinity",
        "overflow",
        "float_width",
        "latin1",
        "utf16",
        "deep",
        "long_number",
    ],
)
def test_bad_text(raw, expected, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(raw)
    text = message(QuantConfig.from_json, path)
    assert expected in text
    assert text.endswith(f"file {str(path)!r})")


def test_byte_order_mark_is_accepted(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"GRU_config": {}}')
    assert QuantConfig.from_json(path) == QuantConfig()


def test_file_that_cannot_be_read(tmp_path):
    missing = tmp_path / "none.json"
    expected = (
        f"Expected a file to exist, got none (file {str(missing)!r}); quant-gru config --write "
        "FILE makes one, default_config_path() is the one of the library"
    )
    assert message(QuantConfig.from_json, missing) == expected
    expected = f"Expected a file, got a directory (file {str(tmp_path)!r})"
    assert message(QuantConfig.from_json, tmp_path) == expected
    assert message(QuantConfig.from_json, None) == "Expected the path of a file, got None"


def test_errors_are_value_errors_of_one_family():
    assert issubclass(ConfigError, QuantGRUError)
    assert issubclass(ConfigError, ValueError)


# --- everything that may be written can be read


texts = st.none() | st.text(max_size=20)
remarks = st.fixed_dictionaries({}, optional={"description": texts, "comment": texts})


@st.composite
def operators(draw):
    found = {}
    for name in draw(st.sets(st.sampled_from(OPERATORS))):
        entry = {"bitwidth": draw(st.integers(1, 32)), **draw(remarks)}
        if name in WEIGHTS:
            entry["granularity"] = draw(st.sampled_from(["tensor", "gate", "channel", None]))
        else:
            entry["is_symmetric"] = draw(st.booleans())
            entry["is_unsigned"] = draw(st.booleans())
        if name in FUSIBLE and draw(st.booleans()):
            entry["bitwidth"] = None
        found[name] = entry
    return found


@st.composite
def configs(draw):
    activation = draw(st.sampled_from(["exact", "pwl", "quadratic"]))
    segments = None if activation == "exact" else draw(st.none() | st.integers(1, 256))
    return QuantConfig(
        operators=draw(operators()),
        scale_kind=draw(st.sampled_from(["pot", "free"])),
        activation=activation,
        segments=segments,
        tie_x_and_h=draw(st.booleans()),
        rounding=draw(st.sampled_from(ROUNDINGS)),
        rounding_input=draw(st.sampled_from([None, *ROUNDINGS[:-1]])),
        disable_quantization=draw(st.booleans()),
        section_comments={
            name: draw(remarks) for name in ("GRU_config", "default_config", "operator_config")
        },
        **draw(remarks),
    )


@settings(max_examples=60, deadline=None)
@given(config=configs())
def test_round_trip(config, tmp_path_factory):
    assert QuantConfig.from_dict(config.to_dict()) == config
    path = tmp_path_factory.getbasetemp() / "round_trip.json"
    config.to_json(path)
    assert QuantConfig.from_json(path) == config
    assert json.loads(path.read_text(encoding="utf-8")) == config.to_dict()


@given(configs())
def test_repr_makes_an_equal_configuration(config):
    assert eval(repr(config)) == config.without_comments()
