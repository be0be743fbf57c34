"""Weights followed in place: every number equal to the definition's, launches and layers valid."""

import os
import random
import threading
from dataclasses import replace

import derived
import pytest
import torch
from host_machine import COMPILER, Host, folder_of
from live_cases import REACH, live_and_fresh, random_qparams, random_weights, same_part
from random_plans import random_mean

from kept import kept
from quant_gru import QuantConfig, QuantGRU
from quant_gru.integer import cell as reference
from quant_gru.integer.plan import build_weights
from quant_gru.integer.qparams import make_qparams
from quant_gru.integer.quantizer import Quantizer
from quant_gru.kernels import _native
from quant_gru.kernels.cpu import executor as cpu
from quant_gru.kernels.cuda.machine import machine_of
from quant_gru.kernels.cuda.plan.structure import form_of
from quant_gru.kernels.live_weights import LiveWeights, live_of, settled, tensors_of
from sweeps import first_of

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
VARIANTS = [each for each in cpu.choices() if each != cpu.REFERENCE]
# scales of weights per channel or any, first seed, end
BLOCKS = [(True, 0, 10), (False, 0, 5), (True, 10, 90), (True, 90, 150), (False, 5, 40)]
DTYPES = (*(torch.float32,) * 4, torch.float16, torch.bfloat16, torch.float64)


def steps(seed, *, fast=True, narrow=True, most=40, count=3, device="cpu"):
    """Quantizers, and some weights, masks and probabilities."""
    rng = random.Random(seed)
    qparams = random_qparams(rng, fast=fast, narrow=narrow)
    H, C = rng.choice((1, 2, 3, 5, 8, 16, 17, 31, 33)), rng.randint(1, most)
    qparams = replace(qparams, input_mean=random_mean(random.Random(f"{seed} mean"), C))
    dtype = rng.choice(DTYPES)
    found = []
    for _ in range(count):
        weights = random_weights(rng, H, C, dtype, finite=rng.random() < 0.7)
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        p = rng.choice((0.1, 0.3, 0.5))
        dropped = torch.rand((3 * H, H), generator=generator) < p
        moved = tuple(None if w is None else w.to(device) for w in weights)
        found.append((moved, dropped.to(device) if rng.random() < 0.4 else None, p))
    return qparams, found


@pytest.mark.usefixtures("cheap_threads")
@pytest.mark.parametrize(("fast", "first", "end"), first_of(BLOCKS, 2))
def test_equal_to_the_definition_on_the_cpu(monkeypatch, fast, first, end):
    before = _native.threads_started()
    for seed in range(first, end):
        torch.set_num_threads(1 + seed % 2)
        qparams, updates = steps(seed, fast=fast, narrow=fast)
        _, plan, fresh = live_and_fresh(qparams, updates[0][0])
        expected = [fresh(weights, dropped, p).weights for weights, dropped, p in updates]
        for variant in VARIANTS:
            monkeypatch.setenv(cpu.VARIABLE, variant)
            live = LiveWeights(qparams, plan.frozen, *updates[0][0][:2])
            for epoch, (weights, dropped, p) in enumerate(updates):
                live.update(*weights, dropped, p)
                assert live.epoch == epoch + 1
                wrong = same_part(live.part, expected[epoch])
                assert not wrong, f"seed {seed}, update {epoch}, {variant}: {wrong}"
    assert _native.threads_started() > before or not fast


def test_weights_that_are_the_same_byte_by_byte_are_not_written_again():
    qparams, updates = steps(3, fast=True, narrow=True)
    weights = updates[0][0]
    live, _, fresh = live_and_fresh(qparams, weights)
    for _ in range(3):
        live.update(*(None if w is None else w.clone() for w in weights))
        assert live.epoch == 1
    R = weights[1]
    R.view(-1)[-1] += 1
    live.update(*weights)
    assert live.epoch == 2
    dropped = torch.rand(R.shape) < 0.5
    for turn in range(2):
        live.update(*weights, dropped, 0.5)
        assert live.epoch == 3 + turn
    # as the definition has it: in float64, which the writer does not take
    live.update(*(None if w is None else w.double() * 2 for w in weights))
    for _ in range(2):
        live.update(*weights)
        assert live.epoch == 6
        assert not same_part(live.part, fresh(weights, None, 0.0).weights)


