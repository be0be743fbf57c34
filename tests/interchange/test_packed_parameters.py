"""Parameter documents in few bytes: everything comes back, and wrong columns are errors."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_grus import KINDS, random_gru

from quant_gru import ParameterError, QuantConfig
from quant_gru.config import WEIGHTS
from quant_gru.integer.bias_correction import InputMean
from quant_gru.integer.qparams import float32, make_qparams
from quant_gru.parameters import document as params
from quant_gru.parameters.columns import Reader, column, pack_bits, packed_size, unpack_bits
from quant_gru.parameters.packed import pack

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


@given(st.lists(st.one_of(INT64, st.integers(-9, 9)), max_size=40))
def test_columns_come_back(values: list[int]) -> None:
    raw = column(values)
    reader = Reader(raw, "here")
    assert reader.column(len(values)).tolist() == values
    reader.finish()
    span = max(values, default=0) - min(values, default=0)
    assert len(raw) == 9 + packed_size(len(values), max(1, span.bit_length()))


@given(st.integers(1, 64), st.integers(0, 30), st.randoms(use_true_random=False))
def test_bits_are_those_of_one_large_number(bits: int, count: int, rng: random.Random) -> None:
    values = [rng.getrandbits(bits) for _ in range(count)]
    whole = sum(value << (i * bits) for i, value in enumerate(values))
    raw = pack_bits(np.array(values, dtype=np.uint64).view(np.int64), bits)
    assert raw == whole.to_bytes(packed_size(count, bits), "little")
    assert unpack_bits(raw, count, bits).view(np.uint64).tolist() == values


def test_many_values() -> None:
    values = np.arange(200_003) % 7
    assert (unpack_bits(pack_bits(values, 3), len(values), 3, np.int8) == values).all()


@given(st.binary(max_size=40), st.integers(0, 1 << 40))
def test_columns_that_are_none(raw: bytes, count: int) -> None:
    reader = Reader(raw, "here")
    try:
        found = reader.column(count)
    except ParameterError:
        return
    assert len(found) == count <= 8 * len(raw)


def documents(seed: int, kind: str) -> dict[str, Any]:
    """A document with means, scales of weights that were set by hand, and notes."""
    gru, rng = random_gru(seed, kind, far=True)
    found = params.from_document(gru._document(), "here")
    H, D = found.shape.hidden_size, found.shape.directions
    cells = []
    for layer, directions in enumerate(found.cells):
        cells.append([])
        for qparams in directions:
            pinned = {}
            for name in WEIGHTS:
                counts = {"tensor": 1, "gate": 3, "channel": 3 * H}
                count = counts[qparams.config[name].granularity or "channel"]
                if rng.random() < 0.4:
                    scales = [2.0 ** rng.randint(-20, 3) for _ in range(count)]
                    if qparams.config.scale_kind == "free":
                        scales = [float32(scale * rng.uniform(1, 2)) for scale in scales]
                    pinned[name] = tuple(scales)
            made = make_qparams(qparams.config, qparams.quantizers, pinned, qparams.tables)
            features = D * H if layer else found.shape.input_size
            mean = None
            if rng.random() < 0.7:
                values = [rng.randint(-(1 << 24), 1 << 24) for _ in range(features)]
                mean = InputMean.of(values, rng.randint(0, 30))
            cells[-1].append(replace(made, zoneout=found.shape.zoneout, input_mean=mean))
    document = params.to_document(found.shape, found.config, cells)
    if rng.random() < 0.5:
        operators = document["config"]["GRU_config"]["operator_config"]
        operators["matmul.Wx"]["comment"] = 'a "note"'
        operators["weight.R"]["description"] = "another"
    return document


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 20), st.sampled_from(sorted(KINDS)))
def test_documents_come_back(seed: int, kind: str) -> None:
    document = documents(seed, kind)
    tensor = params.to_packed_tensor({**document, "batch_first": True})
    found = params.from_tensor(tensor, "here")
    assert found.pop("batch_first") is True
    # with keys in the same order, so that parameter files have equal bytes
    assert json.dumps(found) == json.dumps(document)
    assert len(tensor) < len(json.dumps(document)) / 3


def test_presets() -> None:
    for config in (QuantConfig.int8(), QuantConfig.int8_wide(), QuantConfig.int16()):
        gru, _ = random_gru(0, "w8a8")
        document = {**gru._document(), "config": config.to_dict()}
        assert params.from_tensor(params.to_packed_tensor(document), "here") == document


@pytest.fixture
def short() -> tuple[dict[str, Any], bytes]:
    return pack(documents(3, "w16a16"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"operators": None}, "Expected 'operators' to be a valid dictionary"),
        ({"operators": {}}, "Expected key 'bitwidth', got none (operators, here)"),
        ({"cells": None}, "Expected 'cells' to be a valid list"),
        ({"cells": [{}]}, "Expected key 'tables', got none (cells[0], here)"),
        ({"cells": [{"tables": [0, 1]}]}, "Expected 'tables' to be valid"),
        ({"cells": [{"tables": [0, 2, 1]}]}, "tables in the order of their use, got 2 after 1"),
        ({"cells": [{"tables": [0, -1, 1]}]}, "greater than or equal to 0"),
        ({"cells": [{"tables": [0, 1, 2], "pinned": [1 << 31] * 4}]}, "bytes of columns, got"),
        (
            {"cells": [{"tables": [0, 1, 2], "exp2_inv": "1"}]},
            "Expected 'exp2_inv' to be a valid integer",
        ),
        ({"cells": [{"tables": [0, 1, 2], "more": 1}]}, "Expected a known key, got 'more'"),
        ({"cells": []}, "bytes of columns, got"),
        ({"gru": None}, "Expected 'gru' to be an object, got None"),
        ({"gru": {"input_size": "5"}}, "Expected 'input_size' to be a valid integer"),
        ({"config": None}, "Expected 'config' to be an object, got None"),
    ],
)
def test_wrong_json(
    change: dict[str, Any], message: str, short: tuple[dict[str, Any], bytes]
) -> None:
    document, columns = short
    with pytest.raises(ParameterError) as error:
        params.unpacked({**document, **change}, columns, "here")
    assert message in str(error.value)


def table(**changes: Any) -> bytes:
    """The columns of a table of 256 segments, before those of its coefficients."""
    numbers = {
        "count": 256, "degree": 0, "first": -128, "last": 127, "shift": 0, "zero_point": 0, "lo": 0,
        "hi": 255, "segment_shift": 0, **changes,
    }  # fmt: skip
    return column(list(numbers.values()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "Expected a table of 1 to 65536 segments"),
        ({"count": -1}, "Expected a table of 1 to 65536 segments"),
        ({"count": 1 << 60}, "Expected a table of 1 to 65536 segments"),
        ({"count": 65536}, "bytes of columns, got"),
        ({"degree": 3}, "of degree 0 to 2"),
        ({"degree": -1}, "of degree 0 to 2"),
        ({"segment_shift": 33}, "2^0 to 2^32 codes"),
        ({"segment_shift": -2}, "2^0 to 2^32 codes"),
        ({"segment_shift": 1}, "Expected a table of ascending bounds in"),
        ({"first": 1 << 62}, "Expected a table of ascending bounds in"),
        ({"last": 300}, "Expected a table of ascending bounds in"),
        ({"hi": 256}, "Expected the table's outputs to be codes in"),
        ({"shift": 63}, "Expected 'shift' to be less than or equal to 62"),
    ],
)
def test_tables_that_lie(changes: dict[str, Any], message: str) -> None:
    gru, _ = random_gru(0, "w8a8")
    document, _ = pack(gru._document())
    config = QuantConfig.int8()
    shared = pack({**gru._document(), "config": config.to_dict()})[0]["operators"]
    document |= {"operators": shared, "config": {**config.to_dict()}}
    document["gru"] = {**document["gru"], "num_layers": 1, "bidirectional": False}
    document["config"]["GRU_config"]["operator_config"] = {}
    document["cells"] = [{"tables": [0, 0, 0]}]
    raw = table(**changes) + column([0]) + column([0] * 255)
    raw += column([0x3D000000] * 13) + column([0] * 13)
    with pytest.raises(ParameterError) as error:
        params.from_document(params.unpacked(document, raw, "here"), "here")
    assert message in str(error.value)


def test_segments_of_different_lengths_that_overlap() -> None:
    gru, _ = random_gru(0, "w8a8")
    document, _ = pack(gru._document())
    for lengths in ([-4, 8], [0, 4], [1 << 62, 1 << 62], [-(1 << 63), 1]):
        raw = table(count=3, segment_shift=-1) + column(lengths) + column([0]) + column([0, 0])
        cell = {"tables": [0, 0, 0]}
        with pytest.raises(ParameterError):
            params.from_document(
                params.unpacked({**document, "cells": [cell]}, raw, "here"), "here"
            )


def test_tables_that_many_cells_name() -> None:
    """A cell takes few bytes and names tables of many."""
    gru, _ = random_gru(0, "w8a8")
    document, _ = pack(gru._document())
    raw = table(count=1 << 16) + column([0]) + column([0] * 65535)
    cells = [{"tables": [0, 0, 0]}] * 100
    with pytest.raises(ParameterError, match="tables of at most 4194304 segments in all"):
        params.unpacked({**document, "cells": cells}, raw, "here")


@pytest.mark.parametrize("size", [0, 1, 8, 9, 50, -1])
def test_cut_columns(size: int, short: tuple[dict[str, Any], bytes]) -> None:
    document, columns = short
    with pytest.raises(ParameterError, match="bytes of columns, got"):
        params.unpacked(document, columns[:size], "here")
    with pytest.raises(ParameterError, match="bytes of columns, got"):
        params.unpacked(document, columns + b"\0", "here")


# a damaged scale is rounded with a warning first, then refused
@pytest.mark.filterwarnings("ignore:the scale of 'gate.z_out' was rounded")
def test_damaged_tensors() -> None:
    """Whatever a byte becomes, it is a document or an error."""
    tensor, rng = params.to_packed_tensor(documents(5, "mixed")), random.Random(0)
    read = 0
    for _ in range(100):
        changed = tensor.clone()
        changed[torch.randint(len(tensor), (1,))] = rng.randrange(256)
        try:
            params.from_document(params.from_tensor(changed, "here"), "here")
            read += 1
        except ParameterError:
            pass
    assert read < 100
