"""The three example files of the format's description, and files that break its rules."""

import json

COMPLETE = json.loads("""
{
  "GRU_config": {
    "default_config": { "disable_quantization": false },
    "operator_config": {
      "input.x":       { "bitwidth": 8, "is_symmetric": false, "is_unsigned": false },
      "output.h":      { "bitwidth": 8, "is_symmetric": false, "is_unsigned": false },
      "weight.W":      { "bitwidth": 8, "is_symmetric": true,  "is_unsigned": false },
      "weight.R":      { "bitwidth": 8, "is_symmetric": true,  "is_unsigned": false },
      "weight.bw":     { "bitwidth": 8, "is_symmetric": true,  "is_unsigned": false },
      "weight.br":     { "bitwidth": 8, "is_symmetric": true,  "is_unsigned": false },
      "matmul.Wx":     { "bitwidth": 8, "is_symmetric": false, "is_unsigned": false },
      "matmul.Rh":     { "bitwidth": 8, "is_symmetric": false, "is_unsigned": false },
      "gate.z_pre":    { "bitwidth": 8, "is_symmetric": false, "is_unsigned": false },
      "gate.z_out":    { "bitwidth": 8, "is_symmetric": false, "is_unsigned": true },
      "gate.r_pre":    { "bitwidth": 8, "is_symmetric": false, "is_unsigned": false },
      "gate.r_out":    { "bitwidth": 8, "is_symmetric": false, "is_unsigned": true },
      "gate.g_pre":    { "bitwidth": 8, "is_symmetric": false, "is_unsigned": false },
      "gate.g_out":    { "bitwidth": 8, "is_symmetric": false, "is_unsigned": false },
      "op.rRh":        { "bitwidth": 8, "is_symmetric": false, "is_unsigned": false },
      "op.old_contrib":{ "bitwidth": 8, "is_symmetric": false, "is_unsigned": false },
      "op.new_contrib":{ "bitwidth": 8, "is_symmetric": false, "is_unsigned": false }
    }
  }
}
""")

CONCISE = json.loads("""
{
  "GRU_config": {
    "operator_config": {
      "gate.z_out": { "bitwidth": 8, "is_symmetric": false, "is_unsigned": true },
      "gate.r_out": { "bitwidth": 8, "is_symmetric": false, "is_unsigned": true }
    }
  }
}
""")

MIXED = json.loads("""
{
  "GRU_config": {
    "operator_config": {
      "weight.W":   { "bitwidth": 16, "is_symmetric": true,  "is_unsigned": false },
      "weight.R":   { "bitwidth": 16, "is_symmetric": true,  "is_unsigned": false },
      "matmul.Wx":  { "bitwidth": 16, "is_symmetric": false, "is_unsigned": false },
      "matmul.Rh":  { "bitwidth": 16, "is_symmetric": false, "is_unsigned": false },
      "gate.z_out": { "bitwidth": 8,  "is_symmetric": false, "is_unsigned": true },
      "gate.r_out": { "bitwidth": 8,  "is_symmetric": false, "is_unsigned": true }
    }
  }
}
""")

OLDER = json.loads("""
{
  "GRU_config": {
    "operator_config": {
      "input.h":      { "bitwidth": 12, "is_symmetric": false },
      "weight.bx":    { "bitwidth": 16 },
      "op.Rh_add_br": { "bitwidth": 3, "is_symmetric": false }
    }
  }
}
""")

EXAMPLES = {"complete": COMPLETE, "concise": CONCISE, "mixed": MIXED}


def of_operator(name, **fields):
    return {"GRU_config": {"operator_config": {name: fields}}}


def of_globals(**fields):
    return {"GRU_config": {"default_config": fields}}


_OPERATOR = "(operator 'gate.z_out'"
_GLOBAL = "(section 'default_config'"

