"""The search for scales by what quantizing does to the states."""

import itertools

import pytest
import torch

from quant_gru.calibration.covering import covering_scale
from quant_gru.calibration.effects import _NUMBERS
from quant_gru.integer.quantizer import Quantizer, code_limits
from quant_gru.kernels import _native

T, H = 9, 6
BATCH_SIZES = [4, 4, 4, 3, 3, 2, 2, 1, 1]


def steps(scale=1.0, seed=0):
    """Packed rows of Wx, Rh (rows, 3H) and of the states before them (rows, H)."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(BATCH_SIZES)
    Wx, Rh = (scale * torch.randn(rows, 3 * H, generator=generator) for _ in range(2))
    return Wx, Rh, torch.tanh(torch.randn(rows, H, generator=generator))


def effects_of(values, reverse=False):
    """The native search; `values` must live as long."""
    return _native.Effects(H, BATCH_SIZES, reverse, *(each.data_ptr() for each in values))


def changes(name, quantizer, Wx, Rh, before):
    """Changes of the step's state for each place where the operator enters it, and z; float64."""

    def rounded(values):
        return quantizer.dequantize(quantizer.quantize(values), torch.float64)

    Wx_r, Wx_z, Wx_g = Wx.double().chunk(3, 1)
    Rh_r, Rh_z, Rh_g = Rh.double().chunk(3, 1)
    h = before.double()

    def state(z_pre=None, r_pre=None, g_pre=None, rRh=None, Rh_g=Rh_g):
        z = torch.sigmoid(Wx_z + Rh_z if z_pre is None else z_pre)
        r = torch.sigmoid(Wx_r + Rh_r if r_pre is None else r_pre)
        rRh = r * Rh_g if rRh is None else rRh
        g = torch.tanh(Wx_g + rRh if g_pre is None else g_pre)
        return z, r, g, z * h, (1 - z) * g, rRh

    z, r, _, old, new, rRh = state()
    exact = old + new
    places = {
        "gate.z_pre": [{"z_pre": rounded(Wx_z + Rh_z)}],
        "gate.r_pre": [{"r_pre": rounded(Wx_r + Rh_r)}],
        "gate.g_pre": [{"g_pre": rounded(Wx_g + r * Rh_g)}],
        "op.rRh": [{"rRh": rounded(rRh)}],
        "matmul.Wx": [
            {"z_pre": rounded(Wx_z) + Rh_z},
            {"r_pre": rounded(Wx_r) + Rh_r},
            {"g_pre": rounded(Wx_g) + rRh},
        ],
        "matmul.Rh": [
            {"z_pre": Wx_z + rounded(Rh_z)},
            {"r_pre": Wx_r + rounded(Rh_r)},
            {"Rh_g": rounded(Rh_g)},
        ],
    }
    if name in places:
        found = [sum(state(**place)[3:5]) - exact for place in places[name]]
    else:
        value = {"op.old_contrib": old, "op.new_contrib": new, "output.h": exact}[name]
        found = [rounded(value) - value]
    return found, z


def expected_effect(name, quantizer, values, reverse):
    """The sum over places, sequences and steps of e_t^2, with e_t = z_t e_(t-1) + change_t."""
    found, z = changes(name, quantizer, *values)
    total = 0.0
    for change in found:
        at_step, z_at_step = change.split(BATCH_SIZES), z.split(BATCH_SIZES)
        for n in range(BATCH_SIZES[0]):
            error = torch.zeros(H, dtype=torch.float64)
            mine = [t for t in range(T) if n < BATCH_SIZES[t]]
            for t in reversed(mine) if reverse else mine:
                error = z_at_step[t][n] * error + at_step[t][n]
                total += float(error.square().sum())
    return total


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", _NUMBERS)
def test_an_effect_is_the_error_of_all_states(name, reverse):
    """Fine and coarse scales, with and without clipped values."""
    values = steps(2.0)
    native = effects_of(values, reverse)
    if name in ("op.old_contrib", "op.new_contrib", "output.h"):
        # of clipped parts of the state, more counts; see the next test
        grids = [(8, 2.0**-6, 3), (8, 2.0**-3, 0)]
    else:
        grids = [(8, 2.0**-4, 5), (8, 2.0**-7, -20), (4, 1.0, 0), (16, 2.0**-12, 100)]
    for bits, scale, zero_point in grids:
        quantizer = Quantizer(bits, True, scale, zero_point)
        codes = codes_of(quantizer)
        found = native.effect(_NUMBERS[name], codes, scale, float(zero_point), 1.0)
        assert found == pytest.approx(
            expected_effect(name, quantizer, values, reverse), rel=0.02, abs=1e-9
        )


