"""Training a QuantGRU on a GPU: the gradients of the CPU, graphs, autocast, nothing waits."""

import copy
import gc

import pytest
import torch
from bits import assert_same_bits

from quant_gru import QuantConfig, QuantGRU
from quant_gru.execution.noise import Noise
from quant_gru.kernels.cuda.backward import prepared, time_chunks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LIMITS = {"fp32": 2e-5, "tf32": 1e-3, "bf16": 1e-2}
DEEP = {"num_layers": 2, "bidirectional": True}


def pair(C, H, config="int8", **options):
    """The same GRU in training mode on the CPU and on the GPU."""
    torch.manual_seed(0)
    config = getattr(QuantConfig, config)() if isinstance(config, str) else config
    gru = QuantGRU(C, H, config=config, **options)
    x = torch.randn(12, 8, C)
    gru.calibrate(x.transpose(0, 1) if gru.batch_first else x)
    gru.finalize_calibration()
    gru.use_quantization = True
    gru.train()
    return gru, copy.deepcopy(gru).cuda()


def distance(a, b):
    return float((a.cpu().double() - b.double()).norm() / b.double().norm().clamp(min=1e-12))


def results(gru, x, hx=None, **options):
    """Outputs and gradients."""
    x = x.to(gru.weight_ih_l0.device).detach().requires_grad_()
    hx = None if hx is None else hx.to(x.device).detach().requires_grad_()
    y, h_n = gru(x, hx, **options)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(t.shape, generator=generator).to(t.device) for t in (y, h_n)]
    loss = (y * weights[0]).sum() + (h_n * weights[1]).sum()
    leaves = [t for t in (x, hx, *gru.parameters()) if t is not None and t.requires_grad]
    return [y.detach(), h_n.detach()], torch.autograd.grad(loss, leaves)


def check(cpu, gpu, *args, **options):
    (outputs, grads), (expected, exact) = results(gpu, *args, **options), results(cpu, *args)
    for a, b in zip(outputs, expected, strict=True):
        assert_same_bits(a, b)
    for a, b in zip(grads, exact, strict=True):
        assert distance(a, b) <= LIMITS[gpu.precision]


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("config", ["int8", "w8a16", "int16"])
@pytest.mark.parametrize("H", [20, 128, 300])
def test_gradients_of_layers_and_directions(H, config, precision):
    cpu, gpu = pair(16, H, config, **DEEP)
    gpu.precision = precision
    check(cpu, gpu, torch.randn(12, 9, 16), torch.randn(4, 9, H) * 0.5)
    check(cpu, gpu, torch.randn(12, 9, 16))


def test_noise_is_the_same_on_both(monkeypatch):
    cpu, gpu = pair(16, 40, zoneout=0.3, recurrent_dropout=0.2, dropout=0.4, **DEEP)
    gpu.precision = "fp32"
    seed = torch.tensor(1234567890123)

    def drawn(device, **chances):
        chances.pop("updates")
        return Noise(seed.to(device), **chances)

    monkeypatch.setattr("quant_gru.modules.training_options.draw", drawn)
    check(cpu, gpu, torch.randn(9, 5, 16), torch.randn(4, 5, 40) * 0.5)


