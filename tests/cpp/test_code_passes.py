"""The passes over pointers to codes against QuantGRU: codes and gradients, bit for bit."""

from __future__ import annotations

import pytest
import torch
from c_access import Access
from code_passes import Codes, Drawn
from cpp_build import NEEDS_TOOLS

from quant_gru.kernels.cpu import executor

pytestmark = NEEDS_TOOLS


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both libraries use the same instruction set."""
    monkeypatch.setenv(executor.VARIABLE, "portable")


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize("seed", range(12))
def test_gradients(access: Access, seed: int) -> None:
    """Training equals Python's: codes of the forward and all gradients."""
    case = Codes(seed, 0.0)
    drawn = Drawn(case, seed, zoneout=seed % 3 == 0)
    y, expected = drawn.python(case)
    states = case.run(access, drawn.x, drawn.h0, p=0.4, mask=drawn.code_mask, training=True)
    assert torch.equal(case.q["output.h"].dequantize(states), y)
    h = torch.cat((drawn.h0[None], states))
    found = case.gradients(access, drawn.x, h, drawn.grad, drawn.code_mask)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    assert all(float(gradient.abs().max()) > 0 for gradient in expected.values())
    # step by step the sums of weight gradients round at other places
    found = case.gradients(access, drawn.x, h, drawn.grad, drawn.code_mask, by_steps=True)
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-5, atol=1e-5), name
        if name in ("dx", "dh"):
            assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("bits", [8, 16])
def test_any_number_of_threads(access: Access, small_parts: None, bits: int) -> None:
    case = next(case for case in (Codes(seed, 0.0) for seed in range(20)) if case.bits == bits)
    drawn = Drawn(case, 3, zoneout=True)
    found = []
    for threads in (1, 2, 7):
        states = case.run(
            access, drawn.x, drawn.h0, mask=drawn.code_mask, training=True, threads=threads
        )
        h = torch.cat((drawn.h0[None], states))
        gradients = case.gradients(access, drawn.x, h, drawn.grad, drawn.code_mask, threads=threads)
        found.append([states, *gradients.values()])
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


def test_gradients_are_added(access: Access) -> None:
    """Gradients of weights are added to what is there; without steps, nothing changes."""
    case = Codes(4, 0.0)
    drawn = Drawn(case, 4, zoneout=False)
    h = torch.cat((drawn.h0[None], case.run(access, drawn.x, drawn.h0, training=True)))
    once = case.gradients(access, drawn.x, h, drawn.grad, None)
    more = case.gradients(access, drawn.x, h, drawn.grad, None, start=8.0)
    none = case.gradients(access, drawn.x[:0], h[:1], drawn.grad[:0], None, start=8.0)
    for name in ("dW", "dR", "dbx", "dbr"):
        assert torch.equal(more[name], once[name] + 8)
        assert (none[name] == 8).all()
    assert torch.equal(more["dx"], once["dx"])
    assert torch.equal(more["dh"], once["dh"])


@pytest.mark.parametrize("seed", range(12))
def test_codes(access: Access, seed: int) -> None:
    zoneout = (0.0, 0.3)[seed % 2]
    case = Codes(seed, zoneout)
    drawn = Drawn(case, seed, zoneout=False)
    expected = case.gru.forward_integer(drawn.x, drawn.h0[None])[0].to(torch.int64)
    for by_steps in (False, True):
        found = case.run(access, drawn.x, drawn.h0, p=zoneout, by_steps=by_steps)
        assert torch.equal(found, expected)


def test_codes_that_are_held(access: Access) -> None:
    """A mask counts in training only."""
    case = Codes(1, 0.0)
    x, h0 = torch.zeros(2, case.N, case.C), torch.ones(case.N, case.H)
    mask = torch.zeros(2, case.N, case.H, dtype=case.dtype)
    plain = case.run(access, x, h0)
    assert (case.run(access, x, h0, mask=mask, training=True) == 1).all()
    assert torch.equal(case.run(access, x, h0, mask=mask), plain)
    assert torch.equal(case.run(access, x, h0, mask=mask + 1, training=True), plain)
    assert not (plain == 1).all()


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (0, -1.0, r"scale.*operator 'input\.x'"),
        (0, 0.0, "scale"),
        (13, torch.nan, "scale.*weights"),
    ],
)
def test_scales_are_checked(access: Access, place: int, value: float, said: str) -> None:
    case = Codes(0, 0.0)
    case.scale[place] = value
    with pytest.raises(ValueError, match=said):
        case.run(access, torch.zeros(1, 1, case.C), torch.zeros(1, case.H))


def test_zero_points_of_inputs_are_codes(access: Access) -> None:
    """Those of ranges that exclude 0 are refused."""
    case = Codes(3, 0.0)
    lowest = -(1 << (case.bits - 1))
    case.zero[0] = lowest - 1
    x, h0 = torch.zeros(2, 1, case.C), torch.zeros(1, case.H)
    with pytest.raises(ValueError, match=rf"zero_point to be an integer in.*{lowest - 1}.*input"):
        case.run(access, x, h0)


def test_zero_points_are_checked(access: Access) -> None:
    case = Codes(0, 0.0)
    case.zero[5] = -1.0  # gate.z_out is unsigned
    with pytest.raises(ValueError, match=r"zero_point.*\[0, .*got -1.*gate\.z_out"):
        case.run(access, torch.zeros(1, 1, case.C), torch.zeros(1, case.H))
