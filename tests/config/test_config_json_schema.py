import json
from pathlib import Path

import jsonschema
import pytest
from config_examples import BAD, EXAMPLES, OLDER
from hypothesis import given, settings
from hypothesis import strategies as st

from quant_gru.config import QuantConfig, default_config_path
from quant_gru.config.schema import file_json_schema
from quant_gru.errors import ConfigError

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "docs" / "schemas" / "gru_quant_bitwidth_config.schema.json"
VALIDATOR = jsonschema.Draft202012Validator(file_json_schema())


def accepted_by_reader(data):
    try:
        QuantConfig.from_dict(data)
    except ConfigError:
        return False
    return True


def test_published_schema_is_what_the_models_make():
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    assert published == file_json_schema(), (
        "renew it: python -m quant_gru.config > docs/schemas/..."
    )


def test_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(file_json_schema())


def test_good_files_are_accepted():
    shipped = json.loads(default_config_path().read_text(encoding="utf-8"))
    for data in (*EXAMPLES.values(), OLDER, shipped, QuantConfig.w8a16().to_dict()):
        VALIDATOR.validate(data)


@pytest.mark.parametrize("data", [data for data, _ in BAD.values()], ids=BAD)
def test_bad_files_are_rejected(data):
    assert not VALIDATOR.is_valid(data)
    assert not accepted_by_reader(data)


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 300),
    st.sampled_from([0.5, "8", "channel", "pwl", "exact", "free", "floor", "double", "x", [], {}]),
)
fields = st.sampled_from(["bitwidth", "is_symmetric", "is_unsigned", "granularity", "comment", "z"])
names = st.sampled_from(
    ["input.x", "input.h", "output.h", "weight.W", "weight.bx", "gate.z_out", "op.rRh", "z_out"]
)
global_fields = st.sampled_from(
    [
        *("scale_kind", "activation", "segments", "tie_x_and_h", "rounding"),
        *("rounding_input", "disable_quantization"),
        *("description", "z"),
    ]
)


def dictionaries(keys, entries):
    return st.dictionaries(keys, entries, max_size=2)


@settings(max_examples=300, deadline=None)
@given(
    operator_config=dictionaries(names, dictionaries(fields, values)),
    default_config=dictionaries(global_fields, values),
)
def test_schema_and_reader_accept_the_same_files(operator_config, default_config):
    data = {"GRU_config": {"default_config": default_config, "operator_config": operator_config}}
    assert VALIDATOR.is_valid(data) == accepted_by_reader(data)
