"""The operators under compilers."""

import pytest
import torch

from actnn.codec import Key, decode, encode, noise_state, ops
from actnn.codec.codes import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
STATE = noise_state(4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operators_are_well_formed(dtype):
    x = torch.randn(3, 100).to(dtype)
    torch.library.opcheck(ops.encode, (x, 3, 64, STATE, 7, True))
    data, params = ops.encode(x, 3, 64, STATE, 7, True)
    torch.library.opcheck(ops.decode, (data, params, 3, 64, 300, dtype))


class Saved(torch.autograd.Function):
    """x * x, whose backward reads codes of x."""

    @staticmethod
    def forward(ctx, x, state):
        data, params = ops.encode(x, 4, 64, state, 1, True)
        ctx.save_for_backward(data, params)
        ctx.n, ctx.dtype = x.numel(), x.dtype
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        data, params = ctx.saved_tensors
        x = ops.decode(data, params, 4, 64, ctx.n, ctx.dtype)
        return gradient * 2 * x.view(gradient.shape), None


def graphs_of(function, *arguments):
    """Compile and run; return the result, and the graphs of forward and backward."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = {}

    def keep(name):
        def compiler(graph, _):
            graphs[name] = graph
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))
    torch._dynamo.reset()
    result = torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    result.sum().backward()
    return result, graphs


@pytest.mark.parametrize("aggressive", [False, True])
def test_compiled_graphs_save_codes_and_recompute_nothing(aggressive):
    x = torch.randn(40, 50, requires_grad=True)
    with torch._functorch.config.patch(aggressive_recomputation=aggressive):
        result, graphs = graphs_of(lambda x: Saved.apply(x.sin(), STATE).cos(), x)
    calls = {name: [n.target for n in g.graph.nodes] for name, g in graphs.items()}
    assert calls["forward"].count(ops.encode) == 1
    assert calls["backward"].count(ops.decode) == 1
    assert ops.encode not in calls["backward"]
    assert ops.decode not in calls["forward"]
    (output,) = graphs["forward"].graph.find_nodes(op="output")
    saved = [n.meta["val"] for n in output.args[0] if isinstance(n, torch.fx.Node)][1:]
    assert torch.uint8 in {v.dtype for v in saved if isinstance(v, torch.Tensor)}
    compiled, x.grad = x.grad, None
    Saved.apply(x.sin(), STATE).cos().sum().backward()
    torch.testing.assert_close(compiled, x.grad)
    assert torch.isfinite(result).all()


def test_the_interface_can_be_compiled():
    def both(x):
        return decode(encode(x, 4, Key(STATE, 3)))

    x = torch.randn(30, 20)
    torch._dynamo.reset()
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), both(x))
    assert torch.equal(compiled(x.t()), both(x.t()))


def test_bits_of_samples_can_be_compiled():
    def both(x, bits):
        return decode(encode(x, bits, Key(STATE, 3), capacity=9))

    x, bits = torch.randn(3, 40), torch.tensor([1, 2, 6])
    torch._dynamo.reset()
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, bits), both(x, bits))
