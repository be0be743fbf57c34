"""Speech enhancement: a small causal GRU takes noise out of speech, in integers and in real time.

    python examples/speech_enhancement.py --data spoken_digits.npz
    python examples/speech_enhancement.py            # synthetic voices, nothing to download

The GRU sees the log-magnitudes of one frame after the other and gives a mask for each. It is trained
in float, quantized after training with each of MODELS, and trained on in integers. Speakers of the
test are not in the training, and its noise is new. All training minimizes -SI-SDR.

Columns: the mean improvement of SI-SDR over all test clips in dB and its standard error, the same
of clips with babble and with coloured noise, and the bytes of the GRU's weights and biases.
"""

from __future__ import annotations

import argparse
import copy
import time
import wave
from pathlib import Path

import torch
from noisy_speech import NoisySpeech, Voices, recorded_voices, synthetic_voices
from rich import box
from rich.console import Console
from rich.table import Table
from spectrograms import write_spectrograms
from torch import Tensor, nn

from quant_gru import QuantConfig, QuantGRU, calibrate_model, convert_model
from quant_gru.demo.comparison import weight_bytes
from quant_gru.demo.errors import DataError
from quant_gru.demo.output import OutputFolder

BATCH = 32
TEST_SPEAKERS = 2
TEST_SNR = (0.0, 5.0, 10.0)  # dB
RATE, FURTHER_RATE = 3e-3, 1e-3  # highest learning rates

INT8 = QuantConfig.int8()
MODELS = {
    "int8": INT8,
    "int8_wide": QuantConfig.int8_wide(),
    "w8a16": QuantConfig.w8a16(),
    "int4 weights": INT8.replace("weight.W", bitwidth=4).replace("weight.R", bitwidth=4),
}
TRAINED = ("int8", "int4 weights")  # in integers, too


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
    """A quantized Denoiser that takes one hop of samples at a time and returns the hop before it.

    Args:
        model: The Denoiser.
        batch_size: Channels, N.
    """

    def __init__(self, model: Denoiser, batch_size: int = 1) -> None:
        assert isinstance(model.gru, QuantGRU)
        self.model, self.gru = model, model.gru.stream(batch_size)
        self.samples = self.tail = torch.zeros(batch_size, model.hop)
        self.seen: list[tuple[Tensor, Tensor]] = []  # features and outputs of the GRU, to compare

    @torch.no_grad()
    def __call__(self, samples: Tensor) -> Tensor:
        """Denoised samples (N, hop) of the hop before `samples` (N, hop)."""
        spectrum, features = self.model.analyse(torch.cat((self.samples, samples), 1))
        h = self.gru(features)
        self.seen.append((features, h))
        frame = self.model.synthesize(spectrum, h)
        denoised = self.tail + frame[:, : self.model.hop]
        self.samples, self.tail = samples, frame[:, self.model.hop :]
        return denoised


def si_sdr(estimate: Tensor, clean: Tensor) -> Tensor:
    """Scale-invariant signal over distortion (N,) in dB of samples (N, S) (Le Roux et al., 2019)."""
    scale = (estimate * clean).sum(1, keepdim=True) / clean.square().sum(1, keepdim=True)
    target = scale * clean
    return 10 * torch.log10(target.square().sum(1) / (estimate - target).square().sum(1))


