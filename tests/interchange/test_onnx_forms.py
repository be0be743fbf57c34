"""Fixed sizes, opsets, metadata and optional states of ONNX files."""

import numpy as np
import pytest
import torch

import quant_gru
from kept import kept
from quant_gru import (
    FrozenQuantGRU,
    QuantConfig,
    QuantGRU,
    QuantGRUError,
    calibrate_model,
    convert_model,
    export_onnx,
    export_step_onnx,
)
from quant_gru.interchange.onnx.profiles import EXACT, PROFILES
from quant_gru.whole_models.onnx_verify import verified_file

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
ort = pytest.importorskip("onnxruntime")

C, H = 5, 6


@kept
def made(preset="int8", **options):
    torch.manual_seed(0)
    config = getattr(QuantConfig, preset)()
    gru = QuantGRU(C, H, batch_first=True, config=config, **options).eval()
    gru.calibrate(torch.randn(4, 12, C) + 0.5)
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru


class Tagger(torch.nn.Module):
    """What strides over time, two calls of a GRU, and operators that opset 18 has changed."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv1d(4, C, 3, stride=2)
        self.gru = torch.nn.GRU(C, 2 * C, batch_first=True)
        self.linear = torch.nn.Linear(C, C)

    def forward(self, x):
        y, h = self.gru(self.conv(x.transpose(1, 2)).transpose(1, 2))
        left, right = y.chunk(2, -1)
        y, h = self.gru(torch.nn.functional.pad(self.linear(left), (0, 0, 1, 1)), h)
        return y, right.mean(1), right.amax(-1), h


def tagger():
    torch.manual_seed(0)
    model = convert_model(Tagger().eval(), "int8")
    return calibrate_model(model, [torch.randn(4, 20, 4)])


def session_of(path):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.register_custom_ops_library(quant_gru.onnx_operator_library())
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def shapes(values):
    return [[dim.dim_value or dim.dim_param for dim in each.type.tensor_type.shape.dim]
            for each in values]  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.onnx"


# --- sizes


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_one_step_has_no_scan(profile, options, path):
    gru = made(**options)
    x = torch.randn(3, 1, C)
    hx = 0.3 * torch.randn(gru.num_layers * (1 + gru.bidirectional), 3, H)
    report = export_onnx(gru, path, (x, hx), profile, time=1)
    graph = onnx.load(path).graph
    assert "Scan" not in [node.op_type for node in graph.node]
    assert shapes(graph.input)[0] == ["batch", 1, C]
    assert profile not in EXACT or not any(each.differing for each in report.values())
    if profile in EXACT:
        more = torch.cat((x, x.flip(0))), torch.cat((hx, hx.flip(1)), 1)
        with torch.no_grad():
            expected = gru(*more)
        found = session_of(path).run(None, {"input": more[0].numpy(), "hx": more[1].numpy()})
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["integer", "float"])
def test_fixed_sizes_of_a_whole_model(profile, path):
    model, x = tagger(), torch.randn(3, 20, 4)
    report = export_onnx(model, path, x, profile, batch=3, time=20)
    graph = onnx.load(path).graph
    known = [*graph.input, *graph.output, *graph.value_info]
    assert shapes(graph.input) == [[3, 20, 4]]
    assert shapes(graph.output)[0] == [3, 11, 2 * C]
    assert all(isinstance(dim, int) for shape in shapes(known) for dim in shape)
    assert profile not in EXACT or not any(each.differing for each in report.values())


@pytest.mark.slow
def test_one_fixed_size_leaves_the_other(path):
    model = tagger()
    export_onnx(model, path, torch.randn(3, 20, 4), time=20)
    x = torch.randn(7, 20, 4)
    with torch.no_grad():
        expected = model(x)[0].numpy()
    assert np.array_equal(session_of(path).run(None, {"x": x.numpy()})[0], expected)
    export_onnx(made(), path, torch.randn(2, 4, C), batch=2)
    assert shapes(onnx.load(path).graph.input) == [[2, "time", C]]


def test_sizes_that_do_not_fit(path):
    for model, given in ((made(), torch.randn(2, 4, C)), (tagger(), torch.randn(2, 20, 4))):
        with pytest.raises(QuantGRUError, match=r"an example with .*3.*fixed, got 2"):
            export_onnx(model, path, given, batch=3)
    for size in (0, -1, 1.0, True, "2"):
        with pytest.raises(QuantGRUError, match="Expected batch to be at least 1"):
            export_onnx(made(), path, torch.randn(2, 4, C), batch=size)
    assert not path.exists()


class Apart(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = torch.nn.GRU(C, H)

    def forward(self, x, other):
        return self.gru(x)[0], self.gru(other)[0]


def test_time_of_inputs_of_their_own_is_ambiguous(path):
    given = torch.randn(5, 2, C), torch.randn(6, 2, C)
    model = convert_model(Apart().eval(), "int8")
    calibrate_model(model, [given], lambda m, batch: m(*batch))
    with pytest.raises(QuantGRUError, match="one size of the inputs that time at all GRUs"):
        export_onnx(model, path, given, time=5)


# --- opsets


@pytest.mark.parametrize("profile", PROFILES)
def test_opset_17(profile, path):
    gru = made(num_layers=2, bidirectional=True)
    for write in (
        lambda: export_onnx(gru, path, torch.randn(2, 4, C), profile, opset=17),
        lambda: export_step_onnx(made(num_layers=2), path, profile, opset=17),
    ):
        report = write()
        found = onnx.load(path)
        onnx.checker.check_model(found)
        assert {each.domain: each.version for each in found.opset_import}[""] == 17
        assert found.ir_version == 8
        assert profile not in EXACT or not any(each.differing for each in report.values())


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["integer", "node"])
def test_opset_17_of_a_whole_model(profile, path):
    model, x = tagger(), torch.randn(2, 20, 4)
    export_onnx(model, path, x, profile, opset=17)
    found = onnx.load(path)
    onnx.checker.check_model(found)
    assert {each.domain: each.version for each in found.opset_import}[""] == 17
    assert found.ir_version == 8
    with torch.no_grad():
        expected = model(x)
    for ours, theirs in zip(session_of(path).run(None, {"x": x.numpy()}), expected, strict=True):
        assert np.abs(ours - theirs.numpy()).max() < (1e-6 if profile in EXACT else 0.2)


class New(torch.nn.Module):
    """BitwiseAnd is new in opset 18."""

    def __init__(self):
        super().__init__()
        self.gru = torch.nn.GRU(C, H)

    def forward(self, x):
        return torch.bitwise_and(self.gru(x)[0].to(torch.int32), 3)


def test_what_an_opset_lacks_is_named(path):
    model = convert_model(New().eval(), "int8")
    x = torch.randn(5, 2, C)
    calibrate_model(model, [x])
    with pytest.raises(QuantGRUError, match=r"opset 17 can have, got.*BitwiseAnd.*opset 18 or"):
        export_onnx(model, path, x, opset=17)
    for opset in (16, 26, "17"):
        with pytest.raises(QuantGRUError, match="opset to be from 17 to 25"):
            export_onnx(made(), path, torch.randn(2, 4, C), opset=opset)
    assert not path.exists()


# --- metadata and the start of a stream


def notes(path):
    return {each.key: each.value for each in onnx.load(path).metadata_props}


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_metadata_of_every_file(profile, path):
    gru = made(num_layers=2)
    model = torch.nn.Sequential(gru)
    writes = [
        (lambda: export_onnx(gru, path, torch.randn(2, 4, C), profile, verify=False), ""),
        (lambda: export_step_onnx(gru, path, profile, verify=False), ""),
        (lambda: export_onnx(model, path, torch.randn(2, 4, C), profile, verify=False), "0."),
    ]
    for write, before in writes[: 3 if profile in EXACT else 2]:
        write()
        found = notes(path)
        assert found["quant_gru.profile"] == profile
        assert found["quant_gru.version"] == quant_gru.__version__
        assert found[f"quant_gru.{before}scale_kind"] == "pot"
        for layer in (0, 1):
            state = gru.get_quant_config("output.h", layer=layer)
            note = f"quant_gru.{before}state_l{layer}"
            assert float(found[f"{note}.scale"]) == state["scale"]
            assert int(found[f"{note}.zero_point"]) == state["zero_point"]


def test_metadata_of_directions_and_free_scales(path):
    gru = made(bidirectional=True)
    export_onnx(gru, path, torch.randn(2, 4, C), verify=False)
    state = gru.get_quant_config("output.h", reverse=True)
    assert float(notes(path)["quant_gru.state_l0_reverse.scale"]) == state["scale"]
    torch.manual_seed(0)
    gru = QuantGRU(C, H, config=QuantConfig.int8().replace_globals(scale_kind="free")).eval()
    gru.calibrate(torch.randn(8, 4, C))
    gru.finalize_calibration()
    export_step_onnx(gru, path, verify=False)
    assert notes(path)["quant_gru.scale_kind"] == "free"
    export_onnx(QuantGRU(C, H), path, torch.randn(4, 2, C), "float")
    assert set(notes(path)) == {"quant_gru.profile", "quant_gru.version"}


def test_a_stream_from_the_metadata_alone(path):
    """As a program without Python would do it."""
    gru = made(num_layers=2)
    export_step_onnx(gru, path)
    session = session_of(path)
    kinds = {"tensor(int8)": np.int8, "tensor(uint8)": np.uint8}
    found = session.get_modelmeta().custom_metadata_map
    states = {
        each.name: np.full((3, H), int(found[f"quant_gru.{each.name}.zero_point"]),
                           kinds[each.type])
        for each in session.get_inputs()[1:]
    }  # fmt: skip
    stream = gru.stream(3)
    for x in torch.randn(4, 3, C):
        y, *after = session.run(None, {"input": x.numpy(), **states})
        states = dict(zip(states, after, strict=True))
        assert np.array_equal(y, stream(x).numpy())


def test_the_command_line_verifies_files_of_all_forms(path, tmp_path):
    frozen = tmp_path / "gru.safetensors"
    gru = made(num_layers=2)
    gru.freeze().save(frozen)
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        torch.randn(3, 4, C), [4, 2, 3], batch_first=True, enforce_sorted=False
    )
    for write in (
        lambda: export_onnx(gru, path, torch.randn(3, 1, C), batch=3, time=1),
        lambda: export_onnx(gru, path, packed, batch=3),
        lambda: export_step_onnx(gru, path, batch=3),
        lambda: export_step_onnx(gru, path, optional_states=True),
    ):
        write()
        report = verified_file(path, FrozenQuantGRU.load(frozen)._source())
        assert report
        assert not any(each.differing for each in report.values())


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("preset", "batch"), [("int8", None), ("int16", None), ("int8", 3)])
def test_a_first_step_without_states(profile, preset, batch, path):
    gru = made(preset, num_layers=2)
    export_step_onnx(gru, path, profile, batch=batch, optional_states=True)
    session = session_of(path)
    names = [each.name for each in session.get_overridable_initializers()]
    assert sorted(names) == ["state_l0", "state_l1"]
    stream, states = gru.stream(3), {}
    for x in torch.randn(4, 3, C):
        y, *after = session.run(None, {"input": x.numpy(), **states})
        states = {f"state_l{layer}": codes for layer, codes in enumerate(after)}
        expected = stream(x).numpy()
        if profile in EXACT:
            assert np.array_equal(y, expected)
        assert np.abs(y - expected).max() < 0.3
