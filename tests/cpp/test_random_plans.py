"""Random plans from Python to the C++ library, and from it to Python.

QUANT_GRU_CPP_PLANS is the number of random plans each way, 24 if it is not set.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from c_access import Access
from c_library import Library
from cpp_build import NEEDS_TOOLS, run
from make_golden import KINDS, Case, random_case, saved, write
from random_calibrations import Calibration, random_calibration
from torch import Tensor

from quant_gru import FrozenQuantGRU, QuantGRU, float_state_dict
from quant_gru.config.fields import ROUNDINGS

PLANS = int(os.environ.get("QUANT_GRU_CPP_PLANS", "24"))
pytestmark = NEEDS_TOOLS


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Random GRUs with their inputs and Python's results."""
    kinds = list(KINDS)
    return [random_case(i // len(kinds), kinds[i % len(kinds)]) for i in range(PLANS)]


def test_codes_of_frozen_grus_of_python(build: Path, cases: list[Case], tmp_path: Path) -> None:
    write(tmp_path / "golden.bin", cases)
    found = run(build / "cpp/tests/golden_test", tmp_path / "golden.bin")
    assert found.endswith(f": 0 of {PLANS} cases differ\n")


@pytest.mark.parametrize("rule", ROUNDINGS)
def test_rules_of_rounding(build: Path, rule: str, tmp_path: Path) -> None:
    inputs = (None, *ROUNDINGS[:-1])
    cases = [
        random_case(seed, kind, rule, inputs[(seed + index) % len(inputs)])
        for seed in range(max(PLANS // 10, 1))
        for index, kind in enumerate(KINDS)
    ]
    write(tmp_path / "golden.bin", cases)
    found = run(build / "cpp/tests/golden_test", tmp_path / "golden.bin")
    assert found.endswith(f": 0 of {len(cases)} cases differ\n")


def test_codes_of_the_c_interface(library: Library, cases: list[Case]) -> None:
    for case in cases:
        for x in (case.x, case.x.flip(0) * 1.7):
            check_codes(library, saved(case.gru), x, case.h0, case.gru)


@pytest.mark.parametrize("seed", range(PLANS))
def test_everything_made_by_cpp(
    access: Access, library: Library, seed: int, tmp_path: Path
) -> None:
    """Calibration, parameter file and frozen file of C++ are those of Python, and so are codes."""
    case = random_calibration(seed)
    params, frozen = access.calibrated(case), tmp_path / "gru.safetensors"
    assert exported(case.gru, tmp_path) == params
    gru = loaded(case, params, tmp_path)
    assert exported(gru, tmp_path) == params
    assert access.parameters_text(params) == params

    frozen.write_bytes(access.frozen_bytes(params, case.weights, gru.batch_first))
    assert saved(gru.freeze()) == frozen.read_bytes()
    x, h0, _ = case.batches[0]
    x = 1.5 * (x.transpose(0, 1) if gru.batch_first else x)
    for other in (gru, FrozenQuantGRU.load(frozen)):
        check_codes(library, frozen.read_bytes(), x.contiguous(), h0, other)


def exported(gru: QuantGRU, folder: Path) -> bytes:
    """The bytes of the parameter file."""
    gru.export_quant_params(folder / "exported.json")
    return (folder / "exported.json").read_bytes()


def loaded(case: Calibration, params: bytes, folder: Path) -> QuantGRU:
    """A new GRU with the weights of a case and the parameters of a file."""
    old = case.gru
    gru = QuantGRU(
        old.input_size, old.hidden_size, old.num_layers, bias=old.bias,
        batch_first=old.batch_first, bidirectional=old.bidirectional, zoneout=old.zoneout,
        use_quantization=True,
    ).eval()  # fmt: skip
    gru.load_state_dict(float_state_dict(old))
    path = folder / "params.json"
    path.write_bytes(params)
    gru.load_quant_params(path)
    return gru


def check_codes(
    library: Library, file: bytes, x: Tensor, h0: Tensor | None, gru: QuantGRU | FrozenQuantGRU
) -> None:
    """The C interface gives Python's results, every bit."""
    model = library.load(file)
    with torch.no_grad():
        expected = gru(x, h0)
    found = library.run(model, x, h0, None, expected, gru.batch_first)
    for ours, theirs in zip(found, expected, strict=True):
        nan = theirs.isnan()
        assert torch.equal(ours.isnan(), nan)
        theirs = theirs.contiguous()
        assert torch.equal(ours[~nan].view(torch.int32), theirs[~nan].view(torch.int32))
    library.free("qgru_free_model", model)
