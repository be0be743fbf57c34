"""The profile operator: the library that ONNX Runtime loads, its errors, and what it costs."""

import base64
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

ort = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

from kept import calibrated_gru  # noqa: E402
from quant_gru import (  # noqa: E402
    FrozenQuantGRU,
    QuantGRUError,
    export_onnx,
    onnx_operator_library,
)

C, H = 5, 7
pytestmark = pytest.mark.filterwarnings("ignore:.*dynamic_axes.*")


def made(config="int8", **options):
    return calibrated_gru(C, H, config, data=(8, 8), **options)


def session_of(model):
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.register_custom_ops_library(onnx_operator_library())
    given = model if isinstance(model, str) else model.SerializeToString()
    return ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])


def written(gru, path, *inputs):
    """A file without names of sizes, so that the operator itself sees what it is given."""
    export_onnx(gru, path, inputs, "operator")
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    return model


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "model.onnx")


def test_a_file_has_one_node_with_the_frozen_file(path):
    gru = made(num_layers=2, bidirectional=True, batch_first=True)
    export_onnx(gru, path, torch.randn(4, 3, C), "operator")
    model = onnx.load(path)
    onnx.checker.check_model(model)
    (node,) = [each for each in model.graph.node if each.domain == "quant_gru.operators"]
    (attribute,) = node.attribute
    found = path + ".safetensors"
    with open(found, "wb") as file:
        file.write(base64.b64decode(attribute.s, validate=True))
    frozen, x = FrozenQuantGRU.load(found), torch.randn(6, 2, C)
    with torch.no_grad():  # time is first in the file
        assert torch.equal(frozen(x)[0], gru(x.transpose(0, 1))[0].transpose(0, 1))


def test_rows_that_nan_reaches_are_nan_as_in_torch(path):
    gru, x = made(), torch.randn(6, 3, C)
    export_onnx(gru, path, x, "operator")
    x[2, 1, 0], x[1, 0, 1] = torch.nan, torch.inf
    with torch.no_grad():
        expected = gru(x)
    found = session_of(path).run(None, {"input": x.numpy()})
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs.numpy())
    assert np.isnan(found[0][2:, 1]).all()


@pytest.mark.parametrize(
    ("x", "hx", "message"),
    [
        ((4, 2, C + 1), (1, 2, H), r"Expected x to have the shape \(T, N, 5\), got \(4, 2, 6\)"),
        ((4, C), (1, 2, H), r"Expected x to have the shape \(T, N, 5\), got \(4, 5\)"),
        ((4, 2, C), (1, 3, H), r"Expected h0 to have the shape \(1, 2, 7\), got \(1, 3, 7\)"),
        ((4, 2, C), (1, 2), r"Expected h0 to have the shape \(1, 2, 7\), got \(1, 2\)"),
        ((0, 2, C), (1, 2, H), "Expected T to be at least 1, got 0"),
        ((4, 0, C), (1, 0, H), "Expected N to be at least 1, got 0"),
    ],
)
def test_shapes(x, hx, message, path):
    session = session_of(written(made(), path, torch.randn(4, 2, C), torch.zeros(1, 2, H)))
    feeds = {"input": np.zeros(x, np.float32), "hx": np.zeros(hx, np.float32)}
    with pytest.raises(Exception, match=message):  # its exceptions share no other class
        session.run(None, feeds)
    good = {"input": np.zeros((1, 1, C), np.float32), "hx": np.zeros((1, 1, H), np.float32)}
    assert session.run(None, good)[0].shape == (1, 1, H)  # nothing is lost


def test_lengths(path):
    gru, x = made(bidirectional=True), torch.randn(6, 3, C)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, [6, 2, 4], enforce_sorted=False)
    export_onnx(gru, path, packed, "operator")
    session = session_of(path)
    with torch.no_grad():
        y, h_n = gru(packed)
    expected = torch.nn.utils.rnn.pad_packed_sequence(y)[0].numpy(), h_n.numpy()
    found = session.run(None, {"input": x.numpy(), "lengths": np.array([6, 2, 4])})
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    export_onnx(gru, path + ".integer", packed)
    for lengths in ([7, 2, 4], [0, 2, -4]):  # clamped, as in all profiles
        feeds = {"input": x.numpy(), "lengths": np.array(lengths)}
        expected = session_of(path + ".integer").run(None, feeds)
        for ours, theirs in zip(session.run(None, feeds), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: b"", "Expected a safetensors file, got 0 bytes"),
        (lambda raw: b"\xff\xfe", "Expected model in base64, got another character"),
        (lambda raw: raw[:-40], "Expected"),
        (lambda raw: b"AAAA" + raw, "Expected"),
    ],
    ids=["empty", "characters", "cut", "shifted"],
)
def test_hostile_models_are_errors(change, message, path):
    model = written(made(), path, torch.randn(4, 2, C))
    (node,) = [each for each in model.graph.node if each.domain == "quant_gru.operators"]
    node.attribute[0].s = change(node.attribute[0].s)
    with pytest.raises(Exception, match=message):
        session_of(model)


def test_a_node_without_a_model_is_an_error(path):
    model = written(made(), path, torch.randn(4, 2, C))
    (node,) = [each for each in model.graph.node if each.domain == "quant_gru.operators"]
    del node.attribute[:]
    with pytest.raises(Exception, match="model"):
        session_of(model)


def test_several_threads_and_sessions(path):
    gru, x = made("int16", num_layers=2), torch.randn(30, 4, C)
    export_onnx(gru, path, x, "operator")
    with torch.no_grad():
        expected = gru(x)[0].numpy()
    sessions, wrong = [session_of(path), session_of(path)], []

    def run(session):
        for _ in range(50):
            if not np.array_equal(session.run(["output"], {"input": x.numpy()})[0], expected):
                wrong.append(session)

    threads = [threading.Thread(target=run, args=(each,)) for each in (*sessions, *sessions)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_the_library_needs_neither_this_package_nor_torch(path, tmp_path):
    gru, x = made(), torch.randn(6, 3, C)
    export_onnx(gru, path, x, "operator")
    with torch.no_grad():
        np.savez(tmp_path / "data.npz", x=x.numpy(), y=gru(x)[0].numpy())
    program = (
        "import sys, numpy, onnxruntime\n"
        "options = onnxruntime.SessionOptions()\n"
        "options.register_custom_ops_library(sys.argv[1])\n"
        "data = numpy.load(sys.argv[3])\n"
        "session = onnxruntime.InferenceSession(sys.argv[2], options)\n"
        "assert (session.run(['output'], {'input': data['x']})[0] == data['y']).all()\n"
        "assert not {'torch', 'quant_gru'} & set(sys.modules)\n"
    )
    given = (onnx_operator_library(), path, str(tmp_path / "data.npz"))
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, *given], check=True)


def test_an_installation_without_the_library(monkeypatch):
    monkeypatch.setattr("quant_gru.kernels.__path__", [])
    with pytest.raises(QuantGRUError, match=r"beside the kernels, got none; install the package"):
        onnx_operator_library()
