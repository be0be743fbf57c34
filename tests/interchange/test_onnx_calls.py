"""A GRU that a model calls many times stands once in its ONNX file, whatever the exporter."""

import warnings

import pytest
import torch

import quant_gru
from quant_gru import (
    calibrate_model,
    convert_model,
    export_onnx,
    export_step_onnx,
    onnx_translations,
)
from quant_gru.errors import QuantGRUError
from quant_gru.interchange.onnx.profiles import EXACT, PROFILES
from sweeps import first_of

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
ort = pytest.importorskip("onnxruntime")

CALLS = 6


class Decoder(torch.nn.Module):
    """A GRU whose output is its next input, and a cell in a loop."""

    def __init__(self, calls, size=64):
        super().__init__()
        self.calls = calls
        self.gru = torch.nn.GRU(size, size, batch_first=True)
        self.cell = torch.nn.GRUCell(size, size)

    def forward(self, x, h):
        state = h[0]
        for _ in range(self.calls):
            x, h = self.gru(x, h)
            state = self.cell(x[:, 0], state)
        return x, h, state


def example(rows=2, steps=1, size=64):
    return torch.randn(rows, steps, size), torch.zeros(1, rows, size)


def made(calls, preset="int8"):
    torch.manual_seed(0)
    batches = [example(4, 3)]
    model = convert_model(Decoder(calls).eval(), preset)
    return calibrate_model(model, batches, lambda m, batch: m(*batch))


def run(path, *inputs):
    options = ort.SessionOptions()
    options.register_custom_ops_library(quant_gru.onnx_operator_library())
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    feeds = dict(zip(names, (each.numpy() for each in inputs), strict=True))
    return [torch.from_numpy(each) for each in session.run(None, feeds)]


@pytest.mark.parametrize("profile", first_of(PROFILES, 1))
def test_many_calls_are_hardly_larger_than_one(profile, tmp_path):
    sizes = []
    most = CALLS if profile in EXACT else 4
    for calls in (1, most):
        path = tmp_path / f"{calls}.onnx"
        model = made(calls)
        report = export_onnx(model, path, example(), profile, verify=profile in EXACT)
        sizes.append(path.stat().st_size)
        onnx.checker.check_model(onnx.load(path))
    # one function more for each GRU, whose constants it does not share
    assert sizes[1] <= 1.3 * sizes[0], sizes
    if profile in EXACT:
        assert {"gru#5.output", "cell#5.output"} <= set(report)
        assert not any(each.differing for each in report.values())
        x, h = example(3, 2)
        with torch.no_grad():
            for ours, theirs in zip(run(path, x, h), model(x, h), strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_openvino_takes_functions_in_the_place_of_their_calls(tmp_path):
    openvino = pytest.importorskip("openvino")
    from onnx import inliner

    path, model = tmp_path / "model.onnx", made(3)
    export_onnx(model, path, example())
    hint, core = {"INFERENCE_PRECISION_HINT": "f32"}, openvino.Core()
    with pytest.raises(RuntimeError, match="No conversion rule found"):
        core.compile_model(str(path), "CPU", hint)
    onnx.save(inliner.inline_local_functions(onnx.load(path)), path)
    given = example(3, 2)
    with torch.no_grad():
        expected = model(*given)
    found = core.compile_model(str(path), "CPU", hint)([each.numpy() for each in given]).values()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(torch.from_numpy(ours), theirs)


def test_files_have_nothing_of_the_machine(tmp_path):
    """Stack traces of torch name the folders of who exports."""
    path = tmp_path / "model.onnx"
    export_onnx(made(1), path, example())
    content = path.read_bytes()
    assert b"stack_trace" not in content
    assert b"Traceback" not in content
    assert b".py" not in content


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_exporter_of_torch_shares_weights(tmp_path):
    sizes = []
    for calls in (1, 3):
        path = tmp_path / f"{calls}.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                made(calls),
                example(2, 3),
                path,
                dynamo=True,
                opset_version=21,
                custom_translation_table=onnx_translations("integer"),
                verbose=False,
            )
        weights = [each for each in onnx.load(path).graph.initializer if 64 in each.dims]
        sizes.append(sum(len(each.raw_data) for each in weights))
    assert sizes[0] == sizes[1]


class Apart(torch.nn.Module):
    """Calls with and without lengths, of one step and of more, in one model."""

    def __init__(self):
        super().__init__()
        self.gru = torch.nn.GRU(6, 6, batch_first=True)

    def forward(self, x, lengths):
        y, h = self.gru(x)
        packed = torch.nn.utils.rnn.pack_padded_sequence(
            y, lengths, batch_first=True, enforce_sorted=False
        )
        _, h = self.gru(packed, h)
        for _ in range(2):
            _, h = self.gru(x[:, :1], h)
        return h


@pytest.mark.slow
def test_calls_of_several_kinds(tmp_path):
    torch.manual_seed(0)
    given = torch.randn(3, 5, 6), torch.tensor([5, 2, 4])
    model = convert_model(Apart().eval(), "int8")
    calibrate_model(model, [given], lambda m, batch: m(*batch))
    path = tmp_path / "model.onnx"
    export_onnx(model, path, given)
    (function,) = onnx.load(path).functions
    assert "Scan" not in [node.op_type for node in function.node]
    x, lengths = torch.randn(4, 7, 6), torch.tensor([1, 7, 3, 6])
    with torch.no_grad():
        assert torch.equal(run(path, x, lengths)[0], model(x, lengths))


def test_arguments_in_the_order_of_torch_are_an_error(tmp_path):
    gru = calibrate_model(convert_model(torch.nn.GRU(3, 4), "int8"), [torch.randn(5, 2, 3)])
    path = tmp_path / "gru.onnx"
    with pytest.raises(QuantGRUError, match=r"Expected the path before the example.*gru\.onnx"):
        export_onnx(gru, torch.randn(5, 2, 3), path)
    for call in (export_onnx, export_step_onnx):
        with pytest.raises(QuantGRUError, match="Expected the path of a file, got tensor"):
            call(gru, torch.ones(1), *([torch.ones(5, 2, 3)] if call is export_onnx else []))
    assert not path.exists()
