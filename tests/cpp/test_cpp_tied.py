"""One scale for input and state in the C++ library: the scales of Python, and its error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from c_access import Access
from cpp_build import NEEDS_TOOLS
from random_calibrations import Calibration

from quant_gru import ConfigError, QuantConfig, QuantGRU

pytestmark = NEEDS_TOOLS


def calibration(config: QuantConfig, method: str) -> Calibration:
    """Two layers of both directions, calibrated but not finalized."""
    torch.manual_seed(0)
    gru = QuantGRU(3, 4, 2, bidirectional=True, config=config).eval()
    gru.calibration_method = method
    batches = [torch.randn(9, 3, 3) * 3 for _ in range(2)]
    for x in batches:
        gru.calibrate(x)
    return Calibration(gru, method, [(x, None, None) for x in batches])


@pytest.mark.parametrize("kind", ["pot", "free"])
@pytest.mark.parametrize("method", ["histogram", "minmax", "percentile", "ema"])
def test_scales_are_those_of_python(access: Access, method: str, kind: str, tmp_path: Path) -> None:
    config = QuantConfig.int8().replace_globals(tie_x_and_h=True, scale_kind=kind)
    case = calibration(config, method)
    case.gru.finalize_calibration()
    case.gru.export_quant_params(tmp_path / "params.json")
    assert access.calibrated(case) == (tmp_path / "params.json").read_bytes()


def test_different_widths_are_refused(access: Access) -> None:
    config = QuantConfig.int8().replace("x", bitwidth=16).replace_globals(tie_x_and_h=True)
    case = calibration(config, "minmax")
    with pytest.raises(ConfigError) as expected:
        case.gru.finalize_calibration()
    with pytest.raises(ValueError, match=r"Expected input\.x and output\.h") as found:
        access.calibrated(case)
    assert str(found.value) == str(expected.value)
