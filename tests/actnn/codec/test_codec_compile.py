"""The operators under compilers, and the codec in plain operations."""

import math

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from actnn.codec import Key, aten, bytes_of, decode, encode, noise_state, ops, reference
from actnn.codec.codes import DTYPES
from actnn.codec.packing import unpack

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [1, 3, 4, 8])
@pytest.mark.parametrize(("n", "group"), [(1000, 256), (77, 32), (512, 64), (1, 32)])
def test_plain_operations_write_the_same_format(dtype, bits, n, group):
    x = (torch.randn(n) * 3 + 1).to(dtype)
    x[n // 2] = float("nan") if bits == 3 else 0
    expected = reference.encode_flat(x, bits, STATE, 1, group, False)
    data, params = aten.encode(x, bits, group, STATE, 1, True)
    assert data.numel() + params.numel() * 2 == bytes_of(n, bits, group)
    assert torch.equal(params.view(torch.int16), expected[1].view(torch.int16))
    y = aten.decode(data, params, bits, group, n, dtype)
    wanted = ops.decode(data, params, bits, group, n, dtype)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True)
    nearest = unpack(aten.encode(x, bits, group, STATE, 1, False)[0], bits)
    # ties may be rounded to either side
    assert (nearest - unpack(expected[0], bits)).abs().max() <= 1


def test_plain_operations_have_no_bias_and_independent_noise():
    x, count = torch.rand(1 << 16), 2
    x[::256], x[1::256] = 0, 1
    draws = [
        aten.decode(*aten.encode(x, 1, 256, state, tensor, True), 1, 256, len(x), x.dtype)
        for state, tensor in ((STATE, 1), (STATE, 2), (noise_state(4, step=1), 1))
    ]
    error = torch.stack(draws) - x
    assert (error.mean(1).abs() < 4.5 * 0.41 / math.sqrt(len(x))).all()
    correlation = torch.corrcoef(error)
    assert (correlation - torch.eye(len(draws))).abs().max() < 4.5 / math.sqrt(len(x))
    for lag in range(1, 65):
        neighbours = (error[:, lag:] * error[:, :-lag]).mean() / error.square().mean()
        assert abs(neighbours) < 5 / math.sqrt(count * len(x))


def test_plain_operations_can_be_compiled():
    def both(x):
        data, params = aten.encode(x, 2, 64, STATE, 1, True)
        return aten.decode(data, params, 2, 64, x.numel(), x.dtype)

    x = torch.randn(300)
    torch._dynamo.reset()
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), both(x))
