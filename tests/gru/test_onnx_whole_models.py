"""ONNX files of whole models: what they return is what PyTorch returns, or there is an error."""

import pytest
import torch
from gru_helpers import onnx_run, seeded
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from quant_gru import (
    QuantGRUError,
    QuantGRUWarning,
    calibrate_model,
    convert_model,
    export_onnx,
    freeze_model,
)
from quant_gru.interchange.onnx.profiles import EXACT, PROFILES

pytestmark = pytest.mark.slow

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

GRU, CELL, LINEAR = torch.nn.GRU, torch.nn.GRUCell, torch.nn.Linear
ROWS, LENGTHS = seeded(3, 12, 6), torch.tensor([9, 5, 7])


def made(model, *example, preset="int8"):
    torch.manual_seed(0)
    model = convert_model(model().eval(), preset)
    return calibrate_model(model, [example], lambda m, batch: m(*batch))


def sizes(path):
    """Name of an input or output of a file -> its sizes, names or numbers."""
    graph = onnx.load(path).graph
    return {
        each.name: [dim.dim_param or dim.dim_value for dim in each.type.tensor_type.shape.dim]
        for each in (*graph.input, *graph.output)
    }


def same_as_torch(path, model, *inputs, tolerance=1e-6):
    with torch.no_grad():
        expected = model(*inputs)
    expected = [expected] if isinstance(expected, torch.Tensor) else expected
    for ours, theirs in zip(onnx_run(path, *inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def exact(report):
    return not any(each.wrong for each in report.values())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.onnx"


# --- outputs that nothing reads


class Tagger(torch.nn.Module):
    """The model of the README; with `last`, it reads the last state alone."""

    def __init__(self, last=False, **options):
        super().__init__()
        self.last, self.gru = last, GRU(5, 8, batch_first=True, **options)
        self.head = LINEAR(16 if options.get("bidirectional") and not last else 8, 3)

    def forward(self, x):
        y, h = self.gru(x)
        return self.head(h[-1] if self.last else y)


@pytest.mark.parametrize(
    ("options", "profile"),
    [
        ({}, "integer"),
        ({}, "float"),
        ({"bidirectional": True}, "float"),
        ({"last": True}, "node"),
        ({"num_layers": 2, "last": True}, "integer"),
        ({"num_layers": 2, "last": True}, "operator"),
    ],
)
def test_a_result_that_nothing_reads(options, profile, path):
    x = seeded(4, 7, 5)
    model = made(lambda: Tagger(**options), x)
    report = export_onnx(model, path, x, profile)
    read = {"gru.h_n"} if options.get("last") else {"gru.output"}
    if profile == "operator":  # one node has both
        read = {"gru.h_n", "gru.output"}
    assert set(report) == {"gru.input", *read, "linear"}
    assert report["linear"].differing == report["gru.input"].differing == 0
    model.gru.use_quantization = profile != "float"
    if profile != "node":
        same_as_torch(path, model, seeded(2, 9, 5, seed=3))


class Idle(torch.nn.Module):
    """The first and the third of four calls are not read, or not in full."""

    def __init__(self):
        super().__init__()
        self.gru, self.back = GRU(5, 8), LINEAR(8, 5)

    def forward(self, x):
        self.gru(2 * x)
        y, _ = self.gru(x)
        _, h = self.gru(x)
        return self.gru(self.back(y))[0], h


@pytest.mark.parametrize("profile", ["integer", "float"])
def test_calls_that_nothing_reads(profile, path):
    x = seeded(7, 2, 5)
    report = export_onnx(made(Idle, x), path, x, profile)
    assert not any(each.differing for name, each in report.items() if "input" in name)
    assert profile not in EXACT or exact(report)
    assert "gru.output" not in report
    assert {"gru#1.output", "gru#3.output"} <= set(report)


def test_a_frozen_model_in_the_profile_float(path):
    x = seeded(4, 7, 5)
    report = export_onnx(freeze_model(made(Tagger, x)), path, x, "float")
    assert set(report) == {"gru.input", "gru.output", "linear"}


# --- initial states


class Started(torch.nn.Module):
    def __init__(self, kind, layers=1):
        super().__init__()
        self.gru = GRU(5, 8, layers, batch_first=True)
        states = torch.randn(layers, 1, 8)
        if kind == "learned":
            self.h0 = torch.nn.Parameter(states)
        else:
            self.register_buffer("h0", states)

    def forward(self, x):
        return self.gru(x, self.h0)[0]


@pytest.mark.parametrize(
    ("kind", "layers", "profile"),
    [("learned", 1, "integer"), ("stored", 1, "float"), ("stored", 2, "integer")],
)
def test_a_constant_initial_state(kind, layers, profile, path):
    x = seeded(1, 7, 5)
    model = made(lambda: Started(kind, layers), x)
    report = export_onnx(model, path, x, profile)
    assert profile not in EXACT or exact(report)
    assert report["transpose_1"].differing == 0
    # the batch of the state is that of the model
    assert sizes(path)["x"][0] == 1
    model.gru.use_quantization = profile in EXACT
    same_as_torch(path, model, seeded(1, 11, 5, seed=4))


# --- packed rows


class Packs(torch.nn.Module):
    def __init__(self, then="", total=None, value=0.0):
        super().__init__()
        self.gru, self.linear = GRU(6, 6), LINEAR(6, 6)
        self.other = GRU(6, 6) if then == "gru" else None
        self.then, self.total, self.value = then, total, value

    def forward(self, x, n):
        packed = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        packed, h = self.gru(packed)
        if self.then == "mean":
            return packed.data.mean(0)
        if self.then == "packed":
            return packed
        if self.then == "linear":
            packed = PackedSequence(self.linear(packed.data), *packed[1:])
        if self.then == "gru":
            packed, h = self.other(packed, h)
        total = x.shape[1] if self.total == "T" else self.total
        y, rows = pad_packed_sequence(packed, True, self.value, total)
        return y.mean(1), y, rows, h


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"total": 20},
        {"total": 10},
        {"total": "T"},
        {"value": 3.5},
        {"then": "linear", "total": 20},
        {"then": "gru", "value": -1.0},
    ],
)
def test_padding_is_that_of_torch(options, path):
    model = made(lambda: Packs(**options), ROWS, LENGTHS)
    assert exact(export_onnx(model, path, (ROWS, LENGTHS)))
    for lengths in ([7, 1, 8, 8], [3, 10, 2, 1], [1, 1, 1, 1]):
        same_as_torch(path, model, seeded(4, 10, 6, seed=2), torch.tensor(lengths))


