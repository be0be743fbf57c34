"""Parameter files that were written or changed by hand: what contradicts itself is not silent."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quant_gru import ParameterError, QuantConfig, QuantGRU, QuantGRUWarning
from quant_gru.cli import files

C, H = 3, 4


def calibrated() -> QuantGRU:
    torch.manual_seed(0)
    gru = QuantGRU(C, H, config=QuantConfig.int8().replace_globals(tie_x_and_h=True))
    gru.calibrate(torch.randn(20, 8, C))
    gru.finalize_calibration()
    return gru


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("parameters") / "p.json"
    calibrated().export_quant_params(path)
    return json.loads(path.read_text())


def changed(document: Any, change: Callable[[Any], object], folder: Path) -> Path:
    data = copy.deepcopy(document)
    change(data)
    path = folder / "p.json"
    path.write_text(json.dumps(data))
    return path


def operator(data: Any, name: str) -> Any:
    return data["cells"][0]["operators"][name]


def settings(data: Any) -> Any:
    return data["config"]["GRU_config"]["default_config"]


def rename(entries: Any, old: str, new: str) -> None:
    entries[new] = entries.pop(old)


DOUBTS: list[tuple[Callable[[Any], object], str]] = [
    (lambda d: settings(d).pop("rounding"), r"'rounding' in config, got none.* 'half_even'"),
    (
        lambda d: operator(d, "input.x").update(scale=0.25, exp2_inv=2),
        r"input.x and output.h to have one scale and zero point \(tie_x_and_h true\)",
    ),
    (lambda d: settings(d).update(correct_bias=False), r"input_mean to be null .*they are used"),
]


@pytest.mark.parametrize("index", range(len(DOUBTS)))
def test_doubts_warn(index: int, document: Any, tmp_path: Path) -> None:
    change, message = DOUBTS[index]
    path = changed(document, change, tmp_path)
    with pytest.warns(QuantGRUWarning, match=message) as caught:
        QuantGRU(C, H).load_quant_params(path)
    assert caught[0].filename == __file__
    with pytest.warns(QuantGRUWarning, match=message):
        files.read(str(path), False)


def test_version_1_has_one_rule(document: Any, tmp_path: Path) -> None:
    """Files of version 1 were written before there were rules."""

    def older(data: Any) -> None:
        data["version"] = 1
        data["cells"][0]["input_mean"] = None
        for name in ("rounding", "rounding_input", "correct_bias", "input_excludes_zero"):
            settings(data).pop(name)

    gru = QuantGRU(C, H)
    gru.load_quant_params(changed(document, older, tmp_path))
    assert gru.config.rounding == "half_even"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: rename(d["cells"][0]["operators"], "output.h", "input.h"),
            r"got 'input.h'; did you mean 'output.h'\?",
        ),
        (
            lambda d: rename(d["cells"][0]["operators"], "weight.bw", "bx"),
            r"got 'bx'; did you mean 'weight.bw'\?",
        ),
        (
            lambda d: operator(d, "gate.z_pre").update(bitwidth=16),
            r"over the codes \[-32768, 32767\] of 'gate.z_pre', got one of \[-128, 127\]",
        ),
        (
            lambda d: operator(d, "input.x").update(scale=0.03),
            r"a float32 number, got 0.03; the nearest is 0.029999999329447746",
        ),
        (
            lambda d: operator(d, "gate.z_pre").update(bitwidth=33),
            r"'bitwidth' to be less than or equal to 32, got 33",
        ),
        (lambda d: d.pop("format"), r"format .*got None; .*'model_info' and 'operators'"),
    ],
)
def test_errors_name_the_cause(
    change: Callable[[Any], object], message: str, document: Any, tmp_path: Path
) -> None:
    with pytest.raises(ParameterError, match=message):
        QuantGRU(C, H).load_quant_params(changed(document, change, tmp_path))


def test_a_written_file_raises_no_doubt(document: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        QuantGRU(C, H).load_quant_params(changed(document, lambda data: None, tmp_path))
