"""Views of one tensor in compiled graphs: their storage is encoded once."""

import pytest
import torch
from actnn_models import Block, gradients
from torch import fx

import actnn
from actnn.codec import executors
from actnn.saving.graph_views import share_views
from sweeps import first_of

aten = torch.ops.aten

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # inductor's


@pytest.fixture
def encoded(monkeypatch):
    """The tensors that compiled graphs encode: elements, and bits."""
    calls = []
    encode = executors.encode_flat

    def count(x, bits, *rest):
        calls.append((x.numel(), bits))
        return encode(x, bits, *rest)

    monkeypatch.setattr(executors, "encode_flat", count)
    torch._dynamo.reset()
    return calls


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("aot_eager", "cpu"),
        pytest.param("inductor", "cpu", marks=pytest.mark.slow),
        pytest.param(
            "inductor",
            "cuda",
            marks=[
                needs_gpu,
                pytest.mark.filterwarnings("ignore", "error::actnn.ActNNWarning"),  # inductor's
            ],
        ),
    ],
)
def test_a_block_encodes_each_storage_once(encoded, backend, device):
    model, x = Block().to(device), torch.randn(4, 16, 32, device=device)
    saving = actnn.compressed(bits=2, min_bytes=0, model=model)
    with saving:
        loss = torch.compile(model, backend=backend)(x).sum()
    n = x.numel()
    # Results of both norms, what enters the second one, GELU's operand and result, the attention's
    # operands and its result, which is also the last linear layer's operand.
    large = sorted(each for each in encoded if each[0] >= n)
    assert large == [(n, 2), (n, 2), (n, 2), (n, 4), (3 * n, 4), (4 * n, 2), (4 * n, 2)]
    loss.backward()


def rounded_gradients(model, x, run, bits):
    with actnn.compressed(bits=bits, min_bytes=0, model=model, stochastic=False):
        return gradients(run, x)


@pytest.mark.parametrize("bits", first_of([4, 32], 1))
def test_gradients_are_those_of_hooks_outside_of_graphs(encoded, bits):
    model, x = Block(), torch.randn(4, 16, 32)
    eager = rounded_gradients(model, x, model, bits)
    compiled = rounded_gradients(model, x, torch.compile(model, backend="aot_eager"), bits)
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def halves(y):
    a, b = y.chunk(2, -1)
    return a * b


def transposed_and_flat(y):
    z = y.view(4, 2, 8, 16).transpose(1, 2)
    return z.square().sum() + y.flatten().dot(y.flatten())


def some_columns(y):
    return y[:, :2].square() * y[:, 2:4].sin()


def result_and_views(y):
    return y, y[:, :8].square() * y[:, 8:].square()


@pytest.mark.parametrize(
    ("function", "sizes"),
    first_of(
        [
            (halves, [1024]),
            (some_columns, [128, 128]),  # the whole is larger than its parts
            (transposed_and_flat, [1024]),
            (result_and_views, []),  # alive anyway
        ],
        2,
    ),
)
def test_views_of_the_result_of_a_layer(encoded, function, sizes):
    layer, x = torch.nn.Linear(8, 16), torch.randn(64, 8, requires_grad=True)

    def run(x):
        return function(layer(x))

    def gradients_of(results):
        results = results if isinstance(results, tuple) else (results,)
        loss = torch.stack([each.sum() for each in results]).sum()
        return torch.autograd.grad(loss, [x, *layer.parameters()])

    exact = gradients_of(run(x))
    for bits, tolerance in ((32, 1e-6), (8, 2e-2)):
        torch._dynamo.reset()
        encoded.clear()
        with actnn.compressed(bits=bits, min_bytes=0, model=layer):
            found = gradients_of(torch.compile(run, backend="aot_eager", fullgraph=True)(x))
        for a, b in zip(exact, found, strict=True):
            assert (a - b).norm() <= tolerance * a.norm()
    assert sorted(each[0] for each in encoded) == sizes