@pytest.mark.parametrize("bits", range(1, 17))
def test_every_width_and_long_rows(bits):
    generator = torch.Generator().manual_seed(bits)
    for C in (1, 15, 16, 17, 300, 2000):
        qparams, _ = steps(bits)
        config = qparams.config
        for name in ("weight.W", "weight.R", "weight.bw", "weight.br"):
            config = config.replace(name, bitwidth=bits)
        mean = random_mean(random.Random(C), C)
        qparams = replace(qparams, config=config, input_mean=mean)
        W = torch.randn((6, C), generator=generator)
        weights = (W, torch.randn((6, 2), generator=generator), None, W[:, 0].clone())
        live, _, fresh = live_and_fresh(qparams, weights)
        live.update(*weights)
        assert not same_part(live.part, fresh(weights).weights)


def test_ties_are_decided_as_by_the_definition():
    """Errors that are equal, or nearly so, at two exponents."""
    qparams, _ = steps(1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        grid = torch.randint(-9, 10, (24, 48), generator=generator) / 8.0
        nearly = grid * (1 + torch.randint(-2, 3, grid.shape, generator=generator) * 2.0**-23)
        clipped = torch.where(torch.rand((24, 48), generator=generator) < 0.02, 1.49, nearly)
        for W in (grid, nearly, clipped):
            weights = (W, W[:, :8].contiguous(), W[:, 0].clone(), None)
            live, _, fresh = live_and_fresh(qparams, weights)
            live.update(*weights)
            assert not same_part(live.part, fresh(weights).weights)


def test_packed_layers_follow():
    """The same native layer gives the codes of each weights in turn, whichever kernel they need."""
    kinds = {variant: set() for variant in VARIANTS}
    for seed in range(60):
        qparams, updates = steps(1000 + seed, fast=seed % 4 != 0, narrow=seed % 8 != 0)
        live, plan, fresh = live_and_fresh(qparams, updates[0][0])
        x, h0 = codes(plan, seed)
        for weights, dropped, p in updates:
            live.update(*weights, dropped, p)
            expected = reference.run(fresh(weights, dropped, p), x, h0, None, False)
            for variant in VARIANTS:
                got = cpu.run(plan, x, h0, None, False, variant)
                assert all(map(torch.equal, got, expected)), (seed, variant)
                kinds[variant].add(cpu.layer_of(plan, variant).kind)
    assert all(len(each) >= 3 for each in kinds.values())


def codes(plan, seed, device="cpu"):
    generator = torch.Generator().manual_seed(seed)

    def some(q, *shape):
        return torch.randint(q.lo, q.hi + 1, shape, generator=generator).to(q.container).to(device)

    return some(plan.x, 3, 2, plan.input_size), some(plan.h, 2, plan.hidden_size)


def test_a_layer_changes_its_kernel_and_back():
    """Biases so large that sums leave 32 bits, then small again."""
    config = QuantConfig.int8()
    qparams = calibrated(config, 5, 4)._state.scales[0][0]
    small = (torch.randn(12, 5), torch.randn(12, 4), torch.randn(12), torch.randn(12))
    tiny = (small[0] * 2.0**-40, small[1], torch.full((12,), 1e6), small[3])
    live, plan, fresh = live_and_fresh(qparams, small)
    x, h0 = codes(plan, 0)
    kinds = []
    for weights in (small, tiny, small, tiny, small):
        live.update(*weights)
        got = cpu.run(plan, x, h0, None, False, VARIANTS[-1])
        expected = reference.run(fresh(weights), x, h0, None, False)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        kinds.append(cpu.layer_of(plan, VARIANTS[-1]).kind)
    assert kinds[0] == kinds[2] == kinds[4]


def test_what_is_dropped():
    """Codes become 0, scales grow by 1 / (1 - p), Br and M follow them."""
    qparams = calibrated(QuantConfig.int8(), 5, 4)._state.scales[0][0]
    weights = (torch.randn(12, 5), torch.randn(12, 4), torch.randn(12), torch.randn(12))
    dropped = torch.rand(12, 4) < 0.4
    _, _, fresh = live_and_fresh(qparams, weights)
    plain, part = fresh(weights).weights, fresh(weights, dropped, 0.25).weights
    rows = torch.cat((dropped[4:8], dropped[:4], dropped[8:]))
    assert torch.equal(part.R, plain.R.masked_fill(rows, 0))
    keep = torch.full((12,), 0.75)
    assert torch.equal(part.scales["weight.R"], plain.scales["weight.R"] / keep)
    assert torch.equal(part.W, plain.W)
    ratio = part.Br.double() / plain.Br
    assert torch.allclose(ratio, torch.full_like(ratio, 0.75), rtol=1e-2)


# --- CUDA kernels


def check_derived(plan, fresh, sizes, machine):
    found, expected = derived.ours(plan, machine, sizes), derived.expected(fresh, sizes)
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(found[name], each), name


def check_on_gpu(seeds, machine=None, device="cpu", **options):
    reader = machine or machine_of(torch.device(device))
    for seed in seeds:
        qparams, updates = steps(seed, device=device, **options)
        live, plan, fresh = live_and_fresh(qparams, updates[0][0], machine)
        units = -(-plan.hidden_size // 16) * 16
        sizes = [(64 * i, units * j) for i, j in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2))]
        for i, (weights, dropped, p) in enumerate(updates):
            live.update(*weights, dropped, p)
            wanted = fresh(weights, dropped, p)
            wrong = same_part(live.part, wanted.weights)
            assert not wrong, f"seed {seed}, update {i}: {wrong}"
            # one more at each update: those of before are rewritten
            check_derived(plan, wanted, sizes[: 2 + 2 * i], reader)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_equal_to_the_definition_in_cuda_kernels_on_the_host(tmp_path_factory):
    check_on_gpu(range(6), Host(folder_of(tmp_path_factory)), most=20)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_whether_int32_holds_sums_of_16_bits_follows_the_weights(tmp_path_factory):
    reach = {name: 1 if name == "output.h" else 4 for name in REACH}
    quantizers = {name: Quantizer(16, True, most * 2.0**-15) for name, most in reach.items()}
    qparams = make_qparams(QuantConfig.w8a16(), quantizers)
    weights = [torch.randn(48, 5), torch.randn(48, 16), torch.randn(48), torch.randn(48)]
    host = Host(folder_of(tmp_path_factory))
    live, plan, fresh = live_and_fresh(qparams, weights, host)
    assert form_of(plan).in_int32
    for size in (1, 1e-7, 1):
        now = [weights[0] * size, weights[1] * size, *weights[2:]]
        live.update(*now, None, 0.0)
        check_derived(plan, fresh(now), [(64, 16)], host)
        assert derived.exact_of(plan, host) == [[size == 1] * 2] * 2


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(("zero_point", "held"), [(3, 0), (0, 1)])
def test_whether_float_holds_what_becomes_bytes_follows_the_weights(
    tmp_path_factory, zero_point, held
):
    """What is added before rounding is large beside products of small weights, unless it is 0."""
    quantizers = {name: Quantizer(8, True, 2.0**-6) for name in REACH}
    quantizers["matmul.Wx"] = Quantizer(8, True, 8.0, zero_point)
    qparams = make_qparams(QuantConfig.int8(), quantizers)
    weights = [torch.randn(48, 5), torch.randn(48, 16), torch.zeros(48), torch.zeros(48)]
    host = Host(folder_of(tmp_path_factory))
    live, plan, fresh = live_and_fresh(qparams, weights, host)
    for size in (1, 2.0**-12, 1):
        now = [weights[0] * size, *weights[1:]]
        live.update(*now, None, 0.0)
        check_derived(plan, fresh(now), [(64, 16)], host)
        assert derived.exact_of(plan, host)[0] == [1, 1 if size == 1 else held]