@pytest.mark.parametrize(("then", "shape"), [("mean", "(6,)"), ("packed", "(21, 6)")])
def test_packed_rows_by_themselves_are_an_error(then, shape, path):
    model = made(lambda: Packs(then), ROWS, LENGTHS)
    with pytest.raises(QuantGRUError, match=rf"shape \({shape[1:-1]}\) from ONNX Runtime"):
        export_onnx(model, path, (ROWS, LENGTHS))
    assert not path.exists()


@pytest.mark.parametrize("profile", PROFILES)
def test_lengths_are_clamped_to_the_steps(profile, path):
    model = made(Packs, ROWS, LENGTHS)
    export_onnx(model, path, (ROWS, LENGTHS), profile, verify=False)
    given, clamped = torch.tensor([99, -3, 5]), torch.tensor([12, 0, 5])
    for ours, theirs in zip(
        onnx_run(path, ROWS, given), onnx_run(path, ROWS, clamped), strict=True
    ):
        # the third output is the lengths themselves
        assert ours.dtype == torch.int64 or torch.equal(ours, theirs)
    *_, h_n = onnx_run(path, ROWS, given)
    assert not h_n[:, 1].any(), "a row without steps keeps its state, zero"
    assert h_n[:, 0].any()


# --- sizes that are dynamic, or not


