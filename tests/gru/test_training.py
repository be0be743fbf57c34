"""Training loops as people write them: what a step of the quantized mode has to get along with."""

import pytest
import torch
from gru_helpers import C, H, quantized, same, seeded, states
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from quant_gru.integer import cell as reference
from quant_gru.integer.backward import Tape, straight_through
from quant_gru.kernels import _native
from quant_gru.kernels.dispatch import CPU
from sweeps import first_of
from two_processes import NEEDS_GLOO, joined, run_two

DEEP = {"num_layers": 2, "bidirectional": True}


class Model(nn.Module):
    """Layers on both sides, and a second GRU, so that gradients have to go through."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(2)
        self.before, self.after = nn.Linear(C, C), nn.Linear(H, 3)
        self.gru = quantized(**options)
        self.upper = quantized(input_size=2 * H if options else H)

    def forward(self, x):
        return self.after(self.upper(self.gru(self.before(x))[0])[0])


def loss_of(model, x):
    return model(x).square().mean()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def close(found, expected, tolerance=1e-5):
    for name, grad in expected.items():
        assert (found[name] - grad).norm() <= tolerance * grad.norm().clamp(min=1e-12), name


def fresh_output(gru, x):
    """What a module that never saw other weights computes."""
    other = quantized()
    other.load_state_dict(gru.state_dict())
    with torch.no_grad():
        return other.eval()(x)[0]


class TestAccumulation:
    def test_parts_of_a_batch_add_up(self):
        model, x = Model().train(), seeded(5, 6, C)
        loss_of(model, x).backward()
        whole = gradients(model)
        model.zero_grad()
        for part in x.chunk(3, dim=1):
            (loss_of(model, part) / 3).backward()
        close(gradients(model), whole)

    def test_zeros_instead_of_none(self):
        gru, x = quantized().train(), seeded(5, 3, C)
        gru(x)[0].sum().backward()
        first = gradients(gru)
        gru.zero_grad(set_to_none=False)
        gru(x)[0].sum().backward()
        for name, grad in gradients(gru).items():
            same(grad, first[name])

    def test_two_losses_of_one_forward(self):
        gru, x = quantized(**DEEP).train(), seeded(5, 3, C)
        y, h_n = gru(x)
        (y.square().mean() + h_n.sum()).backward()
        whole = gradients(gru)
        gru.zero_grad()
        y, h_n = gru(x)
        y.square().mean().backward(retain_graph=True)
        h_n.sum().backward()
        close(gradients(gru), whole)


class TestChunks:
    @pytest.mark.parametrize("config", ["pot8", "pot8-fused", "w8a16-fused"])
    @pytest.mark.parametrize("chunk", [1, 4])
    def test_a_sequence_in_calls_that_hand_on_the_state(self, config, chunk):
        gru, x, hx = quantized(config).train(), seeded(9, 3, C), states(quantized(config), 3)
        found = []
        for size in (9, chunk):
            gru.zero_grad()
            real, h = x.clone().requires_grad_(), hx.clone().requires_grad_()
            outputs, state = [], h
            for part in real.split(size):
                y, state = gru(part, state)
                outputs.append(y)
            y = torch.cat(outputs)
            (y * seeded(*y.shape, seed=4)).sum().backward()
            found.append({"y": y.detach(), "x": real.grad, "hx": h.grad, **gradients(gru)})
        same(found[1]["y"], found[0]["y"])
        close(found[1], found[0])

    @pytest.mark.parametrize("steps", first_of([15, 16, 17, 300], 3))
    def test_long_sequences_are_differentiated_in_chunks(self, steps):
        """Against the definition in float64, around and far beyond what backward takes at once."""
        gru = quantized()
        gru.train()
        x, weight = seeded(steps, 2, C), seeded(steps, 2, H, seed=4) / steps
        (gru(x)[0] * weight).sum().backward()
        plan = gru.eval()._plan().cells[0][0]
        codes, h0 = plan.x.quantize(x), plan.h.quantize(torch.zeros(2, H))
        out, _ = reference.run(plan, codes, h0)
        exact = straight_through(Tape(plan, codes, h0, out), weight, torch.zeros(2, H))
        expected = {"weight_ih_l0": exact.W, "weight_hh_l0": exact.R}
        expected |= {"bias_ih_l0": exact.bw, "bias_hh_l0": exact.br}
        found = {name: grad.double() for name, grad in gradients(gru).items()}
        close(found, expected)


class TestCheckpoint:
    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
    @pytest.mark.parametrize("dropout", [0.0, 0.5])
    def test_gradients_are_the_same(self, reentrant, dropout):
        gru = quantized(**DEEP, dropout=dropout).train()
        x, hx = (t.requires_grad_() for t in (seeded(5, 3, C), states(gru, 3)))
        results = []
        for run in (gru, lambda *args: checkpoint(gru, *args, use_reentrant=reentrant)):
            gru.zero_grad()
            x.grad = hx.grad = None
            torch.manual_seed(4)
            y, h_n = run(x, hx)
            (y.square().sum() + h_n.sum()).backward()
            results.append([y.detach(), x.grad, hx.grad, *gradients(gru).values()])
        same(results[1], results[0])

    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
    def test_inside_a_model(self, reentrant):
        model, x = Model().train(), seeded(5, 3, C).requires_grad_()
        loss_of(model, x).backward()
        expected = gradients(model)
        model.zero_grad()
        y = checkpoint(model.gru, model.before(x), use_reentrant=reentrant)[0]
        y = checkpoint(lambda y: model.upper(y)[0], y, use_reentrant=reentrant)
        model.after(y).square().mean().backward()
        same(gradients(model), expected)


class TestModes:
    def test_evaluation_between_steps_is_of_the_weights_of_that_moment(self):
        gru, x = quantized(), seeded(5, 3, C)
        optimizer = torch.optim.SGD(gru.parameters(), lr=0.5)
        seen = []
        for _ in range(3):
            gru.train()
            optimizer.zero_grad()
            gru(x)[0].square().mean().backward()
            optimizer.step()
            gru.eval()
            with torch.no_grad():
                seen.append(gru(x)[0])
            same(seen[-1], fresh_output(gru, x))
        assert not torch.equal(seen[0], seen[1])
        assert not torch.equal(seen[1], seen[2])

    @pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}], ids=str)
    @pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
    def test_no_step_is_overlooked_in_eval_mode(self, optimizer, options):
        gru, x = quantized(), seeded(5, 3, C)
        step = optimizer(gru.parameters(), lr=0.2, **options)
        for _ in range(2):
            with torch.no_grad():
                before = gru(x)[0]
            step.zero_grad()
            gru(x)[0].square().mean().backward()
            step.step()
            gru.eval()  # fused optimizers leave no trace in a tensor's version
            with torch.no_grad():
                same(gru(x)[0], fresh_output(gru, x))
                assert not torch.equal(gru(x)[0], before)

    def test_training_and_evaluation_have_one_forward(self):
        model, x = Model(), seeded(5, 3, C)
        with torch.no_grad():
            expected = model.eval()(x)
            same(model.train()(x), expected)
        same(model(x).detach(), expected)

    def test_float_and_quantized_steps_take_turns(self):
        gru, x = quantized().train(), seeded(5, 3, C)
        plain = nn.GRU(C, H)
        plain.load_state_dict(
            {name: p.detach().clone() for name, p in gru.named_parameters()}, strict=True
        )
        gru(x)[0].sum().backward()
        gru.zero_grad()
        gru.use_quantization = False
        for module in (gru, plain):
            module(x)[0].sum().backward()
        same(gradients(gru), gradients(plain))


class TestFrozenParts:
    def test_only_the_head_learns(self):
        model, x = Model().train(), seeded(5, 3, C)
        loss_of(model, x).backward()
        expected = model.after.weight.grad.clone()
        model.zero_grad()
        model.gru.requires_grad_(False)
        model.upper.requires_grad_(False)
        loss_of(model, x).backward()
        same(model.after.weight.grad, expected)
        assert model.before.weight.grad.abs().sum() > 0
        assert all(p.grad is None for gru in (model.gru, model.upper) for p in gru.parameters())

    @pytest.mark.parametrize("wants", ["top", "middle", "input", "state"])
    def test_nothing_is_computed_for_layers_below_the_last_that_learns(self, monkeypatch, wants):
        gru = quantized(num_layers=3, bidirectional=True).train()
        x, hx = seeded(5, 3, C), states(gru, 3)
        everything = gru(x, hx)[0].square().sum()
        expected = dict(
            zip(
                dict(gru.named_parameters()),
                torch.autograd.grad(everything, list(gru.parameters())),
                strict=True,
            )
        )
        top = "l2" if wants == "top" else "l1"
        for name, parameter in gru.named_parameters():
            parameter.requires_grad_(top in name if wants in ("top", "middle") else False)
        calls, general = [], CPU.backward_layer

        def counted(self, tapes, *rest):
            calls.append(len(tapes))
            return general(self, tapes, *rest)

        monkeypatch.setattr(_native.CPUBackward, "run", lambda *_: None)
        monkeypatch.setattr(CPU, "backward_layer", counted)
        x.requires_grad_(wants == "input")
        hx.requires_grad_(wants == "state")
        gru(x, hx)[0].square().sum().backward()
        assert len(calls) == {"top": 1, "middle": 2}.get(wants, 3)
        for name, parameter in gru.named_parameters():
            if parameter.requires_grad:
                same(parameter.grad, expected[name])
        assert (x.grad is not None) == (wants == "input")
        assert (hx.grad is not None) == (wants == "state")

    def test_thawed_weights_learn(self):
        gru, x = quantized(), seeded(5, 3, C)
        gru.requires_grad_(False)
        gru.train()(x)
        gru.requires_grad_(True)
        gru(x)[0].sum().backward()
        found = gradients(gru)
        other = quantized().train()
        other(x)[0].sum().backward()
        same(found, gradients(other))


class TestAutocast:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_the_gru_itself_does_not_change(self, dtype):
        gru, x = quantized(**DEEP).train(), seeded(5, 3, C)
        y, _ = gru(x)
        y.square().sum().backward()
        expected = gradients(gru)
        gru.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            found, _ = gru(x)
        assert found.dtype == torch.float32
        same(found, y)
        found.square().sum().backward()
        same(gradients(gru), expected)

    def test_layers_around_it_in_bfloat16(self):
        model, x = Model().train(), seeded(5, 3, C)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
            assert y.dtype == torch.bfloat16
            loss = y.float().square().mean()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.dtype == torch.float32, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().sum() > 0, name

    def test_scaled_gradients(self):
        gru, x = quantized().train(), seeded(5, 3, C)
        gru(x)[0].square().mean().backward()
        expected = gradients(gru)
        gru.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(gru.parameters(), lr=0.5)
        scaler.scale(gru(x)[0].square().mean()).backward()
        scaler.unscale_(optimizer)
        close(gradients(gru), expected, tolerance=1e-6)
        before = gru.weight_hh_l0.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(gru.weight_hh_l0, before)

    def test_a_step_with_infinite_gradients_is_left_out(self):
        gru, x = quantized().train(), seeded(5, 3, C)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(gru.parameters(), lr=0.5)
        before = [p.detach().clone() for p in gru.parameters()]
        scaler.scale(gru(x)[0].sum() * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        same([p.detach() for p in gru.parameters()], before)
        assert scaler.get_scale() == 2.0**9


class TestOptimizers:
    def test_steps_within_backward(self):
        """Weights that change as soon as their gradient is there: forward's weights count."""
        model, twin, x = Model().train(), Model().train(), seeded(5, 3, C)

        def step_at_once(parameter):
            step = steps[parameter]
            step.step()
            step.zero_grad()

        steps = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step_at_once)
        whole = torch.optim.SGD(twin.parameters(), lr=0.1)
        for _ in range(2):
            loss_of(model, x).backward()
            loss_of(twin, x).backward()
            whole.step()
            whole.zero_grad()
        same(model.state_dict(), twin.state_dict())

    def test_averaged_weights(self):
        gru, x = quantized(), seeded(5, 3, C)
        average = torch.optim.swa_utils.AveragedModel(gru)
        with torch.no_grad():
            average(x)
            for parameter in gru.parameters():
                parameter.add_(0.1)
            average.update_parameters(gru)
            for parameter in gru.parameters():
                parameter.mul_(0.5)
            average.update_parameters(gru)
            average.eval()
            same(average(x)[0], fresh_output(average.module, x))

    def test_clipped_gradients(self):
        gru, x = quantized().train(), seeded(5, 3, C)
        gru(x)[0].sum().backward()
        before = gradients(gru)
        norm = nn.utils.clip_grad_norm_(gru.parameters(), 0.01)
        assert norm > 0.01
        found = torch.cat([grad.flatten() for grad in gradients(gru).values()]).norm()
        assert abs(found - 0.01) < 1e-6
        close({k: v * norm / 0.01 for k, v in gradients(gru).items()}, before, tolerance=1e-4)