@GPU
@pytest.mark.parametrize("fast", [True, False], ids=["channel", "any"])
def test_equal_to_the_definition_on_a_gpu(fast):
    check_on_gpu(range(150 if fast else 30), device="cuda", fast=fast, most=90)


@GPU
def test_the_cpu_and_a_gpu_choose_the_same():
    for seed in range(60):
        qparams, updates = steps(seed, most=300)
        for weights, dropped, p in updates:
            parts = []
            for device in ("cpu", "cuda"):
                moved = [None if w is None else w.to(device) for w in (*weights, dropped)]
                live, _, _ = live_and_fresh(qparams, tuple(moved[:4]))
                live.update(*moved, p)
                parts.append(live.part)
            pairs = zip(*map(tensors_of, parts), strict=True)
            assert all(torch.equal(a, b.cpu()) for a, b in pairs), seed


# --- modules


@kept
def calibrated(config, C, H, device="cpu", **options):
    torch.manual_seed(0)
    gru = QuantGRU(C, H, config=config, **options).to(device)
    gru.calibrate(torch.randn(20, 4, C, device=device))
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru


DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


def expected_output(gru, x):
    """What a fresh copy in eval mode gives."""
    fresh = QuantGRU(
        gru.input_size,
        gru.hidden_size,
        gru.num_layers,
        bidirectional=gru.bidirectional,
        config=gru.config,
    ).to(x.device)
    fresh.load_state_dict(gru.state_dict())
    fresh.use_quantization = True
    with torch.no_grad():
        return fresh.eval()(x)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grad", [True, False])
