"""ONNX files in ONNX Runtime: profiles, layers, states, lengths, steps, whole models, exporters."""

import copy
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from gru_helpers import C, H, onnx_run, packed, quantized, seeded, states
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import quant_gru
from quant_gru import FrozenQuantGRU, QuantConfig, QuantGRU, QuantGRUError
from quant_gru.interchange.onnx.profiles import EXACT, PROFILES
from sweeps import first_of

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
ort = pytest.importorskip("onnxruntime")

OLD = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::FutureWarning"),
]


def openvino_run(path):
    """As `onnx_run`, by OpenVINO: a function of the inputs of a file."""
    openvino = pytest.importorskip("openvino")
    # by itself it would compute in bfloat16 where the processor has it
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(str(path), "CPU", options)

    def call(*inputs):
        found = compiled([each.numpy() for each in inputs]).values()
        return [torch.from_numpy(each.copy()) for each in found]

    return call


def runtimes(path):
    """Functions of the inputs of a file, one for each runtime that is installed."""
    return [partial(onnx_run, path), *([openvino_run(path)] if find_spec("openvino") else [])]


def kinds(graph):
    """The operators of a graph, bodies included."""
    for node in graph.node:
        yield node.op_type
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from kinds(attribute.g)


def none_differ(report):
    assert report
    return not any(each.wrong for each in report.values())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "gru.onnx"


# --- one GRU


@pytest.mark.parametrize("config", first_of(["pot8", "free8-fused", "pot16", "w8a16-fused"], 2))
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}]
)
def test_integers_of_other_sizes_are_those_of_the_module(config, options, path):
    gru = quantized(config, **options)
    report = quant_gru.export_onnx(gru, path, seeded(3, 2, C))
    assert none_differ(report)
    assert set(report) == {"output", "h_n"}
    x = seeded(7, 1, C, seed=9, scale=2.0)
    with torch.no_grad():
        for ours, theirs in zip(onnx_run(path, x), gru(x), strict=True):
            assert torch.equal(ours, theirs)
            assert not (ours == 0)[ours.signbit()].any(), "a negative zero"


def test_initial_states_and_lengths(path):
    gru = quantized(num_layers=2, bidirectional=True, batch_first=True, zoneout=0.25)
    rows, _ = packed(4, 7, 1)
    assert none_differ(quant_gru.export_onnx(gru, path, (rows, states(gru, 3))))
    x, lengths, hx = seeded(4, 5, C, seed=3), torch.tensor([5, 1, 4, 2]), states(gru, 4, seed=8)
    y, h_n = onnx_run(path, x, hx, lengths)
    batch = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    with torch.no_grad():
        theirs, states_after = gru(batch, hx)
    assert torch.equal(y, pad_packed_sequence(theirs, batch_first=True)[0])
    assert torch.equal(h_n, states_after)


def test_saturating_infinite_and_missing_values(path):
    gru = quantized()
    quant_gru.export_onnx(gru, path, seeded(3, 2, C))
    x = seeded(4, 2, C, scale=1e6)
    x[1, 0, :2] = torch.tensor([torch.inf, -torch.inf])
    with torch.no_grad():
        assert torch.equal(onnx_run(path, x)[0], gru(x)[0])
        x[2, 1] = torch.nan
        assert torch.equal(
            onnx_run(path, x)[0], gru(torch.nan_to_num(x, 0.0, torch.inf, -torch.inf))[0]
        )


@pytest.mark.parametrize("profile", PROFILES)
def test_a_frozen_gru(profile, path, tmp_path):
    gru = quantized("w8a16-fused", num_layers=2)
    frozen = FrozenQuantGRU.from_state_dict(gru.freeze().state_dict())
    x = seeded(5, 2, C)
    report = quant_gru.export_onnx(frozen, path, x, profile)
    assert profile not in EXACT or none_differ(report)
    other = tmp_path / "other.onnx"
    quant_gru.export_onnx(gru, other, x, profile)
    with torch.no_grad():
        for each in (path, other):
            assert (onnx_run(each, x)[0] - gru(x)[0]).abs().max() < 0.02


@pytest.mark.parametrize("config", ["pot8", "pot8-symmetric", "pot8-fused", "pot16"])
def test_qdq_is_one_scan_of_quantizers(config, path):
    gru = quantized(config, bidirectional=True)
    x = seeded(6, 3, C)
    report = quant_gru.export_onnx(gru, path, x, "qdq")
    found = list(kinds(onnx.load(path).graph))
    assert found.count("Scan") == 2
    assert found.count("QuantizeLinear") == 2 * (11 if "fused" in config else 14)
    assert found.count("Sigmoid") == 4
    assert all(each.largest_real < 0.1 for each in report.values())