# --- several processes


def sharded_steps(model, x, full=lambda t: t):
    """Two steps, and the weights after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
    return {name: full(p.detach()).clone() for name, p in model.named_parameters()}


def worker(rank, folder, kind):
    with joined(rank, folder):
        model, x = Model(**DEEP).train(), seeded(5, 6, C).chunk(2, dim=1)[rank]
        if kind == "ddp":
            steps = sharded_steps(DistributedDataParallel(model, gradient_as_bucket_view=True), x)
            steps = {name.removeprefix("module."): p for name, p in steps.items()}
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (2,))
            for part in (model.gru, model.upper):
                fully_shard(part, mesh=mesh)
            fully_shard(model, mesh=mesh)
            steps = sharded_steps(model, x, full=lambda p: p.full_tensor())
        torch.save(steps, f"{folder}/{rank}.pt")


@pytest.mark.slow
@NEEDS_GLOO
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_as_one(kind, tmp_path):
    run_two(worker, tmp_path, kind)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    same(first, second)
    model = Model(**DEEP).train()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = sharded_steps(model, seeded(5, 6, C))
    for name, weight in expected.items():
        moved = weight - start[name]
        assert (first[name] - weight).norm() <= 1e-5 * moved.norm().clamp(min=1e-9), name
        assert moved.norm() > 0, name