def test_training_steps_follow_the_weights(device, grad):
    gru = calibrated(QuantConfig.int8(), 5, 16, device, num_layers=2, bidirectional=True).train()
    x = torch.randn(4, 3, 5, device=device)
    plans = set()
    for _ in range(4):
        with torch.set_grad_enabled(grad):
            assert torch.equal(gru(x)[0], expected_output(gru, x))
        plans.add(id(gru._plan()))
        with torch.no_grad():
            for weight in gru.parameters():
                weight.mul_(1 + 0.3 * torch.randn((), device=device)).add_(0.01)
    assert len(plans) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_changes_that_raise_no_version_are_seen(device):
    gru = calibrated(QuantConfig.int8(), 5, 8, device).train()
    x = torch.randn(4, 3, 5, device=device)
    before = gru(x)[0].detach()
    gru.weight_hh_l0.data.mul_(-1)
    after = gru(x)[0].detach()
    assert not torch.equal(before, after)
    assert torch.equal(after, expected_output(gru, x))


def test_nan_comes_and_goes():
    gru = calibrated(QuantConfig.int8(), 5, 8).train()
    x = torch.randn(4, 3, 5)
    with torch.no_grad():
        good = gru(x)[0]
        gru.bias_hh_l0[3] = torch.nan
        assert gru(x)[0].isnan().all()
        gru.bias_hh_l0[3] = 0
        assert not gru(x)[0].isnan().any()
    assert not good.isnan().any()


@pytest.mark.parametrize("device", DEVICES)
def test_streams_and_frozen_copies_keep_their_moment(device):
    gru = calibrated(QuantConfig.int8(), 5, 8, device).train()
    x = torch.randn(4, 3, 5, device=device)
    expected = expected_output(gru, x)
    stream, frozen = gru.stream(3), gru.freeze()
    with torch.no_grad():
        gru.weight_hh_l0.mul_(-2)
        gru(x)
    assert torch.equal(torch.stack([stream(step) for step in x]), expected)
    assert torch.equal(frozen(x)[0], expected)


def test_a_settled_plan_does_not_change():
    gru = calibrated(QuantConfig.int8(), 5, 8).train()
    plan = gru._plan()
    kept = settled(plan)
    assert live_of(plan.cells[0][0].weights) is not None
    assert live_of(kept.cells[0][0].weights) is None
    assert settled(kept).cells[0][0] is kept.cells[0][0]
    assert not same_part(kept.cells[0][0].weights, plan.cells[0][0].weights)
    with torch.no_grad():
        gru.weight_hh_l0.mul_(-2)
    assert gru._plan() is plan
    assert same_part(kept.cells[0][0].weights, plan.cells[0][0].weights)


@pytest.mark.parametrize("device", DEVICES)
def test_codes_are_dropped_in_a_live_plan_and_are_back_at_the_next(device):
    gru = calibrated(QuantConfig.int8(), 5, 8, device, bidirectional=True).train()
    qparams, weights = gru._state.scales, gru._weights()
    masks = [torch.rand((24, 8), device=device) < 0.3, None]
    for dropped in (masks, None, masks):
        plan = gru._state.plans.plan(qparams, weights, True, dropped, 0.3)
        for i, (cell, q, w) in enumerate(zip(plan.cells[0], qparams[0], weights[0], strict=True)):
            wanted = build_weights(q, *w, None if dropped is None else dropped[i], 0.3)
            assert not same_part(cell.weights, wanted)


def test_numbers_of_earlier_weights_come_back():
    """What a backward does whose weights are no longer the latest."""
    gru = calibrated(QuantConfig.int8(), 5, 8).train()
    weights = [w.detach().clone() for w in gru._weights()[0][0]]
    part = gru._plan().cells[0][0].weights
    live, kept = live_of(part), settled(gru._plan()).cells[0][0].weights
    epoch = live.epoch
    with torch.no_grad():
        gru.weight_hh_l0.mul_(-2)
    gru._plan()
    assert live.epoch == epoch + 1
    assert same_part(part, kept)
    live.update(*weights)
    assert not same_part(part, kept)


