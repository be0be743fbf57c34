"""ONNX files of cells: one step, (N, C) in and (N, H) out."""

import pytest
import torch
from gru_helpers import C, H, onnx_run, seeded

from quant_gru import QuantConfig, QuantGRUCell, QuantGRUError, export_onnx, export_step_onnx
from quant_gru.interchange.onnx.profiles import EXACT, PROFILES

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


@pytest.fixture
def cell():
    torch.manual_seed(1)
    cell = QuantGRUCell(C, H, config=QuantConfig.int8()).eval()
    cell.calibrate(seeded(40, C))
    cell.finalize_calibration()
    cell.use_quantization = True
    return cell


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("states", [False, True])
def test_a_cell_reads_one_step(states, frozen, profile, cell, tmp_path):
    module, path = cell.freeze() if frozen else cell, tmp_path / "cell.onnx"
    example = (seeded(3, C), seeded(3, H)) if states else seeded(3, C)
    report = export_onnx(module, path, example, profile)
    assert set(report) == {"output"}
    assert profile not in EXACT or not report["output"].wrong
    # values in the calibrated range, which ends nowhere in the profile float
    x, h = seeded(5, C, seed=2, scale=0.5), seeded(5, H, seed=3, scale=0.1)
    (found,) = onnx_run(path, x, h) if states else onnx_run(path, x)
    with torch.no_grad():
        expected = cell(x, h if states else None)
    tolerance = 0 if profile in EXACT else 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    operators = [node.op_type for node in onnx.load(path).graph.node]
    assert "Scan" not in operators


def test_a_batch_that_is_fixed(cell, tmp_path):
    path = tmp_path / "cell.onnx"
    export_onnx(cell, path, seeded(3, C), batch=3)
    dims = onnx.load(path).graph.input[0].type.tensor_type.shape.dim
    assert [each.dim_value for each in dims] == [3, C]
    with pytest.raises(QuantGRUError, match="example with batch 2, which is fixed, got 3"):
        export_onnx(cell, path, seeded(3, C), batch=2)


def test_the_command_line_verifies_a_cell(cell, tmp_path):
    from quant_gru.whole_models.onnx_verify import verified_file

    for example in (seeded(3, C), (seeded(3, C), seeded(3, H))):
        export_onnx(cell, tmp_path / "cell.onnx", example)
        report = verified_file(tmp_path / "cell.onnx", cell._source())
        assert report["output"].values == 48 * H
        assert not report["output"].wrong
    export_onnx(cell, tmp_path / "cell.onnx", seeded(3, C), batch=3)
    assert not verified_file(tmp_path / "cell.onnx", cell._source())["output"].wrong


def test_bad_examples_name_the_ways(cell, tmp_path):
    path = tmp_path / "cell.onnx"
    with pytest.raises(QuantGRUError, match=r"a cell to be \(N, 5\), got \(2, 3, 5\); .*step_onnx"):
        export_onnx(cell, path, seeded(2, 3, C))
    with pytest.raises(
        QuantGRUError, match=r"state of the example to be \(3, 6\), got \(1, 3, 6\)"
    ):
        export_onnx(cell, path, (seeded(3, C), seeded(1, 3, H)))
    assert not path.exists()
    assert set(export_step_onnx(cell, path)) == {"output", "state"}
