"""Who reads a model's forward finds its own: signature, names, text and annotations."""

import importlib
import inspect
import pkgutil
import typing

import pytest
import torch
from actnn_models import Block
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import ParametrizationList

import actnn
from actnn.layers.batch_norms import BatchNorm
from actnn.layers.chunks import InChunks
from actnn.layers.normalization import Recognized
from actnn.layers.registry import MIXINS
from actnn.layers.root import Root
from actnn.planning.blocks import Announced, Checkpointed, CompiledBlock, Unhooked
from actnn.saving.module_classes import Swapped, swap, swap_back
from actnn.saving.recompute import Recomputed, Untouched

MODELS = (Root, InChunks, Recomputed, Untouched, CompiledBlock, Unhooked, Checkpointed, Announced)


class Net(nn.Module):
    """A forward with all kinds of parameters."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, /, y: int = 3, *rest: int, scale: float = 1.0, **others: float
    ) -> torch.Tensor:
        """Say what it does."""
        return self.inner(x) * scale * y


class PlainReLU(nn.ReLU):
    """A subclass that changes nothing."""


def layer(kind):
    """A module of a class that has a form of its own."""
    if kind is ParametrizationList:
        return weight_norm(nn.Linear(4, 4)).parametrizations.weight
    made = {nn.Conv2d: (2, 2, 3), nn.GRU: (4, 4), nn.LayerNorm: (4,), nn.RMSNorm: (4,)}
    made[nn.BatchNorm2d] = (4,)
    if "Pool" in kind.__name__:
        return kind(2)
    return kind(*made.get(kind, ()))


CASES = [
    *((mixin, Net) for mixin in MODELS),
    *((mixin, nn.Sequential) for mixin in MODELS),
    *((Root, kind) for kind in MIXINS),
    *((mixin, kind) for kind, mixin in MIXINS.items()),
    (MIXINS[nn.ReLU], PlainReLU),
    (BatchNorm, nn.BatchNorm2d),
    (Recognized, Net),
]


def made(kind):
    return kind() if kind in (Net, nn.Sequential) else layer(kind)


def seen(module):
    """What readers of a forward see."""
    forward = module.forward
    own = inspect.unwrap(type(module).forward)
    return (
        inspect.signature(forward),
        inspect.signature(type(module).forward),
        inspect.getfullargspec(forward),
        forward.__name__,
        forward.__qualname__,
        forward.__module__,
        forward.__doc__,
        forward.__annotations__,
        typing.get_type_hints(forward),
        own.__code__.co_varnames,
    )


@pytest.mark.parametrize(("mixin", "kind"), CASES, ids=lambda each: each.__name__)
def test_a_forward_looks_like_that_of_the_model(mixin, kind):
    module = made(kind)
    before = seen(module)
    swap(module, mixin)
    assert type(module) is not kind
    assert seen(module) == before
    swap_back(module)
    assert seen(module) == before


@pytest.mark.slow
def test_forwards_stay_after_compress_fit_and_uncompress():
    model, x = (
        nn.Sequential(*(Block() for _ in range(3)), nn.Linear(32, 4)),
        torch.randn(16, 16, 32),
    )
    before = [seen(module) for module in model.modules()]
    actnn.compress(model, bits=4)
    assert [seen(module) for module in model.modules()] == before
    free = actnn.fit(model, x, "1 GiB").peak
    for bits in ((), (4,)):
        plan = actnn.fit(model, x, int(0.7 * free), bits=bits)
        assert {str(choice) for choice in plan.choices.values()} != {"keep"}
        assert [seen(module) for module in model.modules()] == before
    actnn.uncompress(model)
    assert [seen(module) for module in model.modules()] == before


class Inner(Swapped):
    """A form whose parameters have other names, one of them in a closure."""

    def forward(self, x, factor=1, *rest, **named):
        def scaled():
            return x * factor, rest, named

        return scaled()


def test_parameters_have_the_names_of_the_original_in_its_order():
    class Scaled(nn.Module):
        def forward(module, states, scale, *, bias=0):
            return states * scale

    model = Scaled()
    swap(model, Root)
    assert type(model).forward.__code__ is Root.forward.__code__  # which is marked as uncompiled
    swap_back(model)
    swap(model, Inner)
    assert model(states=2, scale=3, bias=1) == (6, (), {"bias": 1})
    assert model(2, scale=3) == (6, (), {})
    assert model(2) == (2, (), {})
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'states'"):
        model(scale=3)


def test_marks_of_a_forward_stay_but_for_those_of_the_compiler():
    class Marked(Plain):
        def forward(self, x):
            return self.inner(x)

    Marked.forward.mark = "mine"
    Marked.forward._torchdynamo_orig_callable = len
    model = Marked()
    swap(model, Recomputed)
    assert model.forward.mark == "mine"
    assert not hasattr(model.forward, "_torchdynamo_orig_callable")
    assert inspect.unwrap(model.forward) is Marked.forward


def test_all_classes_are_among_the_cases():
    for found in pkgutil.walk_packages(actnn.__path__, "actnn."):
        importlib.import_module(found.name)

    def below(cls):
        return {cls}.union(*map(below, cls.__subclasses__()))

    mixins = {
        each
        for each in below(Swapped) - {Swapped, Inner}
        if getattr(importlib.import_module(each.__module__), each.__name__, None) is each
    }
    assert len(mixins) > 10
    assert mixins <= {mixin for mixin, _ in CASES}


@pytest.mark.parametrize("kind", [each for each in MIXINS if each is not ParametrizationList])
def test_a_form_takes_its_input_by_the_name_that_the_layer_has_for_it(kind):
    shapes = {"1d": (2, 2, 8), "2d": (2, 2, 8, 8), "3d": (2, 2, 8, 8, 8)}
    shape = shapes.get(kind.__name__[-2:].lower(), (3, 2, 4))
    module, x = layer(kind), torch.randn(shape).requires_grad_()
    name = next(iter(inspect.signature(module.forward).parameters))
    actnn.compress(module, bits=32, min_bytes=0)
    assert isinstance(module, MIXINS[kind])
    torch.manual_seed(1)
    a = module(**{name: x})
    torch.manual_seed(1)
    b = module(x)
    a, b = (each[0] if isinstance(each, tuple) else each for each in (a, b))
    assert torch.equal(a, b)


class Plain(nn.Module):
    """A forward that torch.fx can trace."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.LayerNorm(4))

    def forward(self, x, scale=2.0):
        return self.inner(x) * scale


def test_a_compressed_model_is_traced_by_torch_fx():
    model = Plain().eval()
    code = torch.fx.symbolic_trace(model).code
    traced = torch.fx.symbolic_trace(actnn.compress(model, bits=4, min_bytes=0))
    x = torch.randn(3, 4)
    assert traced.code == code
    assert torch.equal(traced(x), model(x))
    with pytest.raises(actnn.ActNNError, match=r"keyword-only .*got that of Net; uncompress"):
        torch.fx.symbolic_trace(actnn.compress(Net()))


@pytest.mark.parametrize("model", [Plain(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
def test_exported_inputs_have_the_names_of_the_model(model):
    inputs = (torch.randn(3, 4),)
    plain = torch.export.export(model.eval(), inputs).graph_signature.user_inputs
    model = actnn.compress(model, bits=4, min_bytes=0)
    exported = torch.export.export(model, inputs)
    assert exported.graph_signature.user_inputs == plain
    assert plain[0] in ("x", "input")
    assert torch.equal(exported.module()(*inputs), model(*inputs))
