"""Files as quant-gru-pytorch writes them."""

from quant_gru.config import OPERATORS, WEIGHTS
from quant_gru.config.quant_gru_pytorch import NEWER_NAMES

SHORT = [name for name in NEWER_NAMES if "." not in name]

GENERATIONS = {
    "newer": {NEWER_NAMES[name]: name for name in SHORT},
    "older": {name: name.partition(".")[2] for name in OPERATORS},
}


def their_file(gru, names):
    """What quant-gru-pytorch writes for the scales of a GRU."""

    def operators(reverse):
        found = {}
        for name in OPERATORS:
            entry = gru.get_quant_config(name, 0, reverse)
            scale = entry["scale"]
            if name in WEIGHTS and len(scale) > 1:  # to z, r, n
                each = len(scale) // 3
                scale = scale[each : 2 * each] + scale[:each] + scale[2 * each :]
            found[names[name]] = {
                "dtype": f"{'UINT' if entry['is_unsigned'] else 'INT'}{entry['bitwidth']}",
                "symmetric": entry["is_symmetric"],
                "scale": scale,
                "zero_point": entry["zero_point"],
                "enc_type": "PER_CHANNEL" if isinstance(scale, list) else "PER_TENSOR",
            }
        return found

    sizes = {"input_size": gru.input_size, "hidden_size": gru.hidden_size, "bias": gru.bias}
    data = {
        "model_info": {**sizes, "batch_first": True, "bidirectional": gru.bidirectional},
        "operators": operators(False),
    }
    if gru.bidirectional:
        data["operators_reverse"] = operators(True)
    return data


def file_of(operators, **settings):
    """A configuration file."""
    return {"GRU_config": {"default_config": settings, "operator_config": operators}}
