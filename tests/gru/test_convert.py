"""Whole models: convert_model and calibrate_model."""

import copy
import math

import pytest
import torch
from gru_helpers import C, H, Reaching, calibrated_alike, same, seeded
from torch import nn

from quant_gru import (
    CalibrationError,
    CustomGRU,
    QuantConfig,
    QuantGRU,
    QuantGRUError,
    QuantGRUWarning,
    calibrate_model,
    convert_model,
)


class Classifier(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.gru = nn.GRU(C, H, batch_first=True, **options)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(H, 3)

    def forward(self, inputs, hx=None):
        out, _ = self.gru(inputs, hx)
        return self.head(self.dropout(out[:, -1]))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Classifier(), Classifier()])
        self.named = nn.ModuleDict({"a": nn.Sequential(nn.Linear(C, C), nn.GRU(C, H))})

    def forward(self, x):
        y = sum(block(x) for block in self.blocks)
        return y + self.named["a"](x.transpose(0, 1))[1].mean()


class Twice(nn.Module):
    """One GRU under two names, used twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.GRU(C, C)
        self.rest = nn.ModuleList([self.first])

    def forward(self, x):
        return self.rest[0](self.first(x)[0])[0]


class Own(nn.GRU):
    """A subclass with a forward of its own."""

    def forward(self, x, hx=None):
        y, h_n = super().forward(x, hx)
        return 2 * y, h_n


def grus(model):
    return [m for m in model.modules() if isinstance(m, QuantGRU)]


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "in place"])
@pytest.mark.parametrize("make", [Classifier, Nested, Twice], ids=lambda m: m.__name__)
def test_a_converted_model_computes_what_it_did(make, inplace):
    model = make().eval()
    x = seeded(4, 3, C)
    expected = model(x)
    names = [name for name, _ in model.named_modules()]
    keys = list(model.state_dict())
    converted = convert_model(model, QuantConfig.int16(), inplace=inplace)
    assert (converted is model) is inplace
    same(converted(x), expected)
    assert [name for name, _ in converted.named_modules()] == names
    assert list(converted.state_dict()) == keys
    assert not [m for m in converted.modules() if type(m) is nn.GRU]
    for gru in grus(converted):
        assert gru.config == QuantConfig.int16()
        assert not gru.use_quantization
        assert not gru.is_calibrated()
        assert not gru.training
    if not inplace:
        assert not grus(model)
        same(model(x), expected)


def test_default_config():
    (gru,) = grus(convert_model(Classifier()))
    assert gru.config == QuantConfig()


def test_a_module_used_twice_is_converted_once():
    converted = convert_model(Twice())
    assert converted.first is converted.rest[0]
    calibrate_model(converted, [seeded(4, 2, C)])
    assert len(list(converted.parameters())) == 4
    assert converted(seeded(4, 2, C)).isfinite().all()


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "in place"])
def test_the_root_may_be_a_gru(inplace):
    gru = nn.GRU(C, H, 2, bidirectional=True, batch_first=True, dropout=0.3).eval()
    x = seeded(3, 4, C)
    converted = convert_model(gru, inplace=inplace)
    assert type(converted) is QuantGRU
    assert type(gru) is nn.GRU
    same(converted(x)[0], gru(x)[0])
    shared = converted.weight_ih_l0 is gru.weight_ih_l0
    assert shared is inplace
    assert converted.batch_first
    assert converted.dropout == 0.3


def test_in_place_shares_parameters_and_the_optimizer_goes_on():
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    parameters = dict(model.named_parameters())
    convert_model(model, inplace=True)
    assert dict(model.named_parameters()) == parameters
    assert all(a is parameters[name] for name, a in model.named_parameters())
    calibrate_model(model, [seeded(8, 4, C)])
    before = {name: p.detach().clone() for name, p in parameters.items()}
    x, y = seeded(8, 4, C), torch.arange(8) % 3
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model.eval()(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_copy_is_on_its_own():
    model = Classifier()
    converted = convert_model(model)
    with torch.no_grad():
        converted.gru.weight_ih_l0.zero_()
    assert model.gru.weight_ih_l0.any()
    assert converted.gru.weight_ih_l0 is not model.gru.weight_ih_l0


def test_in_place_moves_and_casts_together_with_the_original():
    model = Classifier()
    gru = model.gru
    convert_model(model, inplace=True)
    model.double()
    assert model.gru.weight_ih_l0.dtype == torch.float64
    model.eval()
    x = seeded(3, 4, C).double()
    assert model(x).dtype == torch.float64
    del gru


@pytest.mark.parametrize("training", [True, False])
def test_training_flags_are_kept(training):
    model = Nested().train(training)
    model.blocks[0].gru.train(not training)
    converted = convert_model(model)
    assert converted.blocks[0].gru.training is not training
    assert converted.blocks[1].gru.training is training


def test_hooks_are_kept():
    model = Classifier().eval()
    seen = []
    handle = model.gru.register_forward_hook(lambda module, args, out: seen.append("after"))
    model.gru.register_forward_pre_hook(lambda module, args: seen.append("before"))
    convert_model(model, inplace=True)
    model(seeded(2, 3, C))
    assert seen == ["before", "after"]
    handle.remove()
    model(seeded(2, 3, C))
    assert seen == ["before", "after", "before"]


def test_frozen_parameters_and_own_attributes_are_kept():
    model = Classifier()
    model.gru.weight_hh_l0.requires_grad_(False)
    model.gru.note = "mine"
    model.gru.register_buffer("offset", torch.ones(2))
    converted = convert_model(model)
    assert not converted.gru.weight_hh_l0.requires_grad
    assert converted.gru.note == "mine"
    assert torch.equal(converted.gru.offset, torch.ones(2))
    assert "gru.offset" in converted.state_dict()


def test_a_subclass_is_left_with_a_warning():
    model = nn.Sequential(Own(C, H), nn.Identity())
    with pytest.warns(QuantGRUWarning, match=r"0 is a Own"):
        converted = convert_model(model)
    assert type(converted[0]) is Own
    mixed = nn.ModuleList([Own(C, H), nn.GRU(C, H)])
    with pytest.warns(QuantGRUWarning, match="Own"):
        converted = convert_model(mixed)
    assert [type(m) for m in converted] == [Own, QuantGRU]


@pytest.mark.parametrize("config", [None, {"0": None, "*": "int8"}], ids=["none", "by name"])
def test_quantized_grus_are_left_without_a_warning(config):
    own = QuantGRU(C, H, config=QuantConfig.int16())
    model = nn.ModuleList([own, CustomGRU(C, H), nn.GRU(C, H)])
    convert_model(model, config, inplace=True)
    assert model[0] is own
    assert own.config == QuantConfig.int16()
    assert [type(m) for m in model] == [QuantGRU, CustomGRU, QuantGRU]


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(), nn.LSTM(2, 2)], ids=str)
def test_a_model_without_a_gru_is_an_error(model):
    with pytest.raises(QuantGRUError, match=type(model).__name__):
        convert_model(model)


def test_absent_children_do_not_matter():
    model = Classifier()
    model.missing = None
    model.register_module("other", None)
    assert len(grus(convert_model(model))) == 1


def test_a_converted_model_is_copied_and_saved():
    model = calibrate_model(convert_model(Nested()), [seeded(4, 3, C)]).eval()
    x = seeded(4, 3, C)
    same(copy.deepcopy(model)(x), model(x))
    other = convert_model(Nested()).eval()
    other.load_state_dict(model.state_dict())
    same(other(x), model(x))


# --- calibrate_model


def pack(x):
    return nn.utils.rnn.pack_sequence(list(x), enforce_sorted=False)


X = [seeded(4, 3, C, seed=i) for i in range(3)]
Y = torch.zeros(4)
BATCHES = {
    "tensors": X,
    "pairs": [(x, Y) for x in X],
    "lists": [[x, Y, "name"] for x in X],
    "dicts": [{"inputs": x, "labels": Y} for x in X],
    "dicts with hx": [{"inputs": x, "hx": None, "labels": Y} for x in X],
    "generator": (x for x in X),
    "loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.cat(X)), 4),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_kinds_of_batches(kind):
    model = convert_model(Classifier())
    assert calibrate_model(model, BATCHES[kind]) is model
    assert model.gru.use_quantization
    assert model.gru.is_calibrated()
    assert model.gru.get_quant_config() == calibrated_alike(model.gru, *X)


def test_packed_batches():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = QuantGRU(C, H)

        def forward(self, sequences):
            return self.gru(sequences)[1][0]

    for batches in ([pack(x) for x in X], [(pack(x), Y) for x in X]):
        model = calibrate_model(Pooled(), batches)
        assert model(pack(X[0])).shape == (4, H)
    model = calibrate_model(Pooled(), [{"sequences": pack(x), "labels": Y} for x in X])
    assert model.gru.is_calibrated()


def test_a_gru_as_the_model():
    gru = calibrate_model(QuantGRU(C, H, batch_first=True), [{"input": X[0], "labels": Y}])
    assert gru.use_quantization


def test_forward_fn():
    model = convert_model(Classifier())
    seen = []

    def forward(each, batch):
        seen.append(batch["name"])
        assert not each.training
        assert not torch.is_grad_enabled()
        each.gru(batch["deep"]["x"])

    calibrate_model(model, [{"name": i, "deep": {"x": x}} for i, x in enumerate(X)], forward)
    assert seen == [0, 1, 2]
    assert model.gru.use_quantization


def test_unknown_batches_are_an_error():
    for batch in ("words", 3, None, object()):
        with pytest.raises(CalibrationError, match="forward_fn"):
            calibrate_model(convert_model(Classifier()), [batch])


@pytest.mark.parametrize("kind", ["tensor", "pack", "dict"])
def test_a_single_batch_instead_of_a_list_is_an_error(kind):
    """Iterating over a tensor would take every row, or step, for a sequence of its own."""
    batch = {"tensor": X[0], "pack": pack(X[0]), "dict": {"input": X[0]}}[kind]
    with pytest.raises(QuantGRUError, match=r"batches|list"):
        calibrate_model(QuantGRU(C, H), batch)


@pytest.mark.parametrize("training", [True, False])
def test_modes_and_flags_are_restored(training):
    model = convert_model(Nested()).train(training)
    model.blocks[0].dropout.train(not training)
    modes = [m.training for m in model.modules()]
    calibrate_model(model, X)
    assert [m.training for m in model.modules()] == modes
    assert not any(gru.calibrating for gru in grus(model))
    assert all(p.grad is None for p in model.parameters())


def failing():
    yield X[0]
    raise OSError("the disk is gone")


@pytest.mark.parametrize("training", [True, False])
def test_modes_and_flags_are_restored_on_an_error(training):
    model = convert_model(Nested()).train(training)
    model.blocks[1].head.eval()
    modes = [m.training for m in model.modules()]
    for batches, error in (
        (failing(), OSError),
        ([seeded(4, 3, C + 1)], RuntimeError),
        (["words"], CalibrationError),
    ):
        with pytest.raises(error):
            calibrate_model(model, batches)
        assert [m.training for m in model.modules()] == modes
        for gru in grus(model):
            assert not gru.calibrating
            assert not gru.use_quantization
            assert not gru.is_calibrated()


@pytest.mark.parametrize("failure", ["unreached", "NaN", "interrupted"])
def test_after_a_failure_one_may_simply_try_again(failure):
    """No half state: neither scales of some GRUs nor statistics of the failed attempt."""
    model = Reaching()
    model.reach = failure != "unreached"
    batches = {
        "unreached": X,
        "NaN": [*X, torch.full((4, 3, C), float("nan"))],
        "interrupted": (100 * x for x in failing()),
    }[failure]
    with pytest.raises((CalibrationError, OSError, QuantGRUWarning)):
        calibrate_model(model, batches)
    model.reach = True
    calibrate_model(model, X)
    expected = Reaching()
    expected.reach = True
    expected.load_state_dict({n: p.detach() for n, p in model.named_parameters()})
    calibrate_model(expected, X)
    for a, b in zip(grus(model), grus(expected), strict=True):
        assert a.get_quant_config() == b.get_quant_config()


def test_no_batches():
    model = convert_model(Classifier())
    with pytest.raises(CalibrationError, match="batch"):
        calibrate_model(model, [])
    assert not model.gru.use_quantization


def test_no_quant_gru():
    with pytest.raises(CalibrationError, match="convert_model"):
        calibrate_model(Classifier(), X)


def test_calibrated_already():
    model = calibrate_model(convert_model(Classifier()), X)
    with pytest.raises(CalibrationError, match=r"'gru'.*reset_calibration"):
        calibrate_model(model, X)
    assert model.gru.use_quantization
    model.gru.reset_calibration()
    calibrate_model(model, X)


def test_disable_quantization_is_respected():
    config = QuantConfig.int8().replace_globals(disable_quantization=True)
    model = calibrate_model(convert_model(Classifier(), config), X)
    assert model.gru.is_calibrated()
    assert not model.gru.use_quantization


def test_a_model_in_quantized_mode_is_calibrated_in_floating_point():
    """use_quantization may be on from the start; calibration sees float values all the same."""
    gru = QuantGRU(C, H, batch_first=True, use_quantization=True)
    model = nn.ModuleDict({"gru": gru})
    model.forward = lambda x: gru(x)
    calibrate_model(model, X)
    assert gru.get_quant_config() == calibrated_alike(gru, *X)


def test_custom_grus_of_a_model():
    model = nn.Sequential(CustomGRU(C, H, calibration_data=9 * X[0]))
    calibrate_model(model, X)
    assert model[0].get_quant_config() == calibrated_alike(model[0], *X)


def test_nothing_is_printed(capfd):
    calibrate_model(convert_model(Classifier()), X, progress=True)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""  # no terminal, no bar


def test_scales_of_a_converted_model_can_be_learned():
    model = convert_model(Classifier(), QuantConfig.int8())
    model.gru.learn_scales = True
    batch = seeded(4, 7, C)
    calibrate_model(model, [batch])
    values = dict(model.named_parameters())["gru.log2_scale_l0"]
    assert values[0] == math.log2(model.gru.get_quant_config("x")["scale"])
    other = convert_model(Classifier(), QuantConfig.int8())
    other.gru.learn_scales = True
    other.load_state_dict(model.state_dict())
    same(other.eval()(batch), model.eval()(batch))
    model.train()(batch).square().sum().backward()
    assert values.grad.any()


def test_a_model_that_cannot_be_copied():
    model = nn.ModuleDict({"gru": nn.GRU(C, H)})
    model.result = model["gru"](seeded(5, 3, C))[0]
    with pytest.raises(
        QuantGRUError, match=r"that can be copied, got RuntimeError .* inplace=True"
    ):
        convert_model(model)
    assert convert_model(model, inplace=True) is model


@pytest.mark.parametrize("kind", [nn.GRU, nn.GRUCell])
def test_training_before_calibration_is_warned_of(kind):
    """Until then nothing is in integers, so such a training knows nothing of rounding."""
    x = seeded(3, C)
    model = convert_model(nn.ModuleDict({"gru": kind(C, H)}), "int8")
    with torch.no_grad():
        model["gru"](x)
    model.eval()["gru"](x)
    with pytest.warns(QuantGRUWarning, match="converted and not calibrated.*calibrate the model"):
        copy.deepcopy(model).train()["gru"](x)
    model.train()["gru"].use_quantization = False  # floating point is meant
    model["gru"](x)
    off = QuantConfig(disable_quantization=True)
    convert_model(kind(C, H), off)(x)
    ready = calibrate_model(convert_model(kind(C, H), "int8"), [x[None] if kind is nn.GRU else x])
    ready.train()(x)
