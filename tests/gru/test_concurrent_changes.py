"""Weights and scales that change in one thread while another one calls the module."""

import copy
import threading
import time

import pytest
import torch
from gru_helpers import C, quantized, seeded

from quant_gru.execution import frozen_plan, plan_cache


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
