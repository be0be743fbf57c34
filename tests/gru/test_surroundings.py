"""Default devices, inference mode, and tensors that are not dense."""

import copy

import pytest
import torch
from gru_helpers import C, H, quantized, seeded

from kept import kept
from quant_gru import FrozenQuantGRU, QuantGRU, QuantGRUError, operator_gain, operator_sqnr

X = seeded(4, 2, C)


@kept
def calibrated(method):
    torch.manual_seed(0)
    gru = QuantGRU(C, H, device="cpu")
    gru.calibration_method = method
    gru.calibrate(X)
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru


STATE = quantized().state_dict()


def assigned():
    gru = QuantGRU(C, H, device="cpu")
    gru.load_state_dict(STATE, assign=True)
    gru.use_quantization = True
    return gru


def reloaded(path):
    gru = quantized()
    gru.export_quant_params(path / "params.json")
    gru.load_quant_params(path / "params.json")
    return gru


def frozen_file(path):
    quantized().freeze().save(path / "gru.safetensors")
    return FrozenQuantGRU.load(path / "gru.safetensors")


def adjusted():
    gru = quantized()
    gru.adjust_quant_config("h", bitwidth=6)
    return gru


MADE = {
    "min-max": lambda _: calibrated("minmax"),
    "percentile": lambda _: calibrated("percentile"),
    "SQNR": lambda _: calibrated("sqnr"),
    "freeze": lambda _: quantized().freeze(),
    "adjust": lambda _: adjusted(),
    "assign": lambda _: assigned(),
    "parameter file": reloaded,
    "frozen file": frozen_file,
    "deepcopy": lambda _: copy.deepcopy(quantized()),
}


@pytest.mark.parametrize("name", MADE)
def test_a_default_device_changes_nothing(name, tmp_path):
    x = seeded(4, 2, C)
    with torch.no_grad():
        expected = MADE[name](tmp_path)(x)[0]
        with torch.device("meta"):
            found = MADE[name](tmp_path)(x)[0]
    assert torch.equal(found, expected)


def test_reports_and_files_beside_a_default_device(tmp_path):
    gru, x = quantized(), seeded(4, 2, C)
    gain, sqnr = operator_gain(gru, x), operator_sqnr(gru, x)
    gru.export_c(tmp_path / "a", "gru")
    with torch.device("meta"):
        assert str(operator_gain(gru, x)) == str(gain)
        assert str(operator_sqnr(gru, x)) == str(sqnr)
        gru.export_c(tmp_path / "b", "gru")
    for a in (tmp_path / "a").iterdir():
        assert a.read_bytes() == (tmp_path / "b" / a.name).read_bytes()


class Labelled(torch.Tensor):
    """A subclass of Tensor, as datasets have it."""


def test_a_stream_takes_subclasses_of_tensor():
    gru, x = quantized().eval(), seeded(4, 2, C)
    one, other = gru.stream(2), gru.stream(2)
    for step in x:
        assert torch.equal(one(step.as_subclass(Labelled)), other(step))


def test_a_stream_made_in_inference_mode_goes_on_outside():
    gru, x = quantized().eval(), seeded(4, 2, C)
    with torch.inference_mode():
        stream = gru.stream(2)
        first = [stream(step) for step in x]
    state = stream.state
    stream.reset()
    for step, expected in zip(x, first, strict=True):
        assert torch.equal(stream(step), expected)
    stream.state = state
    assert torch.equal(stream.state, state)


NOT_DENSE = {
    "a nested tensor": lambda: torch.nested.nested_tensor([seeded(3, C), seeded(2, C)]),
    "a nested tensor of torch.jagged": lambda: torch.nested.nested_tensor(
        [seeded(3, C), seeded(2, C)], layout=torch.jagged
    ),
    "torch.sparse_coo": lambda: seeded(2, C).to_sparse(),
}


@pytest.mark.parametrize("kind", NOT_DENSE)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_are_not_dense_are_errors(kind):
    gru, value, x = quantized().eval(), NOT_DENSE[kind](), seeded(4, 2, C)
    with torch.no_grad():
        gru(x)
        frozen = gru.freeze()
        frozen(x)
        for call in (
            lambda: gru(value),
            lambda: gru(x, value),
            lambda: frozen(value),
            lambda: frozen(x, value),
            lambda: gru.stream(2)(value),
            lambda: gru.trace_codes(value),
            lambda: gru.train()(value),
            lambda: QuantGRU(C, H).calibrate(value),
        ):
            with pytest.raises(QuantGRUError, match=rf"dense tensor, got {kind[:15]}"):
                call()


def test_sparse_weights_are_errors():
    gru = quantized()
    gru.weight_hh_l0 = torch.nn.Parameter(gru.weight_hh_l0.detach().to_sparse())
    with pytest.raises(QuantGRUError, match="weight_hh_l0 to be a dense tensor"):
        gru(seeded(4, 2, C))
