"""Weights and scales that change in one thread while another one calls the module."""

import copy
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gru_helpers import C, quantized, seeded

from quant_gru.execution import frozen_plan, plan_cache
from quant_gru.kernels.live_weights import LiveWeights


def halved(module):
    """The same module with other weights."""
    other = copy.deepcopy(module)
    with torch.no_grad():
        for w in other.parameters():
            w.mul_(0.5)
    return other


def once_while(monkeypatch, module, name, change):
    """Let `change` happen once, when what `name` of a module builds has been built."""
    build, left = getattr(module, name), [change]

    def build_and_change(*arguments):
        found = build(*arguments)
        if left:
            left.pop()()
        return found

    monkeypatch.setattr(module, name, build_and_change)
    return left


class TestAPlanThatIsBuiltMeanwhile:
    """Another thread changes what a plan is made of, after it was read and before it is kept."""

    @pytest.mark.parametrize("grad", [False, True])
    def test_weights(self, monkeypatch, grad):
        gru, x = quantized(), seeded(4, 2, C)
        other = halved(gru)
        weights = other.state_dict()
        left = once_while(
            monkeypatch, plan_cache, "quantize_weights", lambda: gru.load_state_dict(weights)
        )
        with torch.set_grad_enabled(grad):
            gru.requires_grad_(False)
            gru(x)
            assert not left
            for _ in range(3):
                assert torch.equal(gru(x)[0], other(x)[0])

    def test_weights_without_scales(self, monkeypatch):
        """Changes of parameters alone, which nothing but their versions tells."""
        gru, x = quantized(), seeded(4, 2, C)
        other = halved(gru)

        def change():
            with torch.no_grad():
                for w, new in zip(gru.parameters(), other.parameters(), strict=True):
                    w.copy_(new)

        left = once_while(monkeypatch, plan_cache, "quantize_weights", change)
        with torch.no_grad():
            gru(x)
            assert not left
            for _ in range(3):
                assert torch.equal(gru(x)[0], other(x)[0])

    @pytest.mark.parametrize("training", [False, True])
    def test_scales(self, monkeypatch, training):
        gru, x = quantized(), seeded(4, 2, C)
        other = copy.deepcopy(gru)
        other.adjust_quant_config("h", exp2_inv=3)
        gru.train(training)
        other.train(training)
        left = once_while(
            monkeypatch,
            plan_cache,
            "build_frozen",
            lambda: gru.adjust_quant_config("h", exp2_inv=3),
        )
        gru(x)
        assert not left
        for _ in range(3):
            assert torch.equal(gru(x)[0], other(x)[0])

    def test_frozen_integers(self, monkeypatch):
        gru, x = quantized(), seeded(4, 2, C)
        frozen, other = gru.freeze(), halved(gru).freeze()
        integers = other.state_dict()
        left = once_while(
            monkeypatch, frozen_plan, "matmul_sum", lambda: frozen.load_state_dict(integers)
        )
        frozen(x)
        assert not left
        for _ in range(3):
            assert torch.equal(frozen(x)[0], other(x)[0])


class TestACallWithinACall:
    """A signal handler or finalizer calls the module while its thread updates the integers."""

    @pytest.mark.parametrize("warm", [False, True])
    @pytest.mark.parametrize("training_inside", [False, True])
    def test_has_its_own_numbers(self, monkeypatch, warm, training_inside):
        gru, x = quantized(recurrent_dropout=0.5).train(), seeded(4, 2, C)
        expected, inner, write = None, [], LiveWeights._write

        def call():
            torch.manual_seed(5)
            y, _ = gru(x)
            y.sum().backward()
            gradient = gru.weight_hh_l0.grad.clone()
            gru.zero_grad()
            return y, gradient

        expected = call()
        if not warm:
            gru._state.plans.clear()

        def interrupted(*arguments):
            write(*arguments)
            if not inner:
                inner.append(None)
                gru.train(training_inside)
                state = torch.get_rng_state()
                torch.manual_seed(6)
                inner[0] = gru(2 * x)[0]
                torch.set_rng_state(state)
                gru.train()

        monkeypatch.setattr(LiveWeights, "_write", interrupted)
        found = ThreadPoolExecutor(1).submit(call) if not warm else None
        for a, b in zip(found.result(60) if found else call(), expected, strict=True):
            assert torch.equal(a, b)
        monkeypatch.undo()
        gru.train(training_inside)
        torch.manual_seed(6)
        assert torch.equal(inner[0], gru(2 * x)[0])

    @pytest.mark.slow
    def test_of_a_signal(self):
        """A handler runs wherever the interpreter is; a deadlock would end in the timeout."""
        code = """
import faulthandler, signal, torch
from quant_gru import QuantGRU
faulthandler.dump_traceback_later(100, exit=True)
gru, x = QuantGRU(3, 64), torch.randn(3, 2, 3)
gru.calibrate(x)
gru.use_quantization = True
gru(x)
calls = []
def handler(*_):
    calls.append(gru(x)[0].sum().item())
    signal.setitimer(signal.ITIMER_REAL, 3e-4)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 3e-4)
for _ in range(400):
    gru(x)[0].sum().backward()
    with torch.no_grad():
        gru.weight_hh_l0 += 1e-3
signal.signal(signal.SIGALRM, signal.SIG_IGN)  # a last handler would start the timer again
signal.setitimer(signal.ITIMER_REAL, 0)
assert calls
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_readers_beside_a_writer_and_training():
    """A server that reloads weights while it infers, and trains another module of the process."""
    gru, x = quantized(hidden_size=64), seeded(1, 1, C)
    a, b = gru.state_dict(), halved(gru).state_dict()
    a = {name: value.clone() for name, value in a.items()}
    trained = quantized(hidden_size=64).train()
    expected = {}
    with torch.no_grad():
        for key, weights in (("b", b), ("a", a)):
            gru.load_state_dict(weights)
            expected[key] = gru(x)[0]
    assert not torch.equal(expected["a"], expected["b"])
    stop, errors = threading.Event(), []

    def until_stopped(work):
        try:
            while not stop.is_set():
                work()
        except Exception as error:
            errors.append(error)

    def infer():
        with torch.no_grad():
            gru(x)

    def train():
        trained(x)[0].sum().backward()

    threads = [threading.Thread(target=until_stopped, args=(w,)) for w in (infer, infer, train)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            for key, weights in (("b", b), ("a", a)):
                gru.load_state_dict(weights)
                time.sleep(0.005)
                with torch.no_grad():
                    assert torch.equal(gru(x)[0], expected[key])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors
