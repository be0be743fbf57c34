"""Noisy speech for speech_enhancement.py: voices, coloured noise, babble, and SI-SDR.

Voices are recordings of spoken digits (docs/demo.md says how to make the npz). Without a file they
are synthesized: harmonics of a gliding pitch under three moving formants, and bursts of noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from quant_gru.demo.errors import DataError
from quant_gru.demo.spoken import load_recordings

RATE = 8000  # samples per second of synthetic voices
LEVEL = 0.05  # root mean square of a clip, before its random gain
TALKERS = 6  # voices in babble

# Three formants of each vowel in Hz, rounded from Peterson and Barney, JASA, 1952.
FORMANTS = {
    "a": (730, 1090, 2440),
    "e": (530, 1840, 2480),
    "i": (270, 2290, 3010),
    "o": (570, 840, 2410),
    "u": (300, 870, 2240),
}
WORDS = ("sio", "ua", "tu", "ti", "fo", "fai", "si", "seve", "ei", "nai")
UNVOICED = "sft"


@dataclass(frozen=True)
class Voices:
    """Words of several speakers.

    Attributes:
        name: What they are, for people.
        words: Of each speaker, the words (S,).
        rate: Samples per second.
    """

    name: str
    words: list[list[Tensor]]
    rate: int


def recorded_voices(path: Path) -> Voices:
    """Read a spoken-digits npz of at least three speakers; a DataError names what is wrong."""
    data = load_recordings(path)
    words: list[list[Tensor]] = [[] for _ in data.speaker_names]
    for i, speaker in enumerate(data.speaker):
        samples = data.samples[data.offsets[i] : data.offsets[i + 1]]
        words[speaker].append(torch.from_numpy(samples / 32768.0).float())
    words = [own for own in words if own]
    if len(words) < 3:
        raise DataError(f"Expected at least 3 speakers in '{path}', got {len(words)}")
    return Voices(f"spoken digits ({path.name})", words, data.sample_rate)


def synthetic_voices(speakers: int, takes: int) -> Voices:
    """Synthesize `takes` repetitions of ten words by each of `speakers` speakers."""
    generator = torch.Generator().manual_seed(0)
    words = []
    for speaker in range(speakers):
        place = speaker * 0.618 % 1.0  # spreads pitch and length of the vocal tract evenly
        pitch, tract = 90.0 * 2.5**place, 0.9 + 0.3 * (speaker * 0.382 % 1.0)
        words.append([_word(w, pitch, tract, generator) for _ in range(takes) for w in WORDS])
    return Voices("synthetic voices", words, RATE)


def at_speed(words: list[Tensor], factor: float) -> list[Tensor]:
    """The words `factor` times as fast, at a pitch as much higher: another speaker, almost."""
    return [
        nn.functional.interpolate(word[None, None], scale_factor=1 / factor, mode="linear")[0, 0]
        for word in words
    ]


def _word(letters: str, pitch: float, tract: float, generator: torch.Generator) -> Tensor:
    """One word (S,), 0.3 to 0.5 s long."""
    vowels = [letter for letter in letters if letter in FORMANTS]
    jitter = torch.rand(4, generator=generator)
    time = torch.linspace(0, 1, int(RATE * (0.3 + 0.2 * float(jitter[0]))))
    glide = pitch * (1.0 + 0.2 * (jitter[1] - time) + 0.02 * torch.sin(30 * time))
    at = (time * len(vowels)).clamp(max=len(vowels) - 1)
    targets = tract * torch.tensor([FORMANTS[vowel] for vowel in vowels])
    before, part = at.long(), (3 * at.frac() - 1).clamp(0, 1)
    formants = torch.lerp(
        targets[before], targets[(before + 1).clamp(max=len(vowels) - 1)], part[:, None]
    )
    order = torch.arange(1, int(RATE / 2 / glide.min()))[:, None]
    frequency = order * glide  # (harmonics, S)
    distance = (frequency[..., None] - formants) / (40.0 + 0.06 * formants)
    gain = (1.0 / (1.0 + distance**2) / torch.tensor([1.0, 2.0, 4.0])).sum(-1)
    gain = gain * (frequency < RATE / 2)
    voice = (gain * torch.sin(order * (2 * math.pi / RATE) * glide.cumsum(0))).sum(0)
    voice = voice * torch.sin(math.pi * time).clamp(min=0).sqrt()
    if letters[0] in UNVOICED:
        burst = torch.randn(RATE // 12, generator=generator).diff(prepend=torch.zeros(1))
        burst = burst * torch.hann_window(len(burst)) * voice.std()
        voice = torch.cat((burst, voice))
    return voice


def clips_of(words: list[Tensor], count: int, samples: int, generator: torch.Generator) -> Tensor:
    """Clips (count, samples) of one speaker: random words with pauses, at the same level."""
    clips = torch.zeros(count, samples)
    for clip in clips:
        start = int(torch.randint(samples // 8, (), generator=generator))
        while start < samples:
            word = words[int(torch.randint(len(words), (), generator=generator))]
            word = word[: samples - start] / word.std()
            clip[start : start + len(word)] = word
            start += len(word) + int(torch.randint(samples // 8, (), generator=generator))
    return _at_level(clips)


def coloured_noise(count: int, samples: int, generator: torch.Generator) -> Tensor:
    """Noise (count, samples) whose power falls as f^-a: white, a = 0, to brown, a = 2."""
    spectrum = torch.fft.rfft(torch.randn(count, samples, generator=generator))
    slope = 2.0 * torch.rand(count, 1, generator=generator)
    frequency = torch.arange(spectrum.shape[1]).clamp(min=samples // 160)  # flat below 50 Hz
    return _at_level(torch.fft.irfft(spectrum * frequency ** (-slope / 2), n=samples))


class NoisySpeech:
    """Clips of some speakers, mixed with noise that is new in every draw.

    Args:
        words: Of each speaker, the words.
        count: Clips of clean speech to keep; each draw chooses among them.
        samples: Length of a clip.
        seed: Of the clips, and of the draws.
    """

    def __init__(self, words: list[list[Tensor]], count: int, samples: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        each = -(-count // len(words))
        parts = [clips_of(own, each, samples, self.generator) for own in words]
        self.clips = torch.stack(parts, 1).flatten(0, 1)[:count]  # speakers take turns

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Clean and noisy samples (size, samples) of random clips at -5 to 15 dB."""
        index = torch.randint(len(self.clips), (size,), generator=self.generator)
        return self.draw(index, 20 * torch.rand(size, generator=self.generator) - 5)

    def draw(self, index: Tensor, snr: Tensor) -> tuple[Tensor, Tensor]:
        """Mix clips with noise: those at even places of `index` with babble of the other clips.

        Args:
            index: Clips, int64 (N,).
            snr: Signal over noise in dB, (N,).

        Returns:
            Clean and noisy samples, both (N, samples).
        """
        clean, (count, samples) = self.clips[index], self.clips.shape
        others = torch.randint(1, count, (len(index), TALKERS), generator=self.generator)
        babble = _at_level(self.clips[(index[:, None] + others) % count].sum(1))
        noise = coloured_noise(len(index), samples, self.generator)
        noise = torch.where(torch.arange(len(index))[:, None] % 2 == 0, babble, noise)
        gain = 10 ** (0.6 * torch.rand(len(index), 1, generator=self.generator) - 0.3)  # +-6 dB
        return gain * clean, gain * (clean + noise * 10 ** (-snr[:, None] / 20))


def si_sdr(estimate: Tensor, clean: Tensor) -> Tensor:
    """SI-SDR (N,) in dB of samples (N, S) (Le Roux et al., ICASSP, 2019)."""
    scale = (estimate * clean).sum(1, keepdim=True) / clean.square().sum(1, keepdim=True)
    target = scale * clean
    return 10 * torch.log10(target.square().sum(1) / (estimate - target).square().sum(1))


def _at_level(x: Tensor) -> Tensor:
    return LEVEL * x / x.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-9)
