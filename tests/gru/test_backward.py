"""Gradients of the quantized mode against a straight-through reference of the tests' own."""

import copy

import pytest
import torch
from exact_gru import Cell, definition
from gru_helpers import C, H, quantized, same, seeded, states
from torch import nn

from quant_gru import QuantConfig, QuantGRU

nan = float("nan")
DEEP = {"num_layers": 2, "bidirectional": True}
SMALL = {"input_size": 2, "hidden_size": 3}
NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def through(real, value, slope):
    """`value`, with the gradient `slope` towards `real`."""
    return value + (real - real.detach()) * slope


class Reference:
    """Autograd through the real-valued cell at the dequantized codes, one row at a time."""

    def __init__(self, gru):
        self.gru = gru
        self.w = {
            name: parameter.detach().double().requires_grad_()
            for name, parameter in gru.named_parameters()
        }
        self.outputs = []

    def run(self, x, h0):
        """x (T, C) and h0 (layers * directions, H), float64 leaves -> output and h_n."""
        gru = self.gru
        codes, inside = definition(gru, x.detach()[:, None].float(), h0.detach()[:, None].float())
        self.saturated = {name: not torch.tensor(ok).all() for name, ok in inside.items()}
        directions = 2 if gru.bidirectional else 1
        below, last = x, []
        for layer in range(gru.num_layers):
            halves = []
            for d in range(directions):
                suffix = f"_l{layer}{'_reverse' if d else ''}"
                out, h = self.direction(
                    Cell(gru, layer, bool(d)),
                    suffix,
                    {k: v for k, v in codes.items() if k.endswith(suffix)},
                    {k: v for k, v in inside.items() if k.endswith(suffix)},
                    below,
                    h0[len(last)],
                    bool(d),
                )
                halves.append(out)
                last.append(h)
            below = torch.cat(halves, -1)
        return below, torch.stack(last)

    def direction(self, cell, suffix, codes, inside, x, h0, reverse):
        def value(name, t=None):
            found = codes[name + suffix]
            found = found[0] if t is None else found[t][0]
            return cell.q[name.replace("h0", "h")].real(found)

        def ste(name, real, t=None):
            if name.replace("h0", "h") not in cell.q:
                return real
            mask = inside[name + suffix]
            mask = torch.tensor(mask[0] if t is None else mask[t][0])
            return through(real, value(name, t), mask)

        W, R, bw, br = (self.w.get(f"{name}{suffix}") for name in NAMES)
        zeros = torch.zeros(3 * cell.H, dtype=torch.float64)
        bw, br = (zeros if b is None else b for b in (bw, br))
        W = through(W, self.weight(cell, "weight.W", suffix), 1)
        R = through(R, self.weight(cell, "weight.R", suffix), 1)
        h = ste("output.h0", h0)
        outputs = [None] * len(x)
        for t in reversed(range(len(x))) if reverse else range(len(x)):
            x_t = ste("input.x", x[t], t)
            order = cell.rows  # the codes have the update gate first, nn.GRU the reset gate
            Wx = ste("matmul.Wx", (W @ x_t + bw)[order], t)
            Rh = ste("matmul.Rh", (R @ h + br)[order], t)
            Wx_z, Wx_r, Wx_g = Wx.chunk(3)
            Rh_z, Rh_r, Rh_g = Rh.chunk(3)
            z_pre = ste("gate.z_pre", Wx_z + Rh_z, t)
            z_out = value("gate.z_out", t)
            z = through(z_pre, z_out, z_out * (1 - z_out))
            r_pre = ste("gate.r_pre", Wx_r + Rh_r, t)
            r_out = value("gate.r_out", t)
            r = through(r_pre, r_out, r_out * (1 - r_out))
            g_pre = ste("gate.g_pre", Wx_g + ste("op.rRh", r * Rh_g, t), t)
            g_out = value("gate.g_out", t)
            g = through(g_pre, g_out, (1 - g_out**2).clamp(min=0))
            old = ste("op.old_contrib", z * h, t)
            new = ste("op.new_contrib", (1 - z) * g, t)
            h = outputs[t] = ste("output.h", old + new, t)
        return torch.stack(outputs), h

    def weight(self, cell, name, suffix):
        layer, reverse = int(suffix[2]), suffix.endswith("reverse")
        scales = self.gru.get_quant_config(name, layer, reverse)["scale"]
        s = torch.tensor(cell._scales(scales), dtype=torch.float64)[:, None]
        real = torch.empty(len(cell.rows), len(cell.codes[name][0]), dtype=torch.float64)
        real[cell.rows] = torch.tensor(cell.codes[name], dtype=torch.float64)
        return real * s