def test_changed_scales_and_modes_make_a_new_plan():
    gru = calibrated(QuantConfig.int8(), 5, 8).train()
    x = torch.randn(4, 3, 5)
    first = gru._plan()
    gru.adjust_quant_config("output.h", bitwidth=6)
    assert gru._plan() is not first
    assert torch.equal(gru(x)[0], expected_output(gru, x))
    second = gru._plan()
    gru.eval()
    with torch.no_grad():
        assert torch.equal(gru(x)[0], expected_output(gru, x))
    gru.train()
    assert gru._plan() is not second


def test_inference_mode_and_back():
    gru = calibrated(QuantConfig.int8().replace("weight.R", granularity="gate"), 5, 8).train()
    x = torch.randn(4, 3, 5)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert torch.equal(gru(x)[0], expected_output(gru, x))
        with torch.no_grad():
            gru.weight_hh_l0.mul_(1.3)


def test_threads_do_not_share_numbers():
    """Modules of other weights that share their state, as replicas do, called at the same time."""
    gru = calibrated(QuantConfig.int8(), 5, 24).train()
    x = torch.randn(6, 3, 5)
    others = []
    for factor in (1.0, -0.5, 2.0):
        replica = gru._replicate_for_data_parallel()
        replica._parameters = {
            name: torch.nn.Parameter(w.detach() * factor) for name, w in gru._parameters.items()
        }
        for name in replica._parameters:
            replica.__dict__.pop(name, None)
        assert replica._state is gru._state
        others.append(replica)
    with torch.no_grad():
        expected = [replica(x)[0] for replica in others]
    assert not torch.equal(expected[0], expected[1])
    wrong = []
    barrier = threading.Barrier(len(others))

    def work(replica, wanted):
        barrier.wait()
        for _ in range(60):
            with torch.no_grad():
                if not torch.equal(replica(x)[0], wanted):
                    wrong.append(replica)

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(others, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_goes_on_by_itself():
    gru = calibrated(QuantConfig.int8(), 5, 8).train()
    x = torch.randn(4, 3, 5)
    with torch.no_grad():
        before = gru(x)[0]
        child = os.fork()
        if child == 0:
            gru.weight_hh_l0.mul_(-2)
            os._exit(0 if not torch.equal(gru(x)[0], before) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(gru(x)[0], before)


# --- a GPU's queue


@GPU
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_forward_waits_for_nothing():
    gru = calibrated(QuantConfig.int8(), 16, 64, "cuda", num_layers=2).train()
    x = torch.randn(8, 4, 16, device="cuda")
    with torch.no_grad():
        gru(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                gru(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@GPU
@pytest.mark.parametrize("steps", [8, 40], ids=["few rows", "many rows"])
def test_a_captured_graph_follows_the_weights(steps):
    gru = calibrated(QuantConfig.int8(), 16, 64, "cuda", num_layers=2).train()
    x = torch.randn(steps, 4, 16, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad():
        with torch.cuda.stream(side):
            for _ in range(2):
                gru(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _ = gru(x)
        for round in range(4):
            for weight in gru.parameters():
                weight.mul_(1.2).add_(0.02 * torch.randn_like(weight))
            graph.replay()
            assert torch.equal(y, expected_output(gru, x)), round
            # what the graph writes outlives a change of mode
            gru.eval()
            torch.empty(1 << 20, device="cuda").fill_(1)
            gru.train()
            assert torch.equal(gru(x)[0], expected_output(gru, x))
            graph.replay()
            assert torch.equal(y, expected_output(gru, x)), round


@GPU
def test_streams_wait_for_each_other():
    gru = calibrated(QuantConfig.int8(), 64, 128, "cuda").train()
    x = torch.randn(100, 32, 64, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    with torch.no_grad():
        outputs = []
        for i in range(12):
            stream = streams[i % 3]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                gru.weight_hh_l0.data.mul_(-1.01)
                outputs.append(gru(x)[0])
            torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        for weight in range(11, -1, -1):
            assert torch.equal(outputs[weight], expected_output(gru, x))
            gru.weight_hh_l0.data.div_(-1.01)
            if weight % 4 == 0:
                break