def test_clipped_parts_of_the_state_count_double():
    values = steps()
    quantizer = Quantizer(8, True, 2.0**-12, 0)  # clips almost everything
    native = effects_of(values)
    for name in ("op.old_contrib", "op.new_contrib", "output.h"):
        found = native.effect(_NUMBERS[name], codes_of(quantizer), quantizer.scale, 0.0, 1.0)
        assert found == pytest.approx(4 * expected_effect(name, quantizer, values, False), rel=0.05)


def codes_of(quantizer, low=-1.0, high=1.0, covering=1.0, symmetric=False, free=False):
    lo, hi = code_limits(quantizer.bits, quantizer.signed)
    return {
        "lo": lo, "hi": hi, "symmetric": symmetric, "free": free,
        "low": low, "high": high, "covering": covering,
    }  # fmt: skip


def value_range(name, Wx, Rh, before):
    """The range of an operator, 0 included."""
    z, r = (torch.sigmoid(Wx + Rh).chunk(3, 1)[i] for i in (1, 0))
    rRh = r * Rh.chunk(3, 1)[2]
    g_pre = Wx.chunk(3, 1)[2] + rRh
    old, new = z * before, (1 - z) * torch.tanh(g_pre)
    values = {
        "matmul.Wx": Wx, "matmul.Rh": Rh, "op.rRh": rRh, "gate.g_pre": g_pre,
        "gate.z_pre": (Wx + Rh).chunk(3, 1)[1], "gate.r_pre": (Wx + Rh).chunk(3, 1)[0],
        "op.old_contrib": old, "op.new_contrib": new, "output.h": old + new,
    }[name]  # fmt: skip
    return min(0.0, float(values.min())), max(0.0, float(values.max()))


@pytest.mark.parametrize("free", [False, True], ids=["pot", "free"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("name", _NUMBERS)
def test_no_neighbour_is_much_better(name, symmetric, free):
    """Of all scales and zero points around the chosen ones, on the values and on larger ones."""
    values = steps(3.0, seed=1)
    native = effects_of(values)
    low, high = value_range(name, *values)
    kind = "free" if free else "pot"
    covering = covering_scale(low, high, bits=8, signed=True, symmetric=symmetric, scale_kind=kind)
    codes = codes_of(Quantizer(8, True, 1.0), low, high, covering, symmetric, free)
    found, scale, zero_point = native.choose(_NUMBERS[name], codes)
    assert found

    def cost(s, z):
        return sum(native.effect(_NUMBERS[name], codes, s, z, m) for m in (1.0, 1.12))

    chosen = cost(scale, zero_point)
    zeros = [0.0] if symmetric else [zero_point, 0.0, -64.0, 64.0]
    for factor, z in itertools.product([0.25, 0.5, 1.0, 2.0], zeros):
        # zero points that leave more room are preferred by 2 %
        assert chosen <= 1.03 * cost(scale * factor, z)


def test_an_operator_without_effect_is_not_chosen():
    """States that stay 0, whatever the update gate is."""
    Wx = torch.zeros(sum(BATCH_SIZES), 3 * H)
    Wx[:, H : 2 * H] = 80  # update gates that are open
    values = Wx, torch.zeros_like(Wx), torch.zeros(sum(BATCH_SIZES), H)
    native = effects_of(values)
    codes = codes_of(Quantizer(8, True, 1.0), 0.0, 80.0, 0.5)
    assert not native.choose(_NUMBERS["gate.z_pre"], codes)[0]