def test_lengths_and_nan():
    cpu, gpu = pair(8, 24, **DEEP)
    gpu.precision = "fp32"
    rows = [torch.randn(T, 8) for T in (5, 9, 1)]
    packed = torch.nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)
    found = []
    for gru in (gpu, cpu):
        y, h_n = gru(packed.to(gru.weight_ih_l0.device))
        found.append(torch.autograd.grad(y.data.sum() + h_n.sum(), list(gru.parameters())))
    for a, b in zip(*found, strict=True):
        assert distance(a, b) <= 2e-5
    x = torch.randn(6, 4, 8)
    x[2, 1, 3] = torch.nan
    (outputs, grads), (expected, exact) = results(gpu, x), results(cpu, x)
    assert_same_bits(outputs[0], expected[0])
    for a, b in zip(grads, exact, strict=True):
        assert torch.equal(a.isnan().cpu(), b.isnan())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_does_not_wait_for_the_gpu():
    _, gpu = pair(16, 64, zoneout=0.1, recurrent_dropout=0.1, dropout=0.1, num_layers=2)
    x = torch.randn(10, 4, 16, device="cuda")
    optimizer = torch.optim.Adam(gpu.parameters(), fused=True)

    def step():
        optimizer.zero_grad()
        gpu(x)[0].square().mean().backward()
        optimizer.step()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "options", [{}, DEEP, {**DEEP, "zoneout": 0.1}], ids=["plain", "deep", "noise"]
)
def test_a_whole_step_in_a_graph(options):
    _, gpu = pair(16, 64, **options)
    twin = copy.deepcopy(gpu)
    torch.manual_seed(7)
    x, target = torch.randn(10, 4, 16, device="cuda"), torch.randn(10, 4, 1, device="cuda")

    def make(gru):
        optimizer = torch.optim.SGD(gru.parameters(), lr=0.05)

        def step():
            optimizer.zero_grad(set_to_none=False)
            loss = (gru(x)[0] - target).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    eager, captured = make(twin), make(gpu)
    # the same steps before the capture, which runs on a stream of its own
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            captured()
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        eager()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = captured()
    losses = []
    for _ in range(5):
        graph.replay()
        losses.append(float(loss.detach()))
        expected = eager()
        if "zoneout" not in options:
            assert losses[-1] == float(expected.detach())
    if "zoneout" in options:  # noise is drawn at each replay
        assert len(set(losses)) == 5
    else:
        for a, b in zip(gpu.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_with_a_scaler(dtype):
    _, gru = pair(16, 32)
    head = torch.nn.Linear(32, 4).cuda()
    scaler = torch.amp.GradScaler(enabled=dtype == torch.float16)
    optimizer = torch.optim.AdamW([*gru.parameters(), *head.parameters()], lr=1e-2, fused=True)
    x, target = torch.randn(10, 8, 16, device="cuda"), torch.randn(10, 8, 4, device="cuda")
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype):
            y, h_n = gru(x.to(dtype))
            assert y.dtype == h_n.dtype == torch.float32
            loss = (head(y) - target).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def test_the_same_step_gives_the_same_bits():
    _, gpu = pair(40, 128, **DEEP)
    x = torch.randn(30, 33, 40)
    first, second = results(gpu, x)[1], results(gpu, x)[1]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize("config", ["int8", "w8a16"])
