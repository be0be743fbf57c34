"""Prepared calls that are watched: by hooks, tracers, transforms, compilers and classes below."""

import pytest
import torch
from gru_helpers import C, quantized, seeded
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode

from quant_gru import CalibrationError, QuantGRU
from quant_gru.torch_ops.plan_sources import source_of

X = seeded(5, 3, C)


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


@pytest.fixture
def gru():
    gru = quantized()
    for _ in range(2):
        gru(X)
    assert gru._state.plans.prepared is not None
    return gru


def test_calls_of_other_kinds(gru):
    H = gru.hidden_size
    hx = seeded(1, 3, H)
    expected = gru.forward(X, hx)
    for found in (gru(X, hx), gru(X, hx=hx), gru(input=X, hx=hx)):
        assert all(map(torch.equal, found, expected))
    assert torch.equal(gru(X[:, 0], hx[:, 0])[0], expected[0][:, 0])
    packed = torch.nn.utils.rnn.pack_padded_sequence(X, [5, 5, 5])
    assert torch.equal(gru(packed, hx)[0].data, expected[0].flatten(0, 1))
    assert gru(X.masked_fill(X > 1, torch.nan))[0].isnan().any()
    with pytest.raises(TypeError):
        gru()
    with pytest.raises(TypeError):
        gru(X, hx, None, None)


def test_hooks_are_called(gru):
    seen = []
    hooks = (
        (gru.register_forward_hook, lambda *_: seen.append("after")),
        (gru.register_forward_pre_hook, lambda *_: seen.append("before")),
        (modules.register_module_forward_hook, lambda *_: seen.append("after all")),
        (modules.register_module_forward_pre_hook, lambda *_: seen.append("before all")),
    )
    for count, (register, hook) in enumerate(hooks, 1):
        handle = register(hook)
        gru(X)
        assert len(seen) == count
        handle.remove()
        gru(X)
        assert len(seen) == count
    gru.register_forward_hook(lambda *_: (1, 2))
    assert gru(X) == (1, 2)


@pytest.mark.parametrize("register", ["full_backward_hook", "full_backward_pre_hook"])
def test_backward_hooks_are_called(gru, register):
    for owner, name in ((gru, "register_"), (modules, "register_module_")):
        seen = []
        handle = getattr(owner, name + register)(lambda *_, seen=seen: seen.append(1) and None)
        with torch.enable_grad():
            gru(X.clone().requires_grad_())[0].sum().backward()
        handle.remove()
        assert seen


def test_forward_of_the_instance_or_of_a_class_below(gru):
    gru.forward = lambda x: "mine"
    assert gru(X) == "mine"
    del gru.forward

    class Mine(QuantGRU):
        def forward(self, x):
            return "mine"

    gru.__class__ = Mine
    assert gru(X) == "mine"


@pytest.mark.parametrize("frozen", [False, True], ids=["quantized", "frozen"])
def test_forward_that_is_assigned_to_the_class(gru, frozen, monkeypatch):
    module = gru.freeze() if frozen else gru
    for _ in range(2):
        y, _ = module(X)
    for owner in type(module).__mro__:
        if "forward" in vars(owner) and owner.__module__.startswith("quant_gru"):
            with monkeypatch.context() as patched:
                patched.setattr(owner, "forward", lambda self, x: "mine")
                assert module(X) == "mine"
    forward = type(module).forward
    with monkeypatch.context() as patched:
        patched.setattr(type(module), "forward", lambda self, x: forward(self, 2 * x))
        assert torch.equal(module(X)[0], module.forward(X)[0])
        assert not torch.equal(module(X)[0], y)
    assert torch.equal(module(X)[0], y)


def test_modes_are_left(gru):
    y = gru(X)[0]
    gru.use_quantization = False
    assert not torch.equal(gru(X)[0], y)
    gru.use_quantization = True
    assert torch.equal(gru(X)[0], y)
    gru.calibrating = True
    with pytest.raises(CalibrationError):
        gru(X)
    gru.calibrating = False
    assert torch.equal(gru(X)[0], y)
    gru.train()


def test_tracers_and_modes(gru):
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    with Watch():
        y, _ = gru(X)
    assert any("quant_gru" in str(func) for func in seen)
    assert torch.equal(y, gru(X)[0])


def test_a_call_in_place_of_that_of_all_modules(gru, monkeypatch):
    plain, seen = modules.Module.__call__, []

    def watched(self, *args, **kwargs):
        seen.append(self)
        return plain(self, *args, **kwargs)

    y = gru(X)[0]
    monkeypatch.setattr(modules.Module, "__call__", watched)
    assert torch.equal(gru(X)[0], y)
    assert seen == [gru]


def test_what_is_a_tensor_of_another_kind_is_traced(gru):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(X)
    assert gru(fake)[0].shape == gru(X)[0].shape


def test_compiled_modules(gru):
    seen = []

    def backend(graph, _):
        seen.append(graph)
        return graph.forward

    y = gru(X)[0]
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(gru, backend=backend, fullgraph=True)
        assert torch.equal(compiled(X)[0], y)
        assert len(seen) == 1
        gru.compile(backend=backend)
        assert torch.equal(gru(X)[0], y)


@pytest.mark.parametrize("frozen", [False, True])
def test_operators_run_prepared_calls(gru, frozen, monkeypatch):
    module = gru.freeze() if frozen else gru
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        expected = compiled(X)
        # a frozen GRU's come from the document among its buffers
        plans = source_of(module.get_buffer("plan"), ()) if frozen else module._state.plans
        prepared = plans.in_graphs
        assert prepared is not None
        assert all(map(torch.equal, expected, module(X)))
        monkeypatch.setattr("quant_gru.torch_ops.operators.run_real", None)
        assert all(map(torch.equal, compiled(X), expected))
        assert plans.in_graphs is prepared
        with torch.no_grad():
            name = "W_l0" if frozen else "weight_ih_l0"
            getattr(module, name).neg_()
        found = compiled(X)
        assert plans.in_graphs is not prepared
        assert not torch.equal(found[0], expected[0])
        assert all(map(torch.equal, found, module(X)))
