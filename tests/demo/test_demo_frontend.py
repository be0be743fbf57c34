import numpy as np
import pytest
import torch

from quant_gru.demo import DataError
from quant_gru.demo.frontend import LogMel, hertz_to_mel, mel_filters, mel_to_hertz


def log_mel_by_hand(samples: np.ndarray, rate: int, n_mels: int) -> np.ndarray:
    window, hop = round(0.032 * rate), round(0.016 * rate)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + rate / 1400), n_mels + 2) / 2595) - 1)
    rows = []
    for start in range(0, len(samples) - window + 1, hop):
        power = np.abs(np.fft.rfft(samples[start : start + window] * hann)) ** 2
        row = []
        for low, mid, high in zip(edges, edges[1:], edges[2:], strict=False):
            energy = 0.0
            for k, p in enumerate(power):
                f = k * rate / window
                energy += p * max(0.0, min((f - low) / (mid - low), (high - f) / (high - mid)))
            row.append(np.log(energy + 1e-6))
        rows.append(row)
    return np.array(rows)


@pytest.mark.parametrize("rate", [8000, 16000])
@pytest.mark.parametrize("extra", [0, 1, 127, 128, 1000])
def test_log_mel_equals_the_formula(rate: int, extra: int) -> None:
    front_end = LogMel(rate, n_mels=20)
    samples = np.random.default_rng(extra).uniform(-1, 1, front_end.window + extra)
    features = front_end(torch.tensor(samples, dtype=torch.float32))
    assert features.dtype == torch.float32
    np.testing.assert_allclose(features.numpy(), log_mel_by_hand(samples, rate, 20), atol=2e-4)


def test_silence_is_the_floor() -> None:
    features = LogMel(8000)(torch.zeros(256))
    assert features.shape == (1, 32)
    torch.testing.assert_close(features, torch.full((1, 32), 1e-6).log())


def test_a_tone_lies_in_the_band_of_its_pitch() -> None:
    front_end = LogMel(8000)
    tone = torch.sin(2 * torch.pi * 1000 * torch.arange(4000) / 8000)
    band = front_end(tone).mean(0).argmax().item()
    centres = mel_to_hertz(hertz_to_mel(torch.tensor(4000.0)) * torch.arange(1, 33) / 33)
    assert band == (centres - 1000).abs().argmin().item()


@pytest.mark.parametrize("rate", [4000, 8000, 11025, 16000, 44100, 192000])
def test_every_mel_filter_sees_something(rate: int) -> None:
    front_end = LogMel(rate)
    filters = mel_filters(front_end.n_mels, front_end.window, rate)
    assert filters.shape == (32, front_end.window // 2 + 1)
    assert filters.min() >= 0
    assert filters.max() <= 1
    assert (filters.sum(1) > 0).all()


def test_mel_scale() -> None:
    hertz = torch.tensor([0.0, 700.0, 1000.0, 4000.0], dtype=torch.float64)
    torch.testing.assert_close(mel_to_hertz(hertz_to_mel(hertz)), hertz)
    # 1000 Hz is 1000 mel by the definition of the scale, up to the rounding of its constants.
    assert hertz_to_mel(hertz)[2].item() == pytest.approx(1000, abs=0.1)


def test_recording_shorter_than_a_window() -> None:
    with pytest.raises(DataError, match=r"at least 256 samples long .* got 255"):
        LogMel(8000)(torch.zeros(255))


@pytest.mark.parametrize("rate", [3999, 192001, -8000])
def test_sample_rate_out_of_range(rate: int) -> None:
    with pytest.raises(DataError, match=r"sample_rate to be in 4000\.\.192000, got"):
        LogMel(rate)