def distance(grad, reference):
    return ((grad - reference).norm() / reference.norm().clamp(min=1e-12)).item()


def check(gru, rows, hx, run, tolerance=1e-5, x_scale=None):
    """Compare the gradients of a random linear loss over outputs and last states.

    `run(gru, rows, hx)` gives the outputs of each row and h_n, as torch tensors.
    """
    rows = [row.clone().requires_grad_() for row in rows]
    hx = hx.clone().requires_grad_()
    outputs, h_n = run(gru, rows, hx)
    weights = [seeded(*out.shape, seed=50 + i) for i, out in enumerate(outputs)]
    last_weights = seeded(*h_n.shape, seed=49)
    loss = sum((w * out).sum() for w, out in zip(weights, outputs, strict=True))
    loss = loss + (last_weights * h_n).sum()
    gru.zero_grad()
    loss.backward()

    reference = Reference(gru)
    x = [row.detach().double().requires_grad_() for row in rows]
    h0 = hx.detach().double().requires_grad_()
    total = 0.0
    for i, row in enumerate(x):
        y, last = reference.run(row, h0[:, i])
        torch.testing.assert_close(outputs[i].double(), y, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(h_n[:, i].double(), last, rtol=1e-6, atol=1e-9)
        total = total + (weights[i] * y).sum() + (last_weights[:, i] * last).sum()
    total.backward()
    for name, parameter in gru.named_parameters():
        assert parameter.grad.dtype == parameter.dtype
        assert distance(parameter.grad.double(), reference.w[name].grad) <= tolerance, name
    for i, (row, expected) in enumerate(zip(rows, x, strict=True)):
        assert distance(row.grad.double(), expected.grad) <= tolerance, f"x[{i}]"
    assert distance(hx.grad.double(), h0.grad) <= tolerance, "hx"
    return reference, rows, hx


def batched(gru, rows, hx):
    y, h_n = gru(torch.stack(rows, 1), hx)
    return list(y.unbind(1)), h_n


def unbatched(gru, rows, hx):
    y, h_n = gru(rows[0], hx[:, 0])
    return [y], h_n[:, None]


def batch_first(gru, rows, hx):
    gru.batch_first = True
    y, h_n = gru(torch.stack(rows), hx)
    gru.batch_first = False
    return list(y.unbind(0)), h_n


def as_pack(gru, rows, hx):
    y, h_n = gru(nn.utils.rnn.pack_sequence(rows, enforce_sorted=False), hx)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(y)
    return [padded[:T, i] for i, T in enumerate(lengths.tolist())], h_n


def in_chunks(gru, rows, hx):
    outputs, state = [], hx
    for chunk in torch.stack(rows, 1).split([1, 2, 1]):
        y, state = gru(chunk, state)
        outputs.append(y)
    return list(torch.cat(outputs).unbind(1)), state


def rows_of(*lengths, scale=1.0, input_size=2):
    return [seeded(T, input_size, seed=20 + i, scale=scale) for i, T in enumerate(lengths)]


@pytest.mark.parametrize("config", ["pot8", "pot8-fused", "free8-fused", "pot16", "pot8-symmetric"])
def test_one_cell(config):
    gru = quantized(config, **SMALL).train(config == "pot8")
    check(gru, rows_of(3, 3), states(gru, 2), batched)


@pytest.mark.parametrize("config", ["pot8", "free8-fused"])
def test_layers_and_directions(config):
    gru = quantized(config, **SMALL, **DEEP)
    check(gru, rows_of(3), states(gru, 1), batched)


TWO_WAYS = {"bidirectional": True}


@pytest.mark.parametrize(
    ("run", "lengths", "options"),
    [
        (unbatched, (4,), TWO_WAYS),
        (batch_first, (3, 3), TWO_WAYS),
        (as_pack, (2, 4, 1), TWO_WAYS),
        (as_pack, (3, 3), TWO_WAYS),
        (as_pack, (1, 3), {"num_layers": 2}),
        (in_chunks, (4, 4), {"config": "free8"}),
    ],
)
def test_layouts(run, lengths, options):
    gru = quantized(**SMALL, **options)
    check(gru, rows_of(*lengths), states(gru, len(lengths)), run)


def test_without_bias():
    gru = quantized("pot8", **SMALL, bias=False)
    check(gru, rows_of(3, 3), states(gru, 2), batched)


@pytest.mark.parametrize("config", ["pot8", "pot8-fused", "free8"])
def test_saturating_inputs(config):
    """Inputs and states far outside: their gradient is 0, and so is that behind every clamp."""
    gru = quantized(config, **SMALL, num_layers=2)
    rows = rows_of(3, 3, scale=5.0)
    hx = states(gru, 2, scale=1.0)
    reference, rows, hx = check(gru, rows, hx, batched)
    assert any(reference.saturated[f"{name}_l0"] for name in ("matmul.Wx", "gate.z_pre"))
    for layer, state in enumerate(hx.detach()):
        q = gru.get_quant_config("h", layer)
        outside = _outside(state, q)
        assert outside.any()
        assert (hx.grad[layer][outside] == 0).all()
    assert hx.grad.any()
    q = gru.get_quant_config("x")
    for row in rows:
        outside = _outside(row.detach(), q)
        assert outside.any()
        assert (row.grad[outside] == 0).all()


def _outside(x, q):
    y = torch.round(x / q["scale"]) + q["zero_point"]
    return (y < -128) | (y > 127)


def test_the_mask_is_decided_after_rounding():
    """Half a step beyond the last code still rounds to it, and lets the gradient through."""
    gru = quantized(QuantConfig(), input_size=1, hidden_size=2)
    gru.adjust_quant_config("x", exp2_inv=7)
    last = torch.tensor([[127.0], [127.4], [127.5], [127.6], [128.0], [-128.5], [-128.6]]) / 128
    x = last[None].clone().requires_grad_()
    gru(x)[0].sum().backward()
    assert (x.grad[0, :, 0] != 0).tolist() == [True, True, False, False, False, True, False]


def test_infinite_inputs_have_no_gradient():
    gru = quantized()
    x = seeded(4, 2, C)
    x[1, 0, 0], x[2, 1, 3] = float("inf"), -float("inf")
    x.requires_grad_()
    gru(x)[0].sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad[1, 0, 0] == 0
    assert x.grad[2, 1, 3] == 0
    assert all(p.grad.isfinite().all() for p in gru.parameters())


@pytest.mark.parametrize("where", ["x", "hx"])
def test_nan_rows_have_nan_gradients(where):
    gru = quantized(num_layers=2)
    x, hx = seeded(4, 3, C), states(gru, 3)
    if where == "x":
        x[2, 1, 0] = nan
    else:
        hx[0, 1, 0] = nan
    x.requires_grad_()
    hx.requires_grad_()
    y, h_n = gru(x, hx)
    (y.sum() + h_n.sum()).backward()
    assert x.grad[:, 1].isnan().all()
    assert hx.grad[:, 1].isnan().all()
    assert x.grad[:, [0, 2]].isfinite().all()
    assert hx.grad[:, [0, 2]].isfinite().all()
    for name, parameter in gru.named_parameters():
        assert parameter.grad.isnan().all(), name


def test_nan_weights_have_nan_gradients():
    gru = quantized()
    with torch.no_grad():
        gru.weight_hh_l0[0, 0] = nan
    x = seeded(4, 2, C).requires_grad_()
    gru(x)[0].sum().backward()
    assert x.grad.isnan().all()
    assert all(p.grad.isnan().all() for p in gru.parameters())


# --- what autograd offers besides


def test_retain_graph():
    gru = quantized(num_layers=2)
    x = seeded(4, 2, C).requires_grad_()
    loss = gru(x)[0].square().sum()
    loss.backward(retain_graph=True)
    first = [x.grad.clone(), *(p.grad.clone() for p in gru.parameters())]
    loss.backward()
    for once, twice in zip(first, [x.grad, *(p.grad for p in gru.parameters())], strict=True):
        same(twice, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_frozen_weights_get_none():
    gru = quantized(num_layers=2)
    gru.weight_ih_l0.requires_grad_(False)
    gru.bias_hh_l1.requires_grad_(False)
    x = seeded(4, 2, C)
    gru(x)[0].sum().backward()
    for name, parameter in gru.named_parameters():
        assert (parameter.grad is None) is (name in ("weight_ih_l0", "bias_hh_l1")), name
    expected = {n: p.grad.clone() for n, p in gru.named_parameters() if p.grad is not None}
    other = quantized(num_layers=2)
    other(x)[0].sum().backward()
    for name, grad in expected.items():
        same(grad, other.get_parameter(name).grad)


@pytest.mark.parametrize("what", ["x", "hx", "one weight", "bias of the upper layer"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_gradient_is_never_silently_missing(what, training):
    gru = quantized(num_layers=2).train(training)
    gru.requires_grad_(False)
    x, hx = seeded(4, 2, C), states(gru, 2)
    target = {
        "x": x,
        "hx": hx,
        "one weight": gru.weight_hh_l0,
        "bias of the upper layer": gru.bias_ih_l1,
    }[what]
    target.requires_grad_()
    for output in gru(x, hx):
        assert output.requires_grad
        assert output.grad_fn is not None
        target.grad = None
        output.sum().backward(retain_graph=True)
        assert target.grad.abs().sum() > 0


def test_only_h_n_is_used():
    gru = quantized(**DEEP)
    x = seeded(4, 2, C).requires_grad_()
    gru(x)[1][0].sum().backward()
    assert x.grad.abs().sum() > 0
    assert gru.weight_hh_l0.grad.abs().sum() > 0
    assert not gru.weight_hh_l1.grad.abs().sum()  # layer 1 has no part in h_n[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype):
    gru = quantized().to(dtype)
    x = seeded(4, 2, C).to(dtype).requires_grad_()
    hx = states(gru, 2).to(dtype).requires_grad_()
    y, h_n = gru(x, hx)
    assert y.dtype == h_n.dtype == dtype
    (y.sum() + h_n.sum()).backward()
    single = copy.deepcopy(gru).float()
    x32, h32 = (t.detach().float().requires_grad_() for t in (x, hx))
    y32, h_n32 = single(x32, h32)
    (y32.sum() + h_n32.sum()).backward()
    pairs = [(x, x32), (hx, h32), *zip(gru.parameters(), single.parameters(), strict=True)]
    for a, b in pairs:
        assert a.grad.dtype == dtype
        assert distance(a.grad.double(), b.grad.double()) < {torch.float64: 1e-6}.get(dtype, 1e-2)


def test_dropout_between_layers_drops_gradients():
    gru = quantized(num_layers=2, dropout=0.5).train()
    x = seeded(4, 3, C).requires_grad_()
    torch.manual_seed(3)
    y, _ = gru(x)
    y.sum().backward()
    dropped = [p.grad.clone() for p in gru.parameters()]
    gru.zero_grad()
    torch.manual_seed(3)
    gru(x)[0].sum().backward()
    for a, b in zip(dropped, gru.parameters(), strict=True):
        same(a, b.grad)
    gru.dropout = 1.0  # nothing reaches the upper layer
    gru.zero_grad()
    x.grad = None
    gru(x)[0].sum().backward()
    assert not x.grad.any()
    assert not gru.weight_ih_l0.grad.any()
    assert gru.weight_hh_l1.grad.any()


def test_outputs_may_be_changed_in_place():
    gru = quantized()
    x = seeded(4, 2, C)
    gru(x)[0].sum().backward()
    expected = gru.weight_hh_l0.grad.clone()
    gru.zero_grad()
    y, _ = gru(x)
    y.add_(1.0)
    y.sum().backward()
    same(gru.weight_hh_l0.grad, expected)


def test_expanded_gradients_and_part_of_the_output():
    gru = quantized()
    x = seeded(4, 2, C).requires_grad_()
    y, h_n = gru(x)
    (y[1, 0, 2] + h_n.mean()).backward()
    assert x.grad[:, 0].any()
    assert not x.grad[2:, 0].isnan().any()


def test_uncalibrated_gradients_through_pending_statistics():
    gru = QuantGRU(C, H, use_quantization=True).train()
    gru.calibrate(seeded(4, 2, C))
    with pytest.warns(UserWarning, match="finalize"):
        y, _ = gru(seeded(4, 2, C))
    y.sum().backward()
    assert all(p.grad is not None for p in gru.parameters())
