"""The parts of the calibration data that are kept."""

import pytest
import torch

from quant_gru import QuantGRU
from quant_gru.calibration import windows
from quant_gru.calibration.windows import STEPS, Windows, starts

C, H = 3, 5


def gru_with(layers=2, bidirectional=True):
    torch.manual_seed(0)
    return QuantGRU(C, H, layers, bidirectional=bidirectional)


def kept(gru, batches):
    """The windows of batches (x, lengths)."""
    gru.reset_calibration()
    for x, lengths in batches:
        given = x
        if lengths is not None:
            given = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        gru.calibrate(given)
    return gru._state._collector.windows


def content(found):
    return [(w.key, w.x.tolist(), w.h0.tolist()) for w in found._kept]


@pytest.mark.parametrize("lengths", [None, [70, 32, 33, 1]], ids=["full", "lengths"])
def test_windows_repeat_the_float_gru(lengths):
    """Every window gives the states that the whole sequence has there, in all layers."""
    gru = gru_with()
    x = torch.randn(70, 4, C)
    found = kept(gru, [(x, lengths)])
    assert sum(len(w.x) for w in found._kept) == (280 if lengths is None else sum(lengths))
    outs = {}
    rows = None if lengths is None else torch.tensor(lengths)
    windows.float_layers(
        x, torch.zeros(4, 4, H), rows, gru._float_weights(), lambda *_: None,
        lambda layer, direction, out: outs.__setitem__((layer, direction), out),
    )  # fmt: skip
    steps = found.run(gru._float_weights())
    order = sorted(found._kept, key=lambda w: (-len(w.x), w.key))
    for (layer, direction), out in outs.items():
        cell = steps[layer][direction]
        assert cell.reverse == (direction == 1)
        after = cell.after.split(cell.batch_sizes)
        for number, window in enumerate(order):
            at = [
                (t, n)
                for n in range(4)
                for t in range(0, 70, STEPS)
                if torch.equal(x[t : t + len(window.x), n], window.x)
            ]
            (first, n) = at[0]
            for t in range(len(window.x)):
                torch.testing.assert_close(
                    after[t][number].double(), out[first + t, n], rtol=0, atol=1e-6
                )


def test_before_is_the_state_before_each_step():
    gru = gru_with(1)
    found = kept(gru, [(torch.randn(40, 3, C), None), (torch.randn(7, 2, C), None)])
    for cell in found.run(gru._float_weights())[0]:
        z = torch.sigmoid(cell.Wx + cell.Rh).chunk(3, 1)[1]
        r = torch.sigmoid(cell.Wx + cell.Rh).chunk(3, 1)[0]
        g = torch.tanh(cell.Wx.chunk(3, 1)[2] + r * cell.Rh.chunk(3, 1)[2])
        torch.testing.assert_close(z * cell.before + (1 - z) * g, cell.after)


def test_order_and_split_do_not_matter(monkeypatch):
    """Also when only a part is kept."""
    monkeypatch.setattr(windows, "_VALUES", 1)
    monkeypatch.setattr(windows, "_LEAST", 300)
    gru = gru_with()
    x = torch.randn(70, 20, C)
    expected = content(kept(gru, [(x, None)]))
    assert 0 < sum(len(steps) for _, steps, _ in expected) <= 300
    assert content(kept(gru, [(x[:, 7:], None), (x[:, :7], None)])) == expected
    assert content(kept(gru, [(x[:, [n]], None) for n in torch.randperm(20).tolist()])) == expected
    a, b = kept(gru, [(x[:, :9], None)]), kept(gru, [(x[:, 9:], None)])
    b.merge(a)
    assert content(b) == expected


def test_a_longer_window_that_was_refused_does_not_let_later_ones_in():
    """What is kept is a prefix of all windows in the order of their keys."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        every = []
        for key in range(30):
            size = int(torch.randint(1, 33, (), generator=generator))
            every.append(windows.Window(key, torch.zeros(size, 1), torch.zeros(1, 1)))
        expected, total = [], 0
        for window in every:
            total += len(window.x)
            if total > 100:
                break
            expected.append(window.key)
        found = Windows(1)
        found._limit = 100
        for i in torch.randperm(30, generator=generator).tolist():
            if found._takes(every[i].order):
                found._insert(every[i])
        assert [w.key for w in found._kept] == expected


def test_starts_are_the_states_before_windows():
    out, h0 = torch.arange(70.0)[:, None, None], torch.full((1, 1), -1.0)
    assert [float(s) for s in starts(out, h0, False)] == [-1, 31, 63]
    assert [float(s) for s in starts(out, h0, True)] == [32, 64, -1]


@pytest.mark.parametrize("shape", [(0, 2, C), (3, 0, C)], ids=["no-steps", "no-rows"])
def test_nothing_is_kept_of_empty_batches(shape):
    found = Windows(H)
    found.add(torch.zeros(shape), None, [[torch.zeros(shape[1], H)]])
    assert not found.is_enough


def test_few_different_steps_judge_no_scales():
    """A cell that always has the same input is calibrated by its ranges."""
    torch.manual_seed(0)
    gru = QuantGRU(C, H)
    for _ in range(100):
        gru.calibrate(torch.ones(1, 4, C), torch.randn(1, 4, H))
    assert not gru._state._collector.windows.is_enough
    plain = [
        [cell.by_range() for cell in layer] for layer in gru._state._collector.cells(gru.config)
    ]
    found = gru._state._collector.qparams(gru.config, gru._float_weights())
    assert found[0][0].quantizers == plain[0][0].quantizers
