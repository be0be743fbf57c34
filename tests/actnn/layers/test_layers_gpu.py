"""Compressed models on a GPU: kernels, graphs, host memory, accounting, synchronization."""

import copy
import gc

import pytest
import torch
import torch.multiprocessing as mp
from actnn_models import Block, compressed_copy, conv_input, conv_net, gradients
from distributed_models import check, worker
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import actnn
from actnn.saving import Saving

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _deterministic():
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def all_equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


RECTIFIERS = [nn.ReLU(), nn.ReLU(True), nn.ReLU6(), nn.Hardtanh(-1, 2), nn.LeakyReLU(0.2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layer", RECTIFIERS, ids=str)
def test_rectifiers_are_exact(layer, dtype):
    for layout in (torch.contiguous_format, torch.channels_last):
        x = (torch.randn(3, 5, 9, 7, device="cuda") * 3).to(dtype, memory_format=layout)
        model = Times1(layer)
        assert all_equal(gradients(model, x), gradients(compressed_copy(model), x))


class Times1(nn.Module):
    """Multiplies by 1, so that layers in place do not change a leaf."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x * 1)


def test_functional_relu_has_an_exact_mask():
    weight = nn.Parameter(torch.randn(64, 64, device="cuda"))
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    with Saving(bits=2, min_bytes=0):
        y = torch.relu(x * 1) @ weight
    y.sum().backward()
    assert torch.equal(x.grad, torch.where(x > 0, torch.ones_like(x) @ weight.t(), 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_regenerated(dtype):
    layer = compressed_copy(nn.Dropout(0.25))
    x = torch.ones(300, 300, device="cuda", dtype=dtype, requires_grad=True)
    torch.manual_seed(4)
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx, y)
    assert abs((y == 0).float().mean().item() - 0.25) < 0.01
    torch.manual_seed(4)
    assert torch.equal(layer(x), y)
    assert not torch.equal(layer(x), y)


def test_whole_models_are_exact_without_rounding():
    for model, x in ((conv_net(), conv_input()), (Block(), torch.randn(2, 16, 32))):
        model, x = model.cuda(), x.cuda()
        for settings in ({"bits": 32}, {"level": "L0"}, {"level": "swap"}):
            assert all_equal(gradients(model, x), gradients(compressed_copy(model, **settings), x))


@pytest.mark.parametrize("autocast", [None, torch.float16, torch.bfloat16])
def test_gru_equals_cudnn(autocast):
    torch.manual_seed(0)
    gru = nn.GRU(24, 40, 2, bidirectional=True, batch_first=True, device="cuda")
    ours, x = compressed_copy(gru), torch.randn(4, 33, 24, device="cuda")

    class First(nn.Module):
        def __init__(self, gru):
            super().__init__()
            self.gru = gru

        def forward(self, x):
            return self.gru(x)[0]

    with torch.autocast("cuda", autocast or torch.float16, enabled=autocast is not None):
        exact, found = gradients(First(gru), x), gradients(First(ours), x)
    tolerance = 1e-4 if autocast is None else 0.03
    for a, b in zip(exact, found, strict=True):
        assert (a - b).norm() <= tolerance * a.norm()


def step_of(model, x):
    def step():
        model.zero_grad(set_to_none=False)
        model(x).float().square().mean().backward()

    return step


@pytest.mark.filterwarnings("ignore:Compression adds", "ignore:Level L3 uses")  # one batch
@pytest.mark.parametrize("settings", [{"bits": 4}, {"bits": 32}, {"level": "L3"}], ids=str)
def test_cuda_graphs(settings):
    model = nn.Sequential(conv_net(), nn.Dropout(0.5), nn.Linear(5, 5), nn.GELU()).cuda()
    ours, x = compressed_copy(model, **settings), conv_input().cuda()
    step, side = step_of(ours, x), torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(5):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    found = []
    for _ in range(2):
        graph.replay()
        found.append([p.grad.clone() for p in ours.parameters()])
    assert not all_equal(*found)  # noise and masks of dropout go on


@pytest.mark.filterwarnings("ignore:Synchronization debug mode", "ignore:Compression adds")
@pytest.mark.filterwarnings("ignore:Level L3 uses")
@pytest.mark.parametrize("settings", [{"bits": 4}, {"level": "L3"}, {"level": "L1"}], ids=str)
def test_no_step_between_trials_waits_for_the_device(settings):
    model = compressed_copy(nn.Sequential(Block(), Block()).cuda(), **settings)
    x = torch.randn(2, 16, 32, device="cuda")
    step = step_of(model, x)
    for _ in range(3):  # with L3 the third measures costs
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(16):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("layer", [nn.ReLU(True), nn.Dropout(0.5, inplace=True)], ids=str)
def test_more_elements_than_31_bits_can_count(layer):
    n = (1 << 31) + 9
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs a GPU with 20 GiB")
    ours = compressed_copy(layer)
    x = torch.full((n,), 2.0, dtype=torch.float16, device="cuda")
    x[: 1 << 20], x[-4:] = -2.0, -2.0
    leaf = torch.zeros((), dtype=torch.float16, device="cuda", requires_grad=True)
    y = ours(x.add_(leaf))  # in place, and so is the layer
    (dx,) = torch.autograd.grad(y, leaf, y.detach(), retain_graph=False)
    if isinstance(layer, nn.ReLU):
        assert not bool(y[: 1 << 20].any())
        assert y[-6:].tolist() == [2.0, 2.0, 0.0, 0.0, 0.0, 0.0]
        assert bool((y[1 << 20 : -4] == 2.0).all())
    else:
        kept = (y[-(1 << 20) :] != 0).float().mean().item()
        assert abs(kept - 0.5) < 0.01
        assert set(y[-100:].tolist()) <= {0.0, 4.0, -4.0}
    assert dx.shape == ()


@pytest.mark.filterwarnings("ignore")  # of torch.distributed
def test_ddp_and_fsdp2_on_gpus(tmp_path):
    """Two processes if there are two GPUs, else one."""
    processes = min(2, torch.cuda.device_count())
    mp.spawn(worker, (str(tmp_path), processes, "nccl"), nprocs=processes)
    check(tmp_path, processes, exact=1e-5)


def test_data_parallel_is_an_error_with_several_gpus():
    model, x = (
        compressed_copy(nn.Sequential(Block(), Block()).cuda()),
        torch.randn(4, 16, 32).cuda(),
    )
    assert nn.DataParallel(model, [0])(x).shape == x.shape
    if torch.cuda.device_count() > 1:
        with pytest.raises(actnn.ActNNError, match="DistributedDataParallel around it"):
            nn.DataParallel(model, [0, 1])(x)


class OnTwo(nn.Module):
    """Blocks on two GPUs, one after the other."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(64, 4).to("cuda:0"), Block(64, 4).to("cuda:1")
        self.relu, self.drop = nn.ReLU(), nn.Dropout(0.1)

    def forward(self, x):
        return self.second(self.drop(self.relu(self.first(x))).to("cuda:1"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.filterwarnings("ignore::actnn.ActNNWarning")  # of the noise
@pytest.mark.parametrize("level", ["L0", "L1", "L2", "L3", "L4", "L5", "swap"])
def test_a_model_on_two_gpus(level):
    model, x = OnTwo(), torch.randn(8, 64, 64, device="cuda:0")
    model.drop.p = 0.0
    ours = actnn.compress(copy.deepcopy(model), level=level, min_bytes=0)
    exact = gradients(model, x)
    for _ in range(4):
        found = gradients(ours, x)
    limit = {"L0": 0.0, "swap": 0.0, "L1": 0.3, "L2": 0.3}.get(level, 1.5)
    for a, b in zip(exact, found, strict=True):
        assert a.device == b.device
        assert (a - b).norm() <= limit * a.norm() + 1e-4
    moved = {r.reason for r in ours.actnn.records}
    assert ("in host memory" in moved) == (level in ("L4", "L5", "swap"))
    model.drop.p = 0.1
    again = actnn.compress(copy.deepcopy(model), level=level, min_bytes=0)
    assert all(each.isfinite().all() for each in gradients(again, x))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_plans_are_for_one_gpu():
    model, x = OnTwo(), torch.randn(8, 64, 64, device="cuda:0")
    with pytest.raises(actnn.ActNNError, match="one device, got parameters on cuda:0 and cuda:1"):
        actnn.fit(model, x, "1 GiB")
    assert actnn.estimate(model, x).total.exact > 0


def test_accounting_equals_the_allocator():
    # At 8 bits nothing is kept to measure the noise.
    model = compressed_copy(nn.Sequential(*(Block(256, 4) for _ in range(3))).cuda(), bits=8)
    x = torch.randn(8, 128, 256, device="cuda")
    step_of(model, x)()
    gc.collect()
    before = torch.cuda.memory_allocated()
    y = model(x)
    held = torch.cuda.memory_allocated() - before - y.nbytes
    tensors = sum(1 for record in model.actnn.records if record.held)
    # Each tensor may be rounded up to 512 bytes, codes and parameters apart.
    assert abs(held - model.actnn.held_bytes) <= 2 * 512 * tensors
    del y
    assert torch.cuda.memory_allocated() == before


def test_memory_does_not_grow():
    model = compressed_copy(nn.Sequential(Block(), Block()).cuda(), bits=8)
    x = torch.randn(4, 16, 32, device="cuda")
    step = step_of(model, x)
    gc.disable()
    try:
        for index in range(100):
            step()
            if index == 5:
                first = torch.cuda.memory_allocated()
        assert torch.cuda.memory_allocated() == first
    finally:
        gc.enable()


def test_codes_in_host_memory():
    """They are those that stay on the GPU: equal gradients in every step."""
    model = nn.Sequential(*(Block(128, 4) for _ in range(4))).cuda()
    for block in model:
        block.mlp[1] = nn.ReLU()  # its mask stays; codes of derivatives are made for a GPU alone
    x = torch.randn(8, 64, 128, device="cuda")
    outside = compressed_copy(model, level="L4", bits=4)
    inside = compressed_copy(model, level="L3", bits=4)
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(4):
            assert all_equal(gradients(outside, x), gradients(inside, x))
        y, z = outside(x), inside(x)
    assert torch.equal(y, z)
    assert "in host memory" in {record.reason for record in outside.actnn.records}
    codes = sum(r.held for r in inside.actnn.records if r.choice.action == "compress")
    left = inside.actnn.held_bytes - outside.actnn.held_bytes
    assert left > 0.8 * codes  # the parameters of codes stay


@pytest.mark.parametrize("settings", [{"bits": 2, "swap": True}, {"bits": 2}], ids=str)
def test_what_backward_compares_stays_exact(settings):
    x = torch.randn(512, 512, device="cuda", requires_grad=True)
    for reduce in (lambda y: y.amax(-1), lambda y: y.max(), lambda y: y.chunk(2, -1)[1].amin(0)):
        (exact,) = torch.autograd.grad(reduce(x * 1.5).sum(), x)
        with Saving(**settings, min_bytes=0) as saving:
            loss = reduce(x * 1.5).sum()
        assert "compared in backward" in {record.reason for record in saving.records}
        assert torch.equal(torch.autograd.grad(loss, x)[0], exact)


# Of torch and inductor: new names for TF32, and what would be faster.
@pytest.mark.filterwarnings("ignore", "error::actnn.ActNNWarning")
def test_inductor_holds_codes():
    torch._dynamo.reset()
    model = nn.Sequential(*(Block(256, 4) for _ in range(2))).cuda()
    x = torch.randn(8, 128, 256, device="cuda")
    held, found = {}, {}
    for bits in (32, 4):
        ours = compressed_copy(model, bits=bits, min_bytes=1 << 14)
        compiled = torch.compile(ours)
        found[bits] = gradients(compiled, x)
        gc.collect()
        before = torch.cuda.memory_allocated()
        y = compiled(x)
        held[bits] = torch.cuda.memory_allocated() - before - y.nbytes
        del y
    assert held[4] < 0.5 * held[32]
    for a, b in zip(found[32], found[4], strict=True):
        assert (a - b).norm() <= 0.3 * a.norm() + 1e-3


def test_tensors_of_any_layout_come_back_from_host_memory():
    x = torch.randn(1003, 517, device="cuda", requires_grad=True)
    for view in (lambda y: y, lambda y: y.t(), lambda y: y[:, ::3], lambda y: y[:1].expand(9, -1)):
        (exact,) = torch.autograd.grad((view(x * 1) ** 2).sum(), x)
        with Saving(bits=32, swap=True, min_bytes=0) as saving:
            loss = (view(x * 1) ** 2).sum()
        assert "in host memory" in {record.reason for record in saving.records}
        assert torch.equal(torch.autograd.grad(loss, x)[0], exact)


def test_changes_of_tensors_in_host_memory_are_errors():
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    with Saving(bits=32, swap=True, min_bytes=0):
        y = x * 1
        z = y.sin().sum()
        y.zero_()
    with pytest.raises(RuntimeError, match="stay as it was"):
        z.backward()


@pytest.mark.parametrize(
    "choice", [actnn.Choice("offload", 32), actnn.Choice("offload", 4)], ids=str
)
@pytest.mark.parametrize("recomputed", [False, True])
def test_noise_that_is_filled_after_it_is_saved_may_move_to_host_memory(choice, recomputed):
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.RReLU()), nn.Linear(64, 64)).cuda()
    x = torch.randn(4096, 64, device="cuda")
    torch.manual_seed(1)
    exact = gradients(model, x)
    actnn.compress(model, bits=32, min_bytes=0)
    other = actnn.Choice("recompute") if recomputed else choice
    model.actnn.set_choices({"0": other, "1": choice})
    for _ in range(3):
        torch.manual_seed(1)
        for a, b in zip(gradients(model, x), exact, strict=True):
            limit = 1e-6 if choice.bits == 32 else 0.2
            assert (a - b).norm() <= limit * b.norm()


@pytest.mark.parametrize("last", [nn.Sigmoid(), nn.Tanh(), nn.Softplus()], ids=str)
def test_a_loss_on_a_gpu_may_divide_by_the_results_of_a_network(last):
    model = nn.Sequential(nn.Linear(32, 64), last).cuda()
    with torch.no_grad():
        model[0].weight.mul_(8)  # as of a trained network
    x, parameters = torch.randn(256, 32, device="cuda"), list(model.parameters())

    def loss(y):
        return (y - y.square() + 1e-4).abs().log().mean()

    exact = torch.autograd.grad(loss(model(x)), parameters)
    actnn.compress(model, bits=8, min_bytes=0)
    for _ in range(4):
        found = torch.autograd.grad(loss(model(x)), parameters)
        for a, b in zip(found, exact, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()


class Normalized(nn.Module):
    """Calls the function for a norm of root mean squares, whose kernel on GPUs is fused."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.last(torch.tanh(nn.functional.rms_norm(self.first(x), (64,)) + 1))


@pytest.mark.parametrize("level", ["L1", "L3"])
def test_a_fused_rms_norm(level):
    model, x = Normalized().cuda(), torch.randn(32, 64, device="cuda")
    inside = compressed_copy(model, level=level, bits=8)
    for a, b in zip(gradients(inside, x)[1:], gradients(model, x)[1:], strict=True):
        assert (a - b).norm() < 0.05 * b.norm()


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_channels_of_one_number_have_finite_gradients(memory):
    """Level L3 divides by the variance of what is decoded."""
    first = nn.Conv2d(3, 8, 1)
    nn.init.zeros_(first.weight[:4])
    model = nn.Sequential(first, nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)).cuda()
    x = torch.randn(4, 3, 16, 16, device="cuda").to(memory_format=memory)
    inside = compressed_copy(model, level="L3", bits=4)
    assert all(each.isfinite().all() for each in gradients(inside, x))