@pytest.mark.parametrize("options", [{"num_layers": 3}, DEEP], ids=["layers", "directions"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("H", [20, 128, 800])
def test_prepared_backwards_have_the_bits_of_the_general_way(
    monkeypatch, H, options, config, precision, dtype
):
    _, gru = pair(16, H, config, **options)
    gru.precision = precision
    x, hx = torch.randn(12, 9, 16) * 2, torch.randn(3 + gru.bidirectional, 9, H) * 2
    rows = [torch.randn(T, 16, device="cuda", dtype=dtype) for T in (5, 9, 1)]
    gru, x, hx = gru.to(dtype), x.to(dtype), hx.to(dtype)

    def all_gradients():
        plain, started = results(gru, x)[1], results(gru, x, hx)[1]
        packed = torch.nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)
        y, h_n = gru(packed)
        loss = y.data.square().sum() + h_n.sum()
        return [*plain, *started, *torch.autograd.grad(loss, list(gru.parameters()))]

    all_gradients()
    run, ran = prepared.PreparedBackward.run, []
    with monkeypatch.context() as patch:
        patch.setattr(prepared.PreparedBackward, "run", lambda *a: ran.append(run(*a)) or ran[-1])
        found = [each for _ in range(2) for each in all_gradients()]
    assert [each is None for each in ran] == [False] * 6
    monkeypatch.setattr(prepared.PreparedBackward, "run", lambda *_: None)
    expected = all_gradients()
    for ours, theirs in zip(found, [*expected, *expected], strict=True):
        assert torch.equal(ours, theirs)


def test_memory_kept_for_backward():
    _, gpu = pair(64, 256)
    T, N, H = 100, 32, 256
    x = torch.randn(T, N, 64, device="cuda", requires_grad=True)
    for _ in range(3):  # what a call makes for those after it is there
        output = gpu(x)
        del output
    # what other tests have left for the collector is not freed between the two measurements
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y, h_n = gpu(x)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before - y.nbytes - h_n.nbytes
    assert held <= 1.1 * T * N * H


def test_forwards_of_other_weights_in_between():
    _, gpu = pair(16, 64)
    x = torch.randn(8, 4, 16)
    exact = results(gpu, x)[1]
    weights = {name: p.detach().clone() for name, p in gpu.named_parameters()}
    others = {name: p * 0.5 for name, p in weights.items()}
    leaves = [w.requires_grad_() for w in weights.values()]
    y, h_n = torch.func.functional_call(gpu, weights, (x.cuda(),))
    torch.func.functional_call(gpu, others, (x.cuda(),))
    generator = torch.Generator().manual_seed(3)
    factors = [torch.randn(t.shape, generator=generator).cuda() for t in (y, h_n)]
    loss = (y * factors[0]).sum() + (h_n * factors[1]).sum()
    for a, b in zip(torch.autograd.grad(loss, leaves), exact[1:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("size", [(10, 4), (100, 200)], ids=["little", "much"])
def test_steps_like_the_one_before_on_other_streams(size):
    """They keep launches and a little memory; the first step of a copy has none."""
    _, gru = pair(16, 64)
    x = torch.randn(*size, 16)
    expected = [each for both in results(copy.deepcopy(gru), x) for each in both]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for i in (0, 0, 1, 1, 2, 0, 2, 1):
        with torch.cuda.stream(streams[i]):
            found = [each for both in results(gru, x) for each in both]
        streams[i].synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    device = torch.device("cuda", torch.cuda.current_device())
    assert gru._state.plans.kept(device, True).differentiated.back is not None


def test_a_backward_in_the_calling_thread():
    _, gru = pair(16, 64)
    x = torch.randn(10, 4, 16)
    expected = results(copy.deepcopy(gru), x)[1]
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(3):
            assert all(map(torch.equal, results(gru, x)[1], expected))


def test_learned_scales():
    cpu, gpu = pair(16, 40, learn_scales=True, **DEEP)
    gpu.precision = "fp32"
    assert any("log" in name for name, _ in gpu.named_parameters())
    check(cpu, gpu, torch.randn(12, 9, 16), torch.randn(4, 9, 40) * 0.5)


@pytest.mark.parametrize("config", ["w8a16", "int8"])
@pytest.mark.parametrize("bits", [4, 8])
def test_states_kept_in_fewer_bits(config, bits):
    cpu, gpu = pair(16, 40, config, num_layers=2, stash_bits=bits)
    gpu.precision = "fp32"
    check(cpu, gpu, torch.randn(12, 9, 16))


def test_checkpoints():
    from torch.utils.checkpoint import checkpoint

    _, gru = pair(16, 40, zoneout=0.2)
    x = torch.randn(12, 9, 16, device="cuda")
    found = []
    for again in (False, True):
        torch.manual_seed(5)
        y = checkpoint(gru, x, use_reentrant=False)[0] if again else gru(x)[0]
        found.append(torch.autograd.grad(y.square().sum(), list(gru.parameters())))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("precision", LIMITS)
def test_pieces_of_time(precision, monkeypatch):
    _, whole = pair(16, 128, **DEEP)
    parts = copy.deepcopy(whole)
    x, hx = torch.randn(40, 9, 16), torch.randn(4, 9, 128) * 0.5
    whole.precision = parts.precision = precision
    expected = results(whole, x, hx)[1]
    monkeypatch.setattr(time_chunks, "MOST_BYTES", 1 << 20)
    found = results(parts, x, hx)[1]
    for a, b in zip(found, expected, strict=True):
        # sums over time are split
        assert distance(a, b.cpu()) <= LIMITS["fp32"]