class Started0(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.cell, self.rows = CELL(8, 8), rows

    def forward(self, x):
        h = self.cell(x, torch.zeros(8).expand(self.rows(x), -1))
        return self.cell(h, h)


def test_a_batch_that_tracing_fixes_is_fixed_in_the_file(path):
    x = seeded(7, 8)
    model = made(lambda: Started0(len), x)
    with pytest.warns(QuantGRUWarning, match=r"axis 0 of 'x' is 7 .* len\(x\)"):
        assert exact(export_onnx(model, path, x))
    assert sizes(path)["x"] == [7, 8]
    model = made(lambda: Started0(lambda x: x.shape[0]), x)
    assert exact(export_onnx(model, path, x))
    assert isinstance(sizes(path)["x"][0], str)
    assert sizes(path)["x"][1] == 8
    same_as_torch(path, model, seeded(5, 8, seed=2))


class Steps(torch.nn.Module):
    """A loop over steps, which tracing unrolls."""

    def __init__(self):
        super().__init__()
        self.cell = CELL(5, 8)

    def forward(self, x):
        h = None
        for step in x.unbind(1):
            h = self.cell(step, h)
        return h


@pytest.mark.parametrize("profile", ["integer", "node"])
def test_a_loop_over_steps_fixes_their_number(profile, path):
    x = seeded(2, 3, 5)
    model = made(Steps, x)
    with pytest.warns(QuantGRUWarning, match="axis 1 of 'x' is 3"):
        report = export_onnx(model, path, x, profile)
    assert [name for name in report if "output" in name] == [
        "cell.output",
        "cell#1.output",
        "cell#2.output",
    ]
    assert sizes(path)["x"][1:] == [3, 5]
    if profile in EXACT:
        same_as_torch(path, model, seeded(6, 3, 5, seed=2))


class Divided(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = GRU(5, 8)

    def forward(self, x):
        return self.gru(x)[0].sum(0) / x.new_tensor([float(v) for v in x.shape])[0]


def test_dynamic_shapes_that_tracing_fixes_are_an_error(path):
    x, auto = seeded(7, 2, 5), torch.export.Dim.AUTO
    model = made(Divided, x)
    with pytest.raises(QuantGRUError, match="Expected the sizes of dynamic_shapes, got fixed"):
        export_onnx(model, path, x, dynamic_shapes=({0: auto, 1: auto},))
    assert not path.exists()


# --- models that are no function of their inputs


class Remembers(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.gru, self.how = GRU(5, 8), how
        self.register_buffer("h", torch.zeros(1, 2, 8))
        self.other = torch.zeros(1, 2, 8)

    def forward(self, x):
        if self.how == "noise":
            return self.gru(x + torch.randn_like(x))[0]
        y, h = self.gru(x, self.h if self.how == "buffer" else self.other)
        if self.how == "buffer":
            self.h.copy_(h)
        else:
            self.other = h
        return y


@pytest.mark.parametrize("how", ["buffer", "attribute", "noise"])
def test_a_model_that_gives_other_outputs_at_every_call_is_an_error(how, path):
    x = seeded(4, 2, 5)
    model = made(lambda: Remembers(how), x)
    before = model.h.clone()
    with pytest.raises(QuantGRUError, match="same outputs when it is called again"):
        export_onnx(model, path, x)
    assert torch.equal(model.h, before)
    assert not path.exists()


# --- decisions, and what is passed between GRUs


class Decoder(torch.nn.Module):
    """Encoder and greedy decoder: a GRUCell in a loop, fed with its own decisions."""

    def __init__(self):
        super().__init__()
        self.embed, self.encoder = torch.nn.Embedding(20, 8), GRU(8, 8, batch_first=True)
        self.cell, self.head = CELL(8, 8), LINEAR(8, 20)

    def forward(self, tokens):
        h = self.encoder(self.embed(tokens))[1][-1]
        token, found = torch.zeros_like(tokens[:, 0]), []
        for _ in range(4):
            h = self.cell(self.embed(token), h)
            token = self.head(h).argmax(-1)
            found.append(token)
        return torch.stack(found, 1)


def test_an_encoder_and_a_greedy_decoder(path):
    tokens = torch.randint(0, 20, (3, 6), generator=torch.Generator().manual_seed(0))
    model = made(Decoder, tokens)
    report = export_onnx(model, path, tokens)
    assert exact(report)
    assert {"encoder.h_n", "cell.output", "cell#3.output", "stack"} <= set(report)
    same_as_torch(path, model, torch.cat((tokens, tokens.flip(0))), tolerance=0)


class Inputs(torch.nn.Module):
    """Two inputs, one of them a dict; a dict as output."""

    def __init__(self):
        super().__init__()
        self.gru, self.head = GRU(5, 8, batch_first=True), LINEAR(8, 3)

    def forward(self, features, scale, unused=None):
        y, h = self.gru(features["a"] + features["b"] * scale)
        return {"logits": self.head(y), "best": self.head(y).argmax(-1), "h": h, "none": None}


def test_dicts_in_and_out(path):
    example = {"scale": seeded(2, 7, 5), "features": {"a": seeded(2, 7, 5), "b": seeded(2, 7, 5)}}
    torch.manual_seed(0)
    model = convert_model(Inputs().eval(), "int8")
    calibrate_model(model, [example], lambda m, batch: m(**batch))
    report = export_onnx(model, path, example)
    assert exact(report)
    assert len([name for name in report if "." not in name]) == 3


class Masked(torch.nn.Module):
    """A mask that broadcasts over features."""

    def __init__(self):
        super().__init__()
        self.gru = GRU(5, 8, batch_first=True)

    def forward(self, x, mask):
        return self.gru(x * mask)[0] * mask


def test_a_size_of_1_that_broadcasts(path):
    example = seeded(2, 7, 5), torch.ones(2, 7, 1)
    model = made(Masked, *example)
    assert exact(export_onnx(model, path, example))
    assert sizes(path)["mask"][2] == 1
    assert isinstance(sizes(path)["mask"][0], str)
    same_as_torch(path, model, seeded(3, 9, 5, seed=2), torch.ones(3, 9, 1))


# --- float layers that a file has wrong


def test_outputs_that_differ_beyond_rounding_are_an_error(path, monkeypatch):
    x = seeded(4, 7, 5)
    model = made(Tagger, x)
    convert = torch.onnx.export

    def other(*args, **kwargs):
        program = convert(*args, **kwargs)
        bias = program.model.graph.initializers["head.bias"]
        import onnx_ir

        bias.const_value = onnx_ir.tensor(bias.const_value.numpy() + 1e-3)
        return program

    monkeypatch.setattr(torch.onnx, "export", other)
    with pytest.raises(QuantGRUError, match=r"linear: \d+ of \d+ values differ beyond rounding"):
        export_onnx(model, path, x)
    assert not path.exists()
    with pytest.warns(QuantGRUWarning, match=r"float layers .* by more than rounding: linear"):
        export_onnx(model, path, x, "node")
    assert path.exists()


# --- half precision


class Half(torch.nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.gru, self.head = GRU(6, 10, batch_first=batch_first), LINEAR(10, 2)

    def forward(self, x):
        y, _ = self.gru(x)
        return self.head(y if self.gru.batch_first else y.transpose(0, 1))


@pytest.mark.parametrize(
    ("batch_first", "profile"),
    [*((True, each) for each in PROFILES), (False, "integer")],
)
def test_a_half_model_loads_and_gives_its_values(batch_first, profile, path):
    x = seeded(4, 8, 6).half()
    model = made(lambda: Half(batch_first).half(), x)
    report = export_onnx(model, path, x, profile)
    assert profile not in EXACT or exact(report)
    assert report["linear"].differing == 0
    # ONNX Runtime ends the process at a cast to float16 that is transposed
    casts = {
        node.output[0]
        for node in onnx.load(path).graph.node
        if node.op_type == "Cast" and node.attribute[0].i == onnx.TensorProto.FLOAT16
    }
    nodes = onnx.load(path).graph.node
    assert casts
    assert not any(node.op_type == "Transpose" and node.input[0] in casts for node in nodes)
    onnx_run(path, seeded(3, 5, 6).half())
