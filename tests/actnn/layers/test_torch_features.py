"""Compressed models under autocast, GradScaler, checkpoints, torch.compile, DDP and FSDP2."""

import pytest
import torch
from actnn_models import Block, compressed_copy, conv_input, conv_net, gradients
from distributed_models import check, worker
from torch import nn
from torch.utils.checkpoint import checkpoint

import actnn
from two_processes import NEEDS_GLOO, run_two

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of compilers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    model, x = Block(), torch.randn(2, 16, 32)
    ours, lossless = compressed_copy(model, bits=8), compressed_copy(model, bits=32)
    with torch.autocast("cpu", dtype):
        exact, rounded, same = (gradients(each, x) for each in (model, ours, lossless))
        _loss = ours(x)
    assert all(torch.equal(a, b) for a, b in zip(exact, same, strict=True))
    for a, b in zip(exact, rounded, strict=True):
        assert (a - b).norm() <= 0.05 * a.norm() + 1e-3
    weights = {(32, 96), (32, 32), (32, 128), (128, 32)}
    copies = [r for r in ours.actnn.records if tuple(r.shape) in weights and r.dtype is dtype]
    by_reason = {record.reason for record in copies}
    assert "copy of a parameter" in by_reason
    activations = [r for r in ours.actnn.records if r.reason == "compressed"]
    assert dtype in {record.dtype for record in activations}


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # torch's own, of its RMSNorm
@pytest.mark.parametrize("norm", [nn.LayerNorm(32), nn.RMSNorm(32, eps=1e-5)], ids=str)
def test_autocast_of_norms_after_linear_layers(norm):
    model = nn.Sequential(nn.Linear(32, 32), norm, nn.Linear(32, 4))
    ours, x = compressed_copy(model, bits=8), torch.randn(64, 32)
    with torch.autocast("cpu", torch.bfloat16):
        exact, rounded = gradients(model, x), gradients(ours, x)
    assert "normalized input" in {record.reason for record in ours.actnn.records}
    for a, b in zip(exact, rounded, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= 0.05 * a.norm()


@pytest.mark.slow
def test_grad_scaler():
    model = compressed_copy(conv_net(), bits=8)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(conv_input()).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(32, 4)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        x = checkpoint(self.second, x, use_reentrant=self.reentrant)
        return self.head(x)


def inputs_of_checkpoints(saving):
    return [record.choice for record in saving.records if record.op == "checkpoint"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_inputs_of_checkpoints_are_kept_and_nothing_inside(reentrant):
    model, x = Checkpointed(reentrant), torch.randn(2, 16, 32)
    ours, lossless = compressed_copy(model, bits=4), compressed_copy(model, bits=32)
    exact, same, rounded = (gradients(each, x) for each in (model, lossless, ours))
    assert all(torch.equal(a, b) for a, b in zip(exact, same, strict=True))
    assert all((a - b).norm() < 0.3 * a.norm() + 1e-3 for a, b in zip(exact, rounded, strict=True))
    _loss = ours(x)
    assert inputs_of_checkpoints(ours.actnn) == [actnn.Choice("keep")]
    assert not [r for r in ours.actnn.records if r.module.startswith("second.")]


def test_inputs_of_checkpoints_have_4_bits_if_a_choice_or_a_policy_says_so():
    model, x = Checkpointed(False), torch.randn(2, 16, 32)
    exact, four = gradients(model, x), actnn.Choice("compress", 4)

    def boundaries(ours):
        found = gradients(ours, x)
        assert all((a - b).norm() < a.norm() + 1e-3 for a, b in zip(exact, found, strict=True))
        return [choice.bits for choice in inputs_of_checkpoints(ours.actnn)]

    ours = compressed_copy(model, bits=4, policy=lambda info: four)
    assert boundaries(ours) == [4]
    ours = compressed_copy(model, bits=4, policy=lambda info: actnn.Choice("compress", 2))
    assert boundaries(ours) == [4]  # and no fewer
    ours = compressed_copy(model, bits=4)
    ours.actnn.set_choices({"": four})
    assert boundaries(ours) == [4]
    ours.actnn.set_choices({"head": four})
    assert boundaries(ours) == [None]


def test_inputs_of_checkpoints_share_only_what_is_as_exact():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
            self.inner = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))

        def forward(self, x):
            y = self.a(x).sin()
            first = self.b(y) + checkpoint(self.inner, y, use_reentrant=False)
            return first + checkpoint(self.inner, y, use_reentrant=False) + self.b(y)

    def policy(info):
        return actnn.Choice("compress", 8 if info.op == "checkpoint" else few)

    whole = 16 * 32 * 4
    for few, own in ((2, True), (8, False)):
        for each in (policy, None):
            ours = compressed_copy(Model(), bits=few, policy=each)
            ours(torch.randn(16, 32)).sum().backward()
            of_y = [r for r in ours.actnn.records if tuple(r.shape) == (16, 32)][2:]
            assert sum(r.nbytes for r in of_y) == whole
            inputs = [r for r in of_y if r.op == "checkpoint"]
            assert len(inputs) == (own or each is None)  # the other one shares it
            assert all((r.held < whole) == (each is not None) for r in inputs)
            assert [r.reason[:6] for r in of_y[-2:]] == ["shared"] * 2


