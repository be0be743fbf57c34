"""Speech enhancement: a small causal GRU takes noise out of speech, in integers and in real time.

    python examples/speech_enhancement.py --data spoken_digits.npz
    python examples/speech_enhancement.py            # synthetic voices, nothing to download

The GRU sees the log-magnitudes of one frame after the other; a linear layer makes a mask of each of
its outputs. The model is trained in float, quantized with each of CONFIGS, and trained on in
integers. Test speakers are not in the training set, and test noise is new. The loss is -SI-SDR.

Columns: the mean gain in SI-SDR over all test clips, over those with babble and over those with
coloured noise; the gain less that of the float model trained for as long, clip by clip, with its
standard error; bytes of the GRU's frozen file.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from pathlib import Path

import torch
from noisy_speech import NoisySpeech, Voices, at_speed, recorded_voices, si_sdr, synthetic_voices
from rich import box
from rich.console import Console
from rich.table import Table
from sound_output import write_spectrograms, write_wav
from torch import Tensor, nn

from quant_gru import QuantConfig, QuantGRU, calibrate_model, convert_model
from quant_gru.demo.errors import DataError
from quant_gru.demo.output import OutputFolder

BATCH = 32
TEST_SPEAKERS = 2
SPEEDS = (0.85, 1.0, 1.15)  # of the speakers of training: three voices each
TEST_SNR = (0.0, 5.0, 10.0)  # dB
RATE, FURTHER_RATE = 3e-3, 1e-3  # highest learning rates

INT8 = QuantConfig.int8()
CONFIGS = {
    "int8": INT8,
    "int8_wide": QuantConfig.int8_wide(),
    "w8a16": QuantConfig.w8a16(),
    "int4 weights": INT8.replace("weight.W", bitwidth=4).replace("weight.R", bitwidth=4),
    "int2 weights": INT8.replace("weight.W", bitwidth=2).replace("weight.R", bitwidth=2),
}
TRAINED = ("int8", "int2 weights")  # in integers, too
BASELINE = "float, longer"


class Denoiser(nn.Module):
    """Masks the spectrum of noisy speech, frame by frame, without looking ahead.

    Frames are two hops long and begin every hop. Windows before and after the mask are roots of a
    Hann window, so overlapping frames add up to the input where the mask is 1.

    Args:
        hop: Samples from one frame to the next.
        hidden_size: Units of the GRU.
    """

    def __init__(self, hop: int, hidden_size: int) -> None:
        super().__init__()
        self.hop, bins = hop, hop + 1
        self.gru = nn.GRU(bins, hidden_size, batch_first=True)
        self.mask = nn.Linear(hidden_size, bins)
        self.register_buffer("window", torch.hann_window(2 * hop).sqrt())
        self.register_buffer("mean", torch.zeros(bins))
        self.register_buffer("deviation", torch.ones(bins))

    def analyse(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Spectra (.., bins) and features (.., bins) of frames (.., 2 hop)."""
        spectrum = torch.fft.rfft(frames * self.window)
        level = torch.log(spectrum.abs() + 1e-3)
        return spectrum, (level - self.mean) / self.deviation

    def synthesize(self, spectrum: Tensor, h: Tensor) -> Tensor:
        """Frames (.., 2 hop) of spectra (.., bins) and outputs of the GRU (.., H)."""
        return torch.fft.irfft(spectrum * self.mask(h).sigmoid()) * self.window

    def frames(self, noisy: Tensor) -> Tensor:
        """Frames (N, T + 1, 2 hop) of samples (N, T hop)."""
        padded = nn.functional.pad(noisy, (self.hop, self.hop))
        return padded.unfold(-1, 2 * self.hop, self.hop)

    def forward(self, noisy: Tensor) -> Tensor:
        """Denoised samples (N, T hop) of noisy ones."""
        spectrum, features = self.analyse(self.frames(noisy))
        frames = self.synthesize(spectrum, self.gru(features)[0])
        return (frames[:, :-1, self.hop :] + frames[:, 1:, : self.hop]).flatten(1)


