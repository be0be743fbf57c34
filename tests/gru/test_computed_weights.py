"""GRUs whose weights are computed from other tensors: pruned, normalized, parametrized."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize, prune

from quant_gru import (
    QuantGRU,
    QuantGRUCell,
    calibrate_model,
    convert_model,
    freeze_model,
    load_frozen,
)
from sweeps import first_of

C, H = 5, 6
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")


def pruned(gru: torch.nn.Module, name: str) -> None:
    prune.l1_unstructured(gru, name, 0.5)


def weight_norm(gru: torch.nn.Module, name: str) -> None:
    torch.nn.utils.weight_norm(gru, name)


def spectral_norm(gru: torch.nn.Module, name: str) -> None:
    torch.nn.utils.spectral_norm(gru, name)


def parametrized_weight_norm(gru: torch.nn.Module, name: str) -> None:
    parametrizations.weight_norm(gru, name)


def parametrized_spectral_norm(gru: torch.nn.Module, name: str) -> None:
    parametrizations.spectral_norm(gru, name)


HOOKS = [pruned, weight_norm, spectral_norm]
PARAMETRIZED = [parametrized_weight_norm, parametrized_spectral_norm]
KINDS = [*HOOKS, *PARAMETRIZED]
CELL = {True: "weight_hh", False: "weight_hh_l0"}
Compute = Callable[[torch.nn.Module, str], None]


def model(cell: bool = False) -> torch.nn.ModuleDict:
    gru = torch.nn.GRUCell(C, H) if cell else torch.nn.GRU(C, H)
    return torch.nn.ModuleDict({"gru": gru}).eval()


def inputs(cell: bool = False) -> torch.Tensor:
    return torch.randn(4, C) if cell else torch.randn(9, 4, C)


def run(made: torch.nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    y = made["gru"](x)
    return y[0] if isinstance(y, tuple) else y


def calibrated(made: torch.nn.ModuleDict, x: torch.Tensor) -> torch.nn.ModuleDict:
    return calibrate_model(made, [x], lambda each, batch: each["gru"](batch))


@pytest.mark.parametrize("cell", [False, True], ids=["gru", "cell"])
@pytest.mark.parametrize("compute", KINDS)
def test_freezing(compute: Compute, cell: bool) -> None:
    made = convert_model(model(cell), "int8")
    compute(made["gru"], CELL[cell])
    x = inputs(cell)
    calibrated(made, x)
    with torch.no_grad():
        expected = run(made, x)
    frozen = freeze_model(made)
    assert torch.equal(run(frozen, x), expected)
    if compute is pruned:
        assert (frozen["gru"].R_l0 == 0).float().mean() >= 0.5
    assert torch.equal(run(load_frozen(made, frozen.state_dict()), x), expected)
    other = model(cell)
    compute(other["gru"], CELL[cell])
    assert torch.equal(run(load_frozen(other, frozen.state_dict()), x), expected)
    assert torch.equal(run(freeze_model(made, inplace=True), x), expected)


@pytest.mark.parametrize("cell", [False, True], ids=["gru", "cell"])
@pytest.mark.parametrize("copied", first_of([False, True], 1))
@pytest.mark.parametrize("compute", KINDS)
def test_converting(compute: Compute, copied: bool, cell: bool) -> None:
    """Also after a call with gradients, as after training."""
    made, x = model(cell), inputs(cell)
    compute(made["gru"], CELL[cell])
    expected = run(made, x).detach()
    quantized = convert_model(made, "int16", inplace=not copied)
    assert isinstance(quantized["gru"], QuantGRUCell if cell else QuantGRU)
    assert torch.equal(run(quantized, x), expected)
    assert list(quantized.state_dict()) == list(made.state_dict())
    calibrated(quantized, x)
    y = run(quantized, x)
    assert (y - expected).norm() < 1e-2 * expected.norm()
    y.square().sum().backward()
    assert all(each.grad is not None for each in quantized.parameters())
    assert torch.equal(run(copy.deepcopy(freeze_model(quantized)), x), y.detach())


def test_parametrizations_can_be_removed() -> None:
    made = model()
    parametrized_weight_norm(made["gru"], "weight_hh_l0")
    quantized = convert_model(made, "int8")
    weight = quantized["gru"].weight_hh_l0.detach()
    parametrize.remove_parametrizations(quantized["gru"], "weight_hh_l0")
    assert type(quantized["gru"]) is QuantGRU
    assert torch.equal(quantized["gru"].weight_hh_l0, weight)


@pytest.mark.parametrize("compute", KINDS)
@pytest.mark.parametrize(
    "use",
    [
        lambda gru, x: gru.freeze()(x)[0],
        lambda gru, x: gru.stream(4)(x[0]),
        lambda gru, x: gru.trace_codes(x)["output.h_l0"],
        lambda gru, x: gru.forward_integer((x * 20).to(torch.int8))[0],
    ],
    ids=["freeze", "stream", "trace_codes", "forward_integer"],
)
def test_what_is_computed_is_of_now(compute: Compute, use) -> None:
    """No call comes between a change of the original weights and the use of the computed ones."""
    made = convert_model(model(), "int8")
    compute(made["gru"], "weight_hh_l0")
    x = inputs()
    calibrated(made, x)
    with torch.no_grad():
        run(made, x)
        for each in made["gru"].parameters():
            each.mul_(-0.5)
        got = use(made["gru"], x)
        run(made, x)
        assert torch.equal(got, use(made["gru"], x))


def test_hooks_on_weights_that_a_frozen_gru_does_not_have() -> None:
    made = convert_model(model(), "int8")

    def clip(gru: torch.nn.GRU, _: object) -> None:
        gru.weight_hh_l0.data.clamp_(-1, 1)

    made["gru"].register_forward_pre_hook(clip)
    calibrated(made, inputs())
    with pytest.raises(AttributeError, match=r"'weight_hh_l0': a frozen GRU has integers.*remove"):
        freeze_model(made)["gru"](inputs())