class Rectified(nn.Module):
    """Blocks of convolutions that run again: signs of their results have to be the same."""

    def __init__(self, reentrant):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            )
            for _ in range(4)
        )  # fmt: skip
        self.reentrant = reentrant

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x.mean((2, 3)).square().sum()


@pytest.mark.parametrize("way", ["context", "model"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_run_again_have_the_same_signs(reentrant, way):
    torch.manual_seed(0)
    model, x = Rectified(reentrant), torch.randn(4, 3, 16, 16)
    model(x).backward()
    exact = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    if way == "model":
        loss = actnn.compress(model, bits=8, min_bytes=0)(x)
    else:
        with actnn.compressed(bits=8, min_bytes=0):
            loss = model(x)
    loss.backward()  # a reentrant checkpoint refuses autograd.grad
    pairs = list(zip(exact, (parameter.grad for parameter in model.parameters()), strict=True))
    error = sum((a - b).square().sum() for a, b in pairs).sqrt()
    assert error < 0.03 * sum(a.square().sum() for a in exact).sqrt()


def test_dropout_inside_a_checkpoint_is_that_of_torch():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model, x = Model(), torch.randn(4, 16)
    ours = compressed_copy(model, bits=32)
    results = []
    for each in (model, ours):
        torch.manual_seed(1)
        results.append(gradients(each, x))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_channels_last_stays():
    model, x = conv_net().to(memory_format=torch.channels_last), conv_input()
    x = x.to(memory_format=torch.channels_last)
    ours = compressed_copy(model, bits=32)
    same = zip(gradients(model, x), gradients(ours, x), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    rounded = compressed_copy(model, bits=4)
    _loss = rounded(x)
    shared = [r for r in rounded.actnn.records if r.reason.startswith("shared")]
    assert not any(record.held for record in shared)


# inductor's import; its compiler takes minutes
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_torch_compile_inlines_the_hooks():
    """With the decompositions and the partitioner of inductor, but without its code generation."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs = {}

    def save(kind):
        def compiler(graph, inputs):
            graphs.setdefault(kind, []).append(graph)
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=save("forward"),
        bw_compiler=save("backward"),
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    model = nn.Sequential(Block(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    ours, x = compressed_copy(model, bits=8), torch.randn(8, 16, 32)
    exact = gradients(model, x)
    compiled = torch.compile(ours, backend=backend)
    first, second = gradients(compiled, x), gradients(compiled, x)
    for a, b in zip(exact, first, strict=True):
        assert (a - b).norm() <= 0.03 * a.norm() + 1e-3
    assert len(graphs["forward"]) == len(graphs["backward"]) == 1
    assert not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    output = graphs["forward"][0].graph.output_node().args[0][1:]
    saved = [node.meta["val"] for node in output if node.op != "placeholder"]
    codes = [value for value in saved if value.dtype is torch.uint8]
    assert len(codes) >= 8
    elements = 8 * 16 * 32
    assert not [v for v in saved if v.dtype is torch.float32 and v.numel() >= elements]
    ops = torch.ops.actnn
    assert products_between(graphs["forward"][0], ops.encode_in_step.default, read=True)[-1] == 0
    late = products_between(graphs["backward"][0], ops.decode.default, read=False)
    assert late[-2] <= 1  # one of another gradient may come first; the last tensor stays in front


def products_between(graph, target, *, read):
    """Count products between calls of an operator and what they read, or what reads them."""
    nodes = list(graph.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    product = torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default
    counts = []
    for node in graph.graph.find_nodes(op="call_function", target=target):
        other = node
        while other.target not in product and other.op == "call_function":
            others = other.all_input_nodes if read else list(other.users)
            if not others:
                break
            other = (max if read else min)(others)
        first, last = sorted((place[node], place[other]))
        counts.append(sum(each.target in product for each in nodes[first + 1 : last]))
    return sorted(counts)


def test_a_compressed_model_compiles_as_one_graph():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 4))
    ours, x = compressed_copy(model, bits=8), torch.randn(16, 32)
    exact = gradients(model, x)
    rounded = gradients(torch.compile(ours, backend=backend, fullgraph=True), x)
    assert len(graphs) == 1
    distances = [float((a - b).norm() / a.norm()) for a, b in zip(exact, rounded, strict=True)]
    assert 1e-4 < max(distances) < 0.05

    def function(x):
        return model(x).square().sum()

    torch._dynamo.reset()
    graphs.clear()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with actnn.compressed(bits=8, min_bytes=0, model=model):
        found = torch.autograd.grad(compiled(x), list(model.parameters()))
    exact = torch.autograd.grad(function(x), list(model.parameters()))
    assert len(graphs) == 1
    assert all((a - b).norm() <= 0.05 * a.norm() + 1e-3 for a, b in zip(exact, found, strict=True))


class Broken(nn.Module):
    """torch.compile gives its forward up, so that attention runs uncompiled below it."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        try:
            torch._dynamo.graph_break()
        finally:
            q, k, v = self.qkv(x).view(4, 32, 2, 48).transpose(1, 2).chunk(3, -1)
            y = nn.functional.scaled_dot_product_attention(q, k, v)
        return y


def test_torch_compile_does_not_compile_the_hooks_of_uncompiled_frames():
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Broken(), torch.randn(4, 32, 32)
    exact = gradients(model, x)
    actnn.compress(model, bits=8, min_bytes=1024)
    rounded = gradients(torch.compile(model, backend="eager"), x)
    for a, b in zip(rounded, exact, strict=True):
        assert float((a - b).norm() / b.norm()) < 0.02
    assert "made again in backward" in {record.reason for record in model.actnn.records}


@pytest.mark.slow
def test_compiled_blocks_in_a_python_model():
    torch._dynamo.reset()
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 16, 32)
    ours = compressed_copy(model, bits=8)
    ours[0].compile(backend="aot_eager")
    exact, rounded = gradients(model, x), gradients(ours, x)
    for a, b in zip(exact, rounded, strict=True):
        assert (a - b).norm() <= 0.05 * a.norm() + 1e-3


@pytest.mark.slow
@NEEDS_GLOO
def test_ddp_and_fsdp2(tmp_path):
    run_two(worker, tmp_path, 2, "gloo")
    check(tmp_path, 2, exact=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_batched_gradients(bits):
    net, x = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 3)), torch.randn(256, 32)
    each = torch.eye(3)[:, None].expand(3, 256, 3)
    ours = compressed_copy(net, bits=bits)
    exact, found = (
        torch.autograd.grad(m(x), list(m.parameters()), each, is_grads_batched=True)
        for m in (net, ours)
    )
    for a, b in zip(exact, found, strict=True):
        assert (a - b).norm() < 0.1 * a.norm()