class StreamingDenoiser:
    """A quantized Denoiser that takes one hop of samples and returns the hop before it."""

    def __init__(self, model: Denoiser) -> None:
        self.model, self.gru = model, model.gru.stream()
        self.samples = self.tail = torch.zeros(1, model.hop)

    @torch.no_grad()
    def __call__(self, samples: Tensor) -> Tensor:
        """Denoised samples (1, hop) of the hop before `samples` (1, hop)."""
        spectrum, features = self.model.analyse(torch.cat((self.samples, samples), 1))
        frame = self.model.synthesize(spectrum, self.gru(features))
        denoised = self.tail + frame[:, : self.model.hop]
        self.samples, self.tail = samples, frame[:, self.model.hop :]
        return denoised


def fit(model: Denoiser, data: NoisySpeech, epochs: int, rate: float, seed: int) -> Denoiser:
    """Train a model in place: Adam, one-cycle learning rate, clipped gradients."""
    data.generator.manual_seed(seed)
    steps = epochs * (len(data.clips) // BATCH)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=max(steps, 2))
    model.train()
    for _ in range(steps):
        clean, noisy = data.batch(BATCH)
        loss = -si_sdr(model(noisy), clean).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def stream(model: Denoiser, noisy: Tensor) -> tuple[Tensor, float]:
    """Denoise samples (1, S) hop by hop, and compare with the whole.

    Returns:
        Denoised samples (1, S), and the seconds that a hop took.
    """
    features, step = model.analyse(model.frames(noisy))[1], model.gru.stream()
    steps = torch.stack([step(frame) for frame in features.unbind(1)], 1)
    assert torch.equal(steps, model.gru(features)[0])  # integers: the very same bits
    streaming = StreamingDenoiser(model)
    hops = [*noisy.split(model.hop, 1), torch.zeros(1, model.hop)]  # one more: output is a hop late
    started = time.perf_counter()
    denoised = torch.cat([streaming(hop) for hop in hops][1:], 1)
    seconds = (time.perf_counter() - started) / len(hops)
    # the layers around the GRU are float: one frame and many may round differently
    assert torch.allclose(denoised, model(noisy), atol=1e-3)
    return denoised, seconds


class Test:
    """Held-out noisy clips, and the table of what models make of them."""

    def __init__(self, data: NoisySpeech) -> None:
        index = torch.arange(len(data.clips))
        snr = torch.tensor(TEST_SNR)[index // 2 % len(TEST_SNR)]
        self.clean, self.noisy = data.draw(index, snr)
        self.before = si_sdr(self.noisy, self.clean)
        self.gains: dict[str, Tensor] = {}  # of each model, dB for each clip
        title = f"{len(index)} test clips, SI-SDR {self.before.mean():.1f} dB before; gains in dB"
        self.table = Table("GRU", box=box.SIMPLE_HEAD, title=title, title_justify="left")
        for column in ("gain", "in babble", "in coloured noise", f"against {BASELINE}", "bytes"):
            self.table.add_column(column, justify="right")

    @torch.no_grad()
    def add(self, name: str, model: Denoiser) -> None:
        """Add the row of a model."""
        gain = self.gains[name] = si_sdr(model(self.noisy), self.clean) - self.before
        against, size = "", sum(4 * p.numel() for p in model.gru.parameters())
        if isinstance(model.gru, QuantGRU):
            change, size = gain - self.gains[BASELINE], file_bytes(model.gru)
            against = f"{change.mean():+.2f} ± {change.std() / len(gain) ** 0.5:.2f}"
        means = (f"{part.mean():.2f}" for part in (gain, gain[0::2], gain[1::2]))
        self.table.add_row(name, *means, against, f"{size:,}")


def file_bytes(gru: QuantGRU) -> int:
    """Return the bytes of the file of a frozen GRU."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gru.safetensors"
        gru.freeze().save(path)
        return path.stat().st_size


def enhance(voices: Voices, options: argparse.Namespace, folder: Path, console: Console) -> None:
    """Train, quantize, train on, compare, stream, and write a clip before and after."""
    torch.manual_seed(0)
    hop = round(0.016 * voices.rate)
    clips, length, hidden = (64, 40, 32) if options.quick else (1536, 125, 128)
    known, unknown = voices.words[:-TEST_SPEAKERS], voices.words[-TEST_SPEAKERS:]
    words = [at_speed(own, speed) for own in known for speed in SPEEDS]
    training = NoisySpeech(words, clips, length * hop, seed=1)
    test = Test(NoisySpeech(unknown, clips // 8, length * hop, seed=2))
    batches = [training.batch(BATCH)[1] for _ in range(8)]  # for statistics and calibration

    model = Denoiser(hop, hidden)
    _, features = model.analyse(model.frames(torch.cat(batches)))
    model.mean.copy_(features.mean((0, 1)))
    model.deviation.copy_(features.std((0, 1)))
    further = -(-options.epochs // 3)

    def go_on(model: Denoiser) -> Denoiser:  # every model with the same data
        return fit(model, training, further, FURTHER_RATE, seed=4)

    console.print(f"training in float: {options.epochs} epochs, and {further} more")
    fit(model, training, options.epochs, RATE, seed=3)
    longer = go_on(copy.deepcopy(model))
    test.add("float", model)
    test.add(BASELINE, longer)
    trained = {}
    for name, config in CONFIGS.items():
        after = calibrate_model(convert_model(longer, config), batches, progress=False)
        test.add(f"{name} after", after)
        if name in TRAINED:
            console.print(f"training in integers, {name}: {further} epochs")
            start = calibrate_model(convert_model(model, config), batches, progress=False)
            trained[name] = go_on(start)
            test.add(f"{name} trained", trained[name])
    console.print(test.table)

    chosen, gain = trained["int8"], test.gains["int8 trained"]
    clip = int(gain.argsort()[len(gain) // 2])  # neither the best nor the worst
    denoised, seconds = stream(chosen, test.noisy[clip : clip + 1])
    took = f"{1e6 * seconds:.0f} us for a hop of {1e3 * hop / voices.rate:.0f} ms"
    console.print(f"streamed hop by hop, the GRU gives the bits of the whole clip; {took}")
    panels = {"noisy": test.noisy[clip], "denoised": denoised[0], "clean": test.clean[clip]}
    write_spectrograms(folder / "spectrograms.svg", panels, voices.rate)
    for name, samples in panels.items():
        write_wav(folder / f"{name}.wav", samples, voices.rate)
    torch.save(chosen.state_dict(), folder / "denoiser_int8.pt")
    chosen.gru.export_quant_params(folder / "gru_int8.json")


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, metavar="NPZ", help="spoken digits (docs/demo.md)")
    parser.add_argument("--epochs", type=int, help="of float training; a third of it further on")
    parser.add_argument("--output", type=Path, default=Path("enhancement_output"), metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="a few seconds, little learned")
    options = parser.parse_args(arguments)
    if options.epochs is None:
        options.epochs = 1 if options.quick else 15
    try:
        folder = OutputFolder.prepare(options.output).path
        voices = recorded_voices(options.data) if options.data else synthetic_voices(6, 10)
    except DataError as error:
        raise SystemExit(str(error)) from None
    started, console = time.perf_counter(), Console(width=None if sys.stdout.isatty() else 100)
    console.print(f"{voices.name}: {len(voices.words)} speakers, {TEST_SPEAKERS} of them for test")
    enhance(voices, options, folder, console)
    console.print(f"{folder}: spectrograms.svg, three wav files, denoiser_int8.pt, gru_int8.json")
    console.print(f"{time.perf_counter() - started:.0f} s, torch {torch.__version__}")


if __name__ == "__main__":
    main()
