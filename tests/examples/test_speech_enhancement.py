"""The denoiser: a small run, its files, its streaming, its data."""

import json
import re
import wave
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from example_runs import load, write_data

from quant_gru import QuantConfig, calibrate_model, convert_model

FILES = {
    "spectrograms.svg",
    "noisy.wav",
    "denoised.wav",
    "clean.wav",
    "denoiser_int8.pt",
    "gru_int8.json",
}


def improvements(printed):
    """Mean gain of each row of the table in dB."""
    return {
        name.strip(): float(gain)
        for name, gain in re.findall(r"^  (\w[\w, ]*?) {2,}(-?\d+\.\d\d) ", printed, re.M)
    }


def test_a_quick_run(tmp_path, capsys):
    example = load("speech_enhancement")
    example.main(["--quick", "--output", str(tmp_path)])
    gains = improvements(capsys.readouterr().out)
    after = {f"{name} after" for name in example.CONFIGS}
    trained = {f"{name} trained" for name in example.TRAINED}
    assert set(gains) == {"float", "float, longer"} | after | trained
    assert {path.name for path in tmp_path.iterdir()} == FILES
    ElementTree.parse(tmp_path / "spectrograms.svg")
    with wave.open(str(tmp_path / "denoised.wav")) as file:
        assert (file.getframerate(), file.getnframes()) == (8000, 40 * 128)
    assert json.loads((tmp_path / "gru_int8.json").read_text())
    model = convert_model(example.Denoiser(128, 32), QuantConfig.int8())
    model.load_state_dict(torch.load(tmp_path / "denoiser_int8.pt"))
    assert model.gru.use_quantization


@pytest.fixture(scope="module")
def learned():
    """A small float denoiser after some steps, its data, and their module."""
    example, data = load("speech_enhancement"), load("noisy_speech")
    voices = data.synthetic_voices(4, 1)
    torch.manual_seed(0)
    training = data.NoisySpeech(voices.words[:2], 64, 40 * 128, seed=1)
    model = example.fit(example.Denoiser(128, 16), training, 20, 1e-2, seed=3)
    return example, data, model, voices


def test_training_improves_speech_of_unknown_speakers(learned):
    _, data, model, voices = learned
    clean, noisy = data.NoisySpeech(voices.words[2:], 16, 40 * 128, seed=2).batch(16)
    with torch.no_grad():
        gain = data.si_sdr(model(noisy), clean) - data.si_sdr(noisy, clean)
    assert gain.mean() > 0.4


def test_the_future_does_not_change_the_past(learned):
    _, _, model, _ = learned
    x = torch.randn(1, 6 * 128)
    y = x.clone()
    y[:, 4 * 128 :] = 0
    with torch.no_grad():
        # a window reaches one hop ahead of the hop that it completes
        assert torch.equal(model(x)[:, : 3 * 128], model(y)[:, : 3 * 128])
        assert not torch.equal(model(x)[:, 3 * 128 :], model(y)[:, 3 * 128 :])


def test_an_open_mask_returns_its_input():
    model = load("speech_enhancement").Denoiser(64, 8)
    torch.nn.init.constant_(model.mask.bias, 100.0)
    x = torch.randn(2, 5 * 64)
    assert torch.allclose(model(x), x, atol=1e-5)


def test_streaming_is_checked_against_the_whole(learned):
    example, data, model, voices = learned
    noisy = data.NoisySpeech(voices.words[2:], 4, 10 * 128, seed=2).batch(4)[1]
    quantized = calibrate_model(convert_model(model, QuantConfig.int8()), [noisy])
    denoised, seconds = example.stream(quantized, noisy[:1])
    assert denoised.shape == (1, 10 * 128)
    assert seconds > 0
    with torch.no_grad():
        assert torch.allclose(denoised, quantized(noisy[:1]), atol=1e-3)


class TestNoisySpeech:
    def test_mixtures_have_the_ratio_asked_for(self):
        data = load("noisy_speech")
        speech = data.NoisySpeech(data.synthetic_voices(2, 1).words, 6, 4000, seed=0)
        snr = torch.tensor([-5.0, 0.0, 5.0, 10.0, 15.0, 20.0])
        clean, noisy = speech.draw(torch.arange(6), snr)
        power = clean.square().mean(1) / (noisy - clean).square().mean(1)
        assert torch.allclose(10 * torch.log10(power), snr, atol=1e-2)

    def test_seeds_decide(self):
        data = load("noisy_speech")
        words = data.synthetic_voices(2, 1).words
        once, again, other = (data.NoisySpeech(words, 6, 4000, seed).batch(4) for seed in (0, 0, 1))
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
        assert not torch.equal(once[0], other[0])

    def test_si_sdr(self):
        si_sdr = load("noisy_speech").si_sdr
        clean, noise = torch.randn(2, 1, 10000)
        noise = noise - (noise * clean).sum() / clean.square().sum() * clean
        noise = noise * clean.norm() / noise.norm()
        assert si_sdr(3 * (clean + 0.1 * noise), clean).item() == pytest.approx(20, abs=1e-3)


def test_recordings(tmp_path):
    write_data(tmp_path)
    arguments = ["--data", str(tmp_path / "digits.npz"), "--output", str(tmp_path / "out")]
    main = load("speech_enhancement").main
    with pytest.raises(SystemExit, match=r"at least 3 speakers in '.*digits.npz', got 1"):
        main(arguments)
    with pytest.raises(SystemExit, match=r"Expected --data to be an npz file, got 'none\.npz'"):
        main(["--data", "none.npz", *arguments[2:]])
    with np.load(tmp_path / "digits.npz") as found:
        arrays = dict(found)
    arrays["speaker"] = np.arange(len(arrays["label"])) % 3
    arrays["speaker_names"] = np.array(["ada", "bob", "eve"])
    np.savez(tmp_path / "digits.npz", **arrays)
    voices = load("noisy_speech").recorded_voices(tmp_path / "digits.npz")
    assert [len(words) for words in voices.words] == [25, 25, 24]