def graphs_that_save(order):
    """A forward that saves a tensor s and views of it, and a backward that reads them."""
    forward, backward = fx.Graph(), fx.Graph()
    s = forward.call_function(aten.tanh.default, (forward.placeholder("x"),))
    nodes = {"s": s, **{n: forward.call_function(aten.view.default, (s, [n, -1])) for n in (2, 8)}}
    for node, shape in zip(nodes.values(), ((4, 4), (2, 8), (8, 2)), strict=True):
        node.meta["val"] = torch.empty(shape)
    saved = [nodes[name] for name in order]
    forward.output((forward.call_function(aten.sum.default, (nodes[8],)), *saved))
    inputs = [backward.placeholder(node.name) for node in saved]
    backward.output(tuple(backward.call_function(aten.neg.default, (each,)) for each in inputs))
    return forward, backward, saved


@pytest.mark.parametrize("current", [0, 1, 2])
@pytest.mark.parametrize("order", [("s", 2, 8), (2, "s", 8), (2, 8, "s")], ids=str)
def test_views_and_the_tensor_itself_become_one_saved_tensor(order, current):
    forward, backward, saved = graphs_that_save(order)
    share_views(forward, backward, saved[current])
    for graph in (forward, backward):
        graph.lint()
    assert sum(bool(node.users) for node in backward.find_nodes(op="placeholder")) == 1
    x = torch.randn(4, 4)
    _, *held = fx.GraphModule({}, forward)(x)
    found = fx.GraphModule({}, backward)(*held)
    for name, tensor in zip(order, found, strict=True):
        assert torch.equal(tensor, -x.tanh() if name == "s" else -x.tanh().view(name, -1))


def test_a_rectified_tensor_keeps_its_signs(encoded):
    """The view is an operand of a product, and the tensor tells where gradients pass."""
    layer, x = torch.nn.Linear(8, 16), torch.randn(64, 8, requires_grad=True)

    def run(x):
        y = torch.relu(layer(x).view(4, 16, 16))
        flat = y.view(64, 16)
        return (flat.T @ flat).sum()

    with actnn.compressed(bits=1, min_bytes=0, model=layer):
        loss = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
    assert [each[0] for each in encoded] == [1024]
    (gradient,) = torch.autograd.grad(loss, layer.bias)
    assert gradient.isfinite().all()
    inactive = layer(x).clamp(min=0).sum(0) == 0
    assert not gradient[inactive].any()


def test_compiled_graphs_copy_nothing_to_encode_it(encoded):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    model, x = Block(), torch.randn(4, 16, 32)
    with actnn.compressed(bits=4, min_bytes=0, model=model):
        torch.compile(model, backend=aot_autograd(fw_compiler=keep))(x)
    forward = graphs[0].graph
    assert forward.find_nodes(op="call_function", target=torch.ops.actnn.encode_in_step.default)
    assert not forward.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile
def test_one_symbolic_size_may_be_that_of_several_dimensions():
    """As in masks of attention, whose last two dimensions are the tokens."""

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qk = torch.nn.Linear(32, 64)

        def forward(self, x):
            n, t, _ = x.shape
            q, k = self.qk(x).unflatten(-1, (2, 4, 8)).permute(2, 0, 3, 1, 4)
            place = torch.arange(t)
            mask = torch.where((place <= place[:, None]).expand(n, 1, t, t), 0.0, -torch.inf)
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, k, attn_mask=mask
            ).square()

    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Attention()
    parameters = list(model.parameters())
    actnn.compress(model, bits=8, min_bytes=0)
    run = torch.compile(model, dynamic=True, backend="aot_eager")
    for shape in ((4, 48, 32), (2, 64, 32)):
        x = torch.randn(shape)
        found = torch.autograd.grad(run(x).square().mean(), parameters)
        plain = Attention()
        plain.load_state_dict(model.state_dict())
        exact = torch.autograd.grad(plain(x).square().mean(), list(plain.parameters()))
        error = sum((a - b).square().sum() for a, b in zip(found, exact, strict=True))
        assert 0 < error / sum(b.square().sum() for b in exact) < 0.01**2
