"""PLCMOS: the package's own features and scores, how far scores move, all executors."""

import numpy as np
import onnxruntime
import pytest
import torch
from executors import check_executors
from real_common import PRESETS, calls_of_grus, clips, gru_decibels, package_file, quantized
from real_quality import Quality, features, lost

from quant_gru import export_onnx

# dB of both GRUs, the mean and the largest error of a score from 1 to 5
BOUNDS = {
    "int8": (23.5, 27, 0.1, 0.25),
    "int8_wide": (24.5, 32, 0.06, 0.12),
    "w8a16": (40.5, 43, 0.03, 0.05),
    "int16": (54, 53, 0.002, 0.006),
}


@pytest.fixture(scope="module")
def quality(published):
    return published(Quality)


@pytest.fixture(scope="module")
def models(quality):
    return {name: quantized(quality, config) for name, config in PRESETS.items()}


@pytest.fixture(scope="module")
def calls(quality):
    return calls_of_grus(quality.model, quality.test)


def test_features_are_those_of_the_package(published, quality):
    from speechmos.plcmos import PLCMOS

    clip = lost(clips(slice(9, 10), 1.7), 0.1, seed=3)
    wanted = PLCMOS.stft_transform(PLCMOS.__new__(PLCMOS), clip[0].double().numpy())
    assert np.abs(features(clip)[0, 0].numpy() - wanted).max() < 1e-4


def test_float_is_the_file_in_onnx_runtime(quality):
    path = package_file("speechmos", "speechmos/plcmos_models/plcmos_v2.onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # the file promises no dimensions of its output
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    for x, listener in quality.test:
        given = {"degraded_audio": x.numpy(), "rater_embed": listener.numpy()}
        (wanted,) = session.run(None, given)
        with torch.no_grad():
            assert np.abs(quality.model(x, listener).numpy() - wanted).max() < 1e-5


def test_lost_packets_lower_the_score(quality):
    shares = quality.own.reshape(4, -1).mean(1)
    assert shares.tolist() == sorted(shares.tolist(), reverse=True)
    assert shares[0] - shares[-1] > 0.8


@pytest.mark.parametrize("preset", PRESETS)
def test_scores_of_speech_that_calibration_did_not_hear(preset, quality, models, calls):
    first, second, mean, largest = BOUNDS[preset]
    with torch.no_grad():
        found = quality.figures(models[preset])
    assert found["mean error"] < mean
    assert found["largest error"] < largest
    for least, value in zip(
        (first, second), gru_decibels(models[preset], calls).values(), strict=True
    ):
        assert value > least


@pytest.mark.parametrize("preset", ["w8a16"])
def test_all_executors_are_equal(preset, models, calls, library, tmp_path):
    for name, (call, *_) in calls.items():
        check_executors(models[preset].get_submodule(name), call, library, tmp_path)


def test_the_whole_model_in_onnx_runtime(quality, models, tmp_path):
    model, given = models["int8_wide"], [each[:1] for each in quality.test[1]]
    path = tmp_path / "quality.onnx"
    report = export_onnx(model, path, tuple(given), dynamic_shapes=((None, None),))
    assert not any(each.differing for each in report.values())
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    feed = {name: each.numpy() for name, each in zip(names, given, strict=True)}
    with torch.no_grad():
        # float layers of another runtime may move an input of a GRU by a code
        assert abs(session.run(None, feed)[0] - model(*given).numpy()).max() < 0.02