def fit(model: Denoiser, data: NoisySpeech, epochs: int, rate: float) -> Denoiser:
    """Train a model in place: Adam, one-cycle learning rate, clipped gradients."""
    steps = epochs * (len(data.clips) // BATCH)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=max(steps, 2))
    model.train()
    for _ in range(steps):
        index = torch.randint(len(data.clips), (BATCH,), generator=data.generator)
        clean, noisy = data.draw(index, 20 * torch.rand(BATCH, generator=data.generator) - 5)
        loss = -si_sdr(model(noisy), clean).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def stream(model: Denoiser, noisy: Tensor) -> tuple[Tensor, float]:
    """Denoise (1, S) hop by hop, and compare with the whole: the GRU gives the very same bits.

    Returns:
        Denoised samples (1, S), and the seconds that a hop took.
    """
    streaming = StreamingDenoiser(model)
    hops = [*noisy.split(model.hop, 1), torch.zeros(1, model.hop)]  # one more: output is a hop late
    started = time.perf_counter()
    denoised = torch.cat([streaming(hop) for hop in hops][1:], 1)
    seconds = (time.perf_counter() - started) / len(hops)
    features, h = (torch.stack(parts, 1) for parts in zip(*streaming.seen, strict=True))
    with torch.no_grad():
        assert torch.equal(model.gru(features)[0], h)
        # layers around the GRU are float: batches of frames may round in another order
        assert torch.allclose(model(noisy), denoised, atol=1e-3)
    return denoised, seconds


class Test:
    """Held-out noisy clips, and the table of what models make of them.

    Args:
        data: Speech of speakers that training does not know.
    """

    def __init__(self, data: NoisySpeech) -> None:
        count = len(data.clips)
        snr = torch.tensor(TEST_SNR).repeat_interleave(2).repeat(-(-count // 6))[:count]
        self.clean, self.noisy = data.draw(torch.arange(count), snr)
        self.before = si_sdr(self.noisy, self.clean)
        title = f"Test: {count} clips of unknown speakers, SI-SDR {self.before.mean():.1f} dB"
        self.table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
        self.table.add_column("GRU", no_wrap=True)
        for column in ("improvement of SI-SDR", "babble", "coloured noise", "GRU weights"):
            self.table.add_column(column, justify="right")

    @torch.no_grad()
    def add(self, name: str, model: Denoiser) -> Tensor:
        """Add a row; returns the improvement of each clip in dB, (N,)."""
        better = si_sdr(model(self.noisy), self.clean) - self.before
        error = better.std() / len(better) ** 0.5
        size = sum(4 * p.numel() for p in model.gru.parameters())
        if isinstance(model.gru, QuantGRU):
            size = weight_bytes(model.gru)
        self.table.add_row(
            name,
            f"{better.mean():.2f} ± {error:.2f} dB",
            *(f"{part.mean():.2f} dB" for part in (better[0::2], better[1::2])),
            f"{size:,} B",
        )
        return better


def write_wav(path: Path, samples: Tensor, rate: int) -> None:
    """Write samples (S,) in [-1, 1] with 16 bits."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples.clamp(-1, 1) * 32767).short().numpy().tobytes())


def enhance(voices: Voices, options: argparse.Namespace, folder: Path, console: Console) -> None:
    """Train, quantize, train on, compare, stream, and write a clip before and after."""
    torch.manual_seed(0)
    hop = round(0.016 * voices.rate)
    clips, length, hidden = (64, 40, 32) if options.quick else (512, 125, 128)
    training = NoisySpeech(voices.words[:-TEST_SPEAKERS], clips, length * hop, seed=1)
    test = Test(NoisySpeech(voices.words[-TEST_SPEAKERS:], clips // 4, length * hop, seed=2))
    quiet = training.draw(torch.arange(clips), torch.full((clips,), 5.0))[1]

    model = Denoiser(hop, hidden)
    _, features = model.analyse(model.frames(quiet))
    model.mean.copy_(features.mean((0, 1)))
    model.deviation.copy_(features.std((0, 1)))
    further = -(-options.epochs // 3)
    console.print(f"training in float, {options.epochs} epochs")
    fit(model, training, options.epochs, RATE)
    longer = fit(copy.deepcopy(model), training, further, FURTHER_RATE)
    test.add("float", model)
    test.add("float, longer", longer)

    batches = quiet.split(BATCH)[:8]
    for name, config in MODELS.items():
        after = calibrate_model(convert_model(longer, config), batches, progress=False)
        test.add(f"{name} after", after)
        if name in TRAINED:
            console.print(f"training in integers ({name}), {further} epochs")
            trained = calibrate_model(convert_model(model, config), batches, progress=False)
            better = test.add(f"{name} trained", fit(trained, training, further, FURTHER_RATE))
            if name == "int8":
                best, gains = trained, better
    console.print(test.table)

    chosen = int(gains.argsort()[len(gains) // 2])  # neither the best nor the worst clip
    noisy, clean = test.noisy[chosen : chosen + 1], test.clean[chosen]
    denoised, seconds = stream(best, noisy)
    console.print(
        f"Streamed hop by hop, the GRU gives the bits of the whole clip; "
        f"{1e6 * seconds:.0f} us for each {1e3 * hop / voices.rate:.0f} ms."
    )
    panels = {"noisy": noisy[0], "int8, streamed": denoised[0], "clean": clean}
    write_spectrograms(folder / "spectrograms.svg", panels, voices.rate)
    for name, samples in panels.items():
        write_wav(folder / f"{name.partition(',')[0]}.wav", samples, voices.rate)
    best.gru.export_quant_params(folder / "gru_int8.json")
    torch.save(best.state_dict(), folder / "denoiser_int8.pt")


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, metavar="NPZ", help="spoken digits (docs/demo.md)")
    parser.add_argument("--epochs", type=int, help="of float training; a third of it further on")
    parser.add_argument("--output", type=Path, default=Path("enhancement_output"), metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="a few seconds, little learned")
    options = parser.parse_args(arguments)
    if options.epochs is None:
        options.epochs = 1 if options.quick else 40
    try:
        folder = OutputFolder.prepare(options.output).path
        voices = recorded_voices(options.data) if options.data else synthetic_voices(6, 10)
    except DataError as error:
        raise SystemExit(str(error)) from None
    started, console = time.perf_counter(), Console()
    console.print(f"{voices.name}: {len(voices.words)} speakers, {TEST_SPEAKERS} of them for test")
    enhance(voices, options, folder, console)
    console.print(f"{folder}: spectrograms.svg, wav files, denoiser_int8.pt, gru_int8.json")
    console.print(f"{time.perf_counter() - started:.0f} s, torch {torch.__version__}")


if __name__ == "__main__":
    main()