def test_qdq_with_biases_beyond_int32(path):
    """ONNX Runtime makes biases of Gemm int32 in units of the accumulator, which 16 bits exceed."""
    torch.manual_seed(0)
    gru = QuantGRU(C, H, config=QuantConfig.int16().replace_globals(scale_kind="free")).eval()
    with torch.no_grad():
        gru.bias_ih_l0.fill_(2.0)
        gru.bias_hh_l0.fill_(-1.9)
        gru.weight_ih_l0.mul_(0.1)
        gru.weight_hh_l0.mul_(0.1)
    x = seeded(9, 3, C, scale=0.1)
    gru.calibrate(x)
    gru.finalize_calibration()
    report = quant_gru.export_onnx(gru, path, x, "qdq")
    assert all(each.largest < 20 for each in report.values()), report


def test_qdq_without_fusions_of_the_runtime_is_exact_at_8_bits(path):
    """By default ONNX Runtime replaces QDQ by QLinear operators, which round differently."""
    gru = quantized("pot8")
    x = seeded(8, 3, C)
    quant_gru.export_onnx(gru, path, x, "qdq")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    with torch.no_grad():
        assert torch.equal(torch.from_numpy(session.run(None, {"input": x.numpy()})[0]), gru(x)[0])


@pytest.mark.parametrize("profile", ["float", "node"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_one_node_a_layer(profile, options, path):
    gru = quantized("pot16", **options)
    rows, _ = packed(4, 7, 1)
    report = quant_gru.export_onnx(gru, path, (rows, states(gru, 3)), profile)
    found = list(kinds(onnx.load(path).graph))
    assert found.count("GRU") == gru.num_layers
    assert ("QuantizeLinear" in found) is (profile == "node")
    assert all(each.largest_real < 0.5 for each in report.values())
    real = copy.deepcopy(gru)
    real.use_quantization = False
    x, hx = seeded(5, 2, C, scale=0.5), states(gru, 2)
    quant_gru.export_onnx(gru, path, (x, hx), profile, verify=False)
    with torch.no_grad():
        tolerance = 1e-6 if profile == "float" else 2e-2
        torch.testing.assert_close(onnx_run(path, x, hx)[0], real(x, hx)[0], rtol=0, atol=tolerance)


def test_a_float_gru_needs_no_scales(path):
    gru = QuantGRU(C, H, bias=False).eval()
    x = seeded(4, 2, C)
    assert quant_gru.export_onnx(gru, path, x, "float") == {}
    with torch.no_grad():
        torch.testing.assert_close(onnx_run(path, x)[0], gru(x)[0], rtol=0, atol=1e-6)


def test_nothing_is_unrolled(path):
    quant_gru.export_onnx(quantized(), path, seeded(300, 1, C), verify=False)
    assert len(list(kinds(onnx.load(path).graph))) < 150


# --- steps


@pytest.mark.parametrize("config", ["pot8", "pot16", "free8"])
@pytest.mark.parametrize("profile", first_of(PROFILES, 2))
def test_steps_are_the_stream(config, profile, path):
    gru = quantized(config, num_layers=2)
    report = quant_gru.export_step_onnx(gru, path, profile)
    stream = gru.stream(3)
    containers = [stream.state.dtype] * 2
    codes = [each.contiguous() for each in stream.state]
    for step in seeded(6, 3, C):
        y, *codes = onnx_run(path, step, *codes)
        expected = stream(step)
        assert [each.dtype for each in codes] == containers
        if profile in EXACT:
            assert torch.equal(y, expected)
            assert torch.equal(torch.stack(codes), stream.state)
    assert set(report) == {"output", "state"}
    assert profile not in EXACT or none_differ(report)
    assert all(each.largest_real < 0.5 for each in report.values())


# --- whole models


class Tagger(torch.nn.Module):
    """A convolution, a GRU of two layers and directions, and a linear layer."""

    def __init__(self, packs=False):
        super().__init__()
        self.conv = torch.nn.Conv1d(4, C, 3, padding=1)
        self.gru = quantized(num_layers=2, bidirectional=True, batch_first=True)
        self.linear = torch.nn.Linear(2 * H, 3)
        self.packs = packs

    def forward(self, x, lengths=None):
        v = self.conv(x.transpose(1, 2)).transpose(1, 2)
        if self.packs:
            v = pack_padded_sequence(v, lengths, batch_first=True, enforce_sorted=False)
        y, h_n = self.gru(v)
        if self.packs:
            y = pad_packed_sequence(y, batch_first=True)[0]
        return self.linear(y), h_n


@pytest.mark.parametrize("profile", first_of(PROFILES, 2))
def test_a_whole_model_with_another_batch_and_length(profile, path):
    model = Tagger().train()
    N = 1 if profile in EXACT else 3
    report = quant_gru.export_onnx(model, path, seeded(N, 9, 4), profile)
    assert model.training
    assert set(report) == {"gru.input", "gru.output", "gru.h_n", "linear", "getitem_1"}
    assert profile not in EXACT or none_differ(report)
    x, model = seeded(5, 13, 4, seed=4), model.eval()
    with torch.no_grad():
        y, h_n = model(x)
    calls = runtimes(path) if profile != "operator" else [partial(onnx_run, path)]
    for call, exact in zip(calls, (1e-6, 0.02), strict=False):
        # OpenVINO's convolution may round to the other side of a code
        tolerance = exact if profile in EXACT else 0.1
        for ours, theirs in zip(call(x), (y, h_n), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.slow
def test_a_whole_model_that_packs_its_rows(path):
    model = Tagger(packs=True).eval()
    report = quant_gru.export_onnx(model, path, (seeded(3, 9, 4), torch.tensor([9, 4, 6])))
    assert none_differ(report)
    x, lengths = seeded(5, 13, 4, seed=4), torch.tensor([3, 13, 1, 8, 8])
    with torch.no_grad():
        expected = model(x, lengths)
    for ours, theirs in zip(onnx_run(path, x, lengths), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = quantized(input_size=H, data=seeded(12, 4, H))
        self.other = self.gru.freeze()

    def forward(self, x, hx):
        y, h = self.gru(x, hx)
        y, h = self.gru(y, h)
        return self.other(y, h)


@pytest.mark.slow
def test_a_gru_that_is_called_twice_and_a_frozen_one(path):
    model = Twice()
    given = seeded(5, 2, H), states(model.gru, 2)
    report = quant_gru.export_onnx(model, path, given)
    assert none_differ(report)
    assert {name for name in report if "." in name} == {
        f"{name}.{each}"
        for name in ("gru", "gru#1", "other")
        for each in ("input", "output", "h_n")
    }
    x, hx = seeded(7, 3, H, seed=2), states(model.gru, 3, seed=6)
    with torch.no_grad():
        for ours, theirs in zip(onnx_run(path, x, hx), model(x, hx), strict=True):
            assert torch.equal(ours, theirs)


class Learned(torch.nn.Module):
    """A GRU with a learned initial state, of which the output alone is used."""

    def __init__(self):
        super().__init__()
        self.gru = quantized()
        self.hx = torch.nn.Parameter(states(self.gru, 1, scale=1.0))

    def forward(self, other=None, x=None):
        return {"y": self.gru(x, self.hx.expand(-1, x.shape[1], -1))[0]}


def test_a_learned_state_and_inputs_by_keyword(path):
    model = Learned()
    report = quant_gru.export_onnx(model, path, {"x": seeded(5, 2, C)})
    assert none_differ(report)
    assert {name for name in report if "." in name} == {"gru.input", "gru.output"}
    x = seeded(7, 3, C, seed=2)
    with torch.no_grad():
        assert torch.equal(onnx_run(path, x)[0], model(x=x)["y"])


class Denoiser(torch.nn.Module):
    """A causal model that streams by its states, in float64."""

    def __init__(self, gru):
        super().__init__()
        self.gru = gru
        self.linear = torch.nn.Linear(H, C)

    def forward(self, x, hx):
        y, h_n = self.gru(x, hx)
        return x * torch.sigmoid(self.linear(y)), h_n


@pytest.mark.parametrize("kind", first_of(["QuantGRU", "frozen"], 1))
def test_a_model_that_streams_by_its_states(kind, path):
    gru = quantized("pot16").double()
    model = Denoiser(gru if kind == "QuantGRU" else gru.freeze()).double().eval()
    example = seeded(1, 1, C).double(), torch.zeros(1, 1, H).double()
    assert none_differ(quant_gru.export_onnx(model, path, example))
    x, hx = seeded(9, 2, C, seed=3).double(), torch.zeros(1, 2, H).double()
    with torch.no_grad():
        y, h_n = model(x, hx)
    whole = onnx_run(path, x, hx)
    steps = []
    for step in x.split(1):
        found, hx = onnx_run(path, step, hx)
        steps.append(found)
    for ours in (whole, (torch.cat(steps), hx)):
        torch.testing.assert_close(ours[0], y, rtol=0, atol=1e-12)
        assert torch.equal(ours[1], h_n)


@pytest.mark.parametrize("profile", first_of(PROFILES, 2))
def test_a_streaming_denoiser_in_every_profile(profile, path):
    """Chunks of other lengths and batches than at export, states in and out."""
    model = Denoiser(quantized("pot8")).eval()
    example = seeded(3, 2, C), torch.zeros(1, 2, H)
    report = quant_gru.export_onnx(model, path, example, profile)
    assert profile not in EXACT or none_differ(report)
    x, start = seeded(9, 4, C, seed=3), torch.zeros(1, 4, H)
    with torch.no_grad():
        y, h_n = model(x, start)
    if profile == "node" and find_spec("openvino"):
        with pytest.raises(RuntimeError, match="LBR GRU forward propagation primitive"):
            openvino_run(path)
    for call in (
        runtimes(path) if profile not in ("node", "operator") else [partial(onnx_run, path)]
    ):
        steps, hx = [], start
        for chunk in x.split((1, 6, 2)):
            found, hx = call(chunk, hx)
            steps.append(found)
        tolerance = 1e-6 if profile in EXACT else 0.1
        torch.testing.assert_close(torch.cat(steps), y, rtol=0, atol=tolerance)
        torch.testing.assert_close(hx, h_n, rtol=0, atol=tolerance)


@pytest.mark.parametrize("profile", ["integer", "qdq"])
def test_openvino_takes_steps(profile, path):
    gru = quantized("pot8", num_layers=2)
    quant_gru.export_step_onnx(gru, path, profile)
    call, stream = openvino_run(path), gru.stream(3)
    codes = [each.contiguous() for each in stream.state]
    for step in seeded(6, 3, C):
        y, *codes = call(step, *codes)
        expected = stream(step)
        assert codes[0].dtype == stream.state.dtype
        tolerance = 0 if profile in EXACT else 0.1
        torch.testing.assert_close(y, expected, rtol=0, atol=tolerance)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("profile", "opset"),
    first_of(
        [("integer", 18), ("qdq", 21), ("qdq", 18), ("float", 21), ("node", 21), ("operator", 21)],
        1,
    ),
)
def test_the_exporter_of_torch_with_a_translation_table(profile, opset, path):
    model, auto = Tagger().eval(), torch.export.Dim.AUTO
    torch.onnx.export(
        model,
        (seeded(3, 9, 4),),
        path,
        dynamo=True,
        opset_version=opset,
        custom_translation_table=quant_gru.onnx_translations(profile),
        dynamic_shapes=({0: auto, 1: auto},),
        verbose=False,
    )
    x = seeded(5, 13, 4, seed=4)
    with torch.no_grad():
        y, h_n = model(x)
    tolerance = 1e-6 if profile in EXACT else 0.1
    for ours, theirs in zip(onnx_run(path, x), (y, h_n), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


# --- the older exporter, as document 002 has it


@pytest.mark.parametrize("profile", [pytest.param(each, marks=OLD) for each in PROFILES])
@pytest.mark.parametrize("config", ["pot8", "pot16"])
def test_export_mode_with_the_older_exporter(profile, config, path):
    gru = quantized(config, batch_first=True, bidirectional=True)
    gru.export_mode = True
    assert gru.export_format == "float"
    gru.export_format = profile
    torch.onnx.export(
        gru,
        seeded(1, 9, C),
        path,
        input_names=["input"],
        output_names=["output", "hidden"],
        dynamic_axes={
            "input": {0: "batch", 1: "seq_len"},
            "output": {0: "batch", 1: "seq_len"},
        },
        dynamo=False,
    )
    gru.export_mode = False
    model = onnx.load(path)
    onnx.checker.check_model(model)
    found = [kind for f in (*model.functions, model.graph) for kind in kinds(f)]
    assert found.count("Scan") == (2 if profile in ("integer", "qdq") else 0)
    x = seeded(4, 11, C, seed=4)
    gru.use_quantization = profile != "float"
    tolerance = {"integer": 0.0, "operator": 0.0, "float": 1e-6}.get(profile, 0.1)
    with torch.no_grad():
        for ours, theirs in zip(onnx_run(path, x), gru(x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def test_export_mode_in_a_plain_call():
    gru = quantized()
    x = seeded(4, 2, C)
    with torch.no_grad():
        integers = gru(x)[0]
        gru.export_mode = True
        real = gru(x)[0]
        gru.export_format = "qdq"
        assert torch.equal(gru(x)[0], integers)
        gru.export_mode = gru.use_quantization = False
        assert torch.equal(gru(x)[0], real)


# --- messages


def test_bad_requests_name_what_is_wrong(path):
    gru, x = quantized(), seeded(4, 2, C)
    with pytest.raises(QuantGRUError, match=r"profile to be one of .*got 'onnx'"):
        quant_gru.export_onnx(gru, path, x, "onnx")
    with pytest.raises(QuantGRUError, match=r"export_format to be one of .*got 'onnx'"):
        gru.export_format = "onnx"
    with pytest.raises(QuantGRUError, match="5 features last"):
        quant_gru.export_onnx(gru, path, x[0])
    with pytest.raises(QuantGRUError, match="calibrated"):
        quant_gru.export_onnx(QuantGRU(C, H), path, x)
    with pytest.raises(QuantGRUError, match="calibrated"):
        quant_gru.export_onnx(torch.nn.Sequential(QuantGRU(C, H)), path, x)
    with pytest.raises(QuantGRUError, match="got none in Linear"):
        quant_gru.export_onnx(torch.nn.Linear(2, 2), path, x)
    with pytest.raises(QuantGRUError, match="one direction"):
        quant_gru.export_step_onnx(quantized(bidirectional=True), path)
    with pytest.raises(QuantGRUError, match="got a Linear"):
        quant_gru.export_step_onnx(torch.nn.Linear(2, 2), path)
    wide = quantized(QuantConfig.int8().replace("gate.z_pre", bitwidth=20))
    with pytest.raises(QuantGRUError, match=r"at most 16 bits .*got 20 .*'gate.z_pre'"):
        quant_gru.export_onnx(wide, path, x, "qdq")
    with pytest.raises(QuantGRUError, match="without zoneout"):
        quant_gru.export_onnx(quantized(zoneout=0.5), path, x, "node")
    broken = quantized()
    with torch.no_grad():
        broken.weight_hh_l0[0, 0] = torch.nan
    with pytest.raises(QuantGRUError, match="finite weights"):
        quant_gru.export_onnx(broken, path, x)
    assert not path.exists()
    assert not list(path.parent.iterdir())


def test_codes_that_differ_are_an_error(path, monkeypatch):
    gru, other = quantized(), quantized()
    with torch.no_grad():
        other.weight_ih_l0.mul_(0.5)
    source = other._source()
    monkeypatch.setattr(gru, "_source", lambda: source)
    quant_gru.export_onnx(gru, path, seeded(4, 2, C))
    monkeypatch.setattr(
        "quant_gru.whole_models.onnx.sequence_model",
        lambda *_: __import__("quant_gru.interchange.onnx.model", fromlist=["x"]).sequence_model(
            quantized()._source(), "integer", False, False
        ),
    )
    path.unlink()
    with pytest.raises(QuantGRUError, match=r"codes of the plan .* of \d+ codes differ"):
        quant_gru.export_onnx(gru, path, seeded(4, 2, C))
    assert not path.exists()


def test_an_existing_file_remains_where_writing_fails(path, monkeypatch):
    path.write_text("mine")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    for write in (
        lambda: quant_gru.export_onnx(quantized(), path, seeded(4, 2, C), verify=False),
        lambda: quant_gru.export_step_onnx(quantized(), path, verify=False),
    ):
        with pytest.raises(QuantGRUError, match="Expected a writable file, got No space left"):
            write()
    assert [each.read_text() for each in path.parent.iterdir()] == ["mine"]


def test_a_missing_package_is_named(path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnx_ir", None)
    with pytest.raises(QuantGRUError, match=r'pip install "quant-gru\[onnx\]"'):
        quant_gru.export_onnx(quantized(), path, seeded(4, 2, C))
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(QuantGRUError, match=r"or give verify=False"):
        quant_gru.export_onnx(quantized(), path, seeded(4, 2, C))
    assert quant_gru.export_onnx(quantized(), path, seeded(4, 2, C), verify=False) == {}


def test_the_same_gru_gives_the_same_file(path, tmp_path):
    again = tmp_path / "again.onnx"
    for each in (path, again):
        quant_gru.export_onnx(quantized(), each, seeded(4, 2, C), verify=False)
    assert path.read_bytes() == again.read_bytes()