BAD = {
    "list": ([], "Expected the configuration to be an object, got []"),
    "string": ("int8", "Expected the configuration to be an object, got 'int8'"),
    "empty": ({}, "Expected GRU_config to be present, got nothing"),
    "unknown_top_key": (
        {"GRU_config": {}, "coment": "x"},
        "Expected a known field, got 'coment'; did you mean 'comment'?",
    ),
    "unknown_section": (
        {"GRU_config": {"operators_config": {}}},
        "Expected a known field, got 'operators_config'; did you mean 'operator_config'? "
        "(section 'GRU_config'",
    ),
    "null_section": (
        {"GRU_config": {"default_config": None}},
        "Expected default_config to be an object, got None",
    ),
    "unknown_global": (
        of_globals(scale_knd="pot"),
        f"Expected a known field, got 'scale_knd'; did you mean 'scale_kind'? {_GLOBAL}",
    ),
    "scale_kind": (
        of_globals(scale_kind="POT"),
        f"Expected scale_kind to be 'pot' or 'free', got 'POT' {_GLOBAL}",
    ),
    "activation": (
        of_globals(activation="lut"),
        f"Expected activation to be 'exact', 'pwl' or 'quadratic', got 'lut' {_GLOBAL}",
    ),
    "segments_without_fit": (
        of_globals(segments=8),
        f"Expected segments to be null with activation 'exact', got 8 {_GLOBAL}",
    ),
    "segments_range": (
        of_globals(activation="pwl", segments=257),
        f"Expected segments to be an integer from 1 to 256, or null, got 257 {_GLOBAL}",
    ),
    "segments_zero": (
        of_globals(activation="pwl", segments=0),
        f"Expected segments to be an integer from 1 to 256, or null, got 0 {_GLOBAL}",
    ),
    "disable_quantization": (
        of_globals(disable_quantization=0),
        f"Expected disable_quantization to be true or false, got 0 {_GLOBAL}",
    ),
    "tie_x_and_h": (
        of_globals(tie_x_and_h="yes"),
        f"Expected tie_x_and_h to be true or false, got 'yes' {_GLOBAL}",
    ),
    "rounding": (
        of_globals(rounding="nearest"),
        "Expected rounding to be 'half_even', 'half_away', 'half_up', 'floor' or 'double', got "
        f"'nearest' {_GLOBAL}",
    ),
    "rounding_input": (
        of_globals(rounding_input="double"),
        "Expected rounding_input to be 'half_even', 'half_away', 'half_up' or 'floor', or null, "
        f"got 'double' {_GLOBAL}",
    ),
    "global_comment": (
        of_globals(comment=["a"]),
        f"Expected comment to be a string, got ['a'] {_GLOBAL}",
    ),
    "unknown_operator": (
        of_operator("gate.z_aut"),
        "Expected a known operator, got 'gate.z_aut'; did you mean 'gate.z_out'?",
    ),
    "short_operator": (
        of_operator("z_out"),
        "Expected a known operator, got 'z_out'; did you mean 'gate.z_out'?",
    ),
    "operator_not_object": (
        {"GRU_config": {"operator_config": {"gate.z_out": 8}}},
        f"Expected its settings to be an object, got 8 {_OPERATOR}",
    ),
    "unknown_field": (
        of_operator("gate.z_out", bit_width=8),
        f"Expected a known field, got 'bit_width'; did you mean 'bitwidth'? {_OPERATOR}",
    ),
    "bitwidth_zero": (
        of_operator("gate.z_out", bitwidth=0),
        f"Expected bitwidth to be an integer from 1 to 32, got 0 {_OPERATOR}",
    ),
    "bitwidth_33": (
        of_operator("gate.z_out", bitwidth=33),
        f"Expected bitwidth to be an integer from 1 to 32, got 33 {_OPERATOR}",
    ),
    "bitwidth_true": (
        of_operator("gate.z_out", bitwidth=True),
        f"Expected bitwidth to be an integer from 1 to 32, got True {_OPERATOR}",
    ),
    "bitwidth_string": (
        of_operator("gate.z_out", bitwidth="8"),
        f"Expected bitwidth to be an integer from 1 to 32, got '8' {_OPERATOR}",
    ),
    "bitwidth_fraction": (
        of_operator("gate.z_out", bitwidth=8.5),
        f"Expected bitwidth to be an integer from 1 to 32, got 8.5 {_OPERATOR}",
    ),
    "bitwidth_null": (
        of_operator("gate.z_out", bitwidth=None),
        f"Expected bitwidth to be an integer from 1 to 32, got None {_OPERATOR}",
    ),
    "product_bitwidth": (
        of_operator("op.rRh", bitwidth=64),
        "Expected bitwidth to be an integer from 1 to 32, or null, got 64 (operator 'op.rRh'",
    ),
    "is_symmetric_one": (
        of_operator("gate.z_out", is_symmetric=1),
        f"Expected is_symmetric to be true or false, got 1 {_OPERATOR}",
    ),
    "is_unsigned_null": (
        of_operator("gate.z_out", is_unsigned=None),
        f"Expected is_unsigned to be true or false, got None {_OPERATOR}",
    ),
    "asymmetric_weight": (
        of_operator("weight.W", is_symmetric=False),
        "Expected is_symmetric to be true, because weights and biases are always symmetric, "
        "got False (operator 'weight.W'",
    ),
    "symmetric_one_weight": (
        of_operator("weight.W", is_symmetric=1),
        "Expected is_symmetric to be true, because weights and biases are always symmetric, "
        "got 1 (operator 'weight.W'",
    ),
    "unsigned_older_bias": (
        of_operator("weight.bx", is_unsigned=True),
        "Expected is_unsigned to be false, because weights and biases are always signed, "
        "got True (operator 'weight.bx'",
    ),
    "granularity": (
        of_operator("weight.W", granularity="row"),
        "Expected granularity to be 'tensor', 'gate' or 'channel', got 'row' (operator 'weight.W'",
    ),
    "activation_granularity": (
        of_operator("input.x", granularity="tensor"),
        "Expected granularity to be absent, because only weights and biases have a granularity, "
        "got 'tensor' (operator 'input.x'",
    ),
    "operator_comment": (
        of_operator("gate.z_out", comment=1),
        f"Expected comment to be a string, got 1 {_OPERATOR}",
    ),
    "ignored_operator": (
        of_operator("op.Rh_add_br", bitwidth="x"),
        "Expected bitwidth to be an integer from 1 to 32, got 'x' (operator 'op.Rh_add_br'",
    ),
    "both_h": (
        {"GRU_config": {"operator_config": {"input.h": {}, "output.h": {}}}},
        "Expected one of 'input.h' and 'output.h', which name the same operator, got both",
    ),
    "both_bw": (
        {"GRU_config": {"operator_config": {"weight.bx": {}, "weight.bw": {}}}},
        "Expected one of 'weight.bx' and 'weight.bw', which name the same operator, got both",
    ),
}
