"""The operators of torch.library: compiled, exported and transformed GRUs equal the eager one."""

import copy
import gc
import io
import shutil
import weakref

import pytest
import torch
from gru_helpers import C, H, packed, quantized, same, seeded, states, unpacked
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence

import quant_gru.torch_ops.operators as library
import quant_gru.torch_ops.plan_sources as sources
from quant_gru import CalibrationError, QuantConfig, QuantGRU, QuantGRUError
from quant_gru.execution.noise import Noise
from sweeps import first_of

FORWARD = torch.ops.quant_gru.forward.default
BACKWARD = torch.ops.quant_gru.backward.default
DEEP = {"num_layers": 2, "bidirectional": True}

# torch's own: dynamo and inductor load modules that use torch.jit, torch.export.load reads bytes
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]


@pytest.fixture(autouse=True)
def _fresh():
    # dynamo leaves every nn.GRU out of its graphs unless told otherwise
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


def compiled(module, backend="aot_eager"):
    return torch.compile(module, fullgraph=True, backend=backend)


def arguments(gru, x, *, lengths=None, needs_grad=False, dropout=0.0, kept=None):
    weights = [w.detach().clone().requires_grad_(needs_grad) for w in gru.parameters()]
    seed = torch.tensor(5) if dropout else None
    return (
        x.clone().requires_grad_(needs_grad),
        states(gru, x.shape[1]).requires_grad_(needs_grad),
        lengths,
        weights,
        gru._state.text,
        seed,
        None,
        dropout,
        0.0,
        0.0,
        gru.bidirectional,
        needs_grad,
        "fp32",
        ",".join(["int8"] * gru.num_layers * (1 + gru.bidirectional)) if kept is None else kept,
    )


def gradients(run, gru, x, hx):
    """Outputs, and the gradients of one loss of both for inputs and parameters."""
    x, hx = x.clone().requires_grad_(), hx.clone().requires_grad_()
    gru.zero_grad()
    y, h_n = run(x, hx)
    (y.square().sum() + (3 * h_n).sum()).backward()
    return [y.detach(), h_n.detach(), x.grad, hx.grad, *(p.grad for p in gru.parameters())]


class TestOpcheck:
    @pytest.mark.parametrize("needs_grad", [False, True], ids=["inference", "training"])
    @pytest.mark.parametrize("options", first_of([DEEP, {}, {"bias": False}], 1))
    def test_forward(self, options, needs_grad):
        gru = quantized(**options)
        torch.library.opcheck(FORWARD, arguments(gru, seeded(5, 3, C), needs_grad=needs_grad))

    @pytest.mark.slow
    def test_forward_with_lengths_and_dropout(self):
        lengths = torch.tensor([5, 4, 2])
        args = arguments(
            quantized(**DEEP), seeded(5, 3, C), lengths=lengths, needs_grad=True, dropout=0.5
        )
        torch.library.opcheck(FORWARD, args)

    def test_forward_frozen(self):
        frozen = quantized(**DEEP).freeze()
        x, h0 = seeded(5, 3, C), torch.zeros(4, 3, H)
        numbers = (None, None, 0.0, 0.0, 0.0, True, False, "fp32", "")
        args = (x, h0, None, frozen._integers(), frozen.plan, *numbers)
        torch.library.opcheck(FORWARD, args)

    @pytest.mark.parametrize("options", first_of([{}, DEEP], 1))
    def test_backward(self, options):
        gru = quantized(**options)
        args = arguments(gru, seeded(5, 3, C))
        y, h_n, out = FORWARD(*args)
        grads = (torch.rand_like(y), torch.rand_like(h_n), 0 * h_n[..., 0], out)
        needs = [True] * (1 + len(args[3]))
        torch.library.opcheck(BACKWARD, (*grads, *args[:-1], needs))


class TestCompile:
    @pytest.mark.parametrize(
        "options",
        first_of(
            [{**DEEP, "bias": False}, {"batch_first": True}, {}, {"config": "w8a16-fused"}], 2
        ),
    )
    def test_inference(self, options):
        gru = quantized(**options)
        run = compiled(gru)
        x = seeded(4, 4, C)
        with torch.no_grad():
            same(run(x), gru(x))
            same(run(x, states(gru, 4)), gru(x, states(gru, 4)))

    @pytest.mark.slow
    def test_unbatched(self):
        gru = quantized(**DEEP)
        x, hx = seeded(6, C), states(gru, 1)[:, 0]
        same(compiled(gru)(x, hx), gru(x, hx))

    def test_lengths_and_batches_change_without_many_compilations(self):
        gru = quantized()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        run = compiled(gru, counter)
        with torch.no_grad():
            for T, N in ((5, 2), (6, 3), (9, 4), (2, 7), (30, 5)):
                same(run(seeded(T, N, C)), gru(seeded(T, N, C)))
        assert counter.frame_count <= 2

    def test_marked_dynamic(self):
        gru = quantized()
        x = seeded(5, 3, C)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
        same(compiled(gru)(x), gru(x))

    @pytest.mark.parametrize("options", [{}, DEEP], ids=["plain", "deep"])
    def test_training_step(self, options):
        gru = quantized(**options).train()
        x, hx = seeded(5, 3, C), states(gru, 3)
        same(gradients(compiled(gru), gru, x, hx), gradients(gru, gru, x, hx))

    @pytest.mark.slow
    def test_float64(self):
        gru = quantized().double()
        x, hx = seeded(5, 3, C).double(), states(gru, 3).double()
        same(gradients(compiled(gru), gru, x, hx), gradients(gru, gru, x, hx))

    @pytest.mark.slow
    def test_nan(self):
        gru = quantized(**DEEP)
        x, hx = seeded(5, 3, C), states(gru, 3)
        x[2, 1, 0] = hx[0, 2, 0] = torch.nan
        found = gradients(compiled(gru), gru, x, hx)
        assert found[0].isnan().any()
        same(found, gradients(gru, gru, x, hx))

    def test_inside_a_model(self):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.before = nn.Linear(C, C)
                self.gru = quantized()
                self.after = nn.Linear(H, 2)

            def forward(self, x, hx=None):
                y, h_n = self.gru(self.before(x), hx)
                return self.after(y), h_n

        model = Model().train()
        x, hx = seeded(5, 3, C), states(model.gru, 3)
        same(gradients(compiled(model), model, x, hx), gradients(model, model, x, hx))

    @pytest.mark.slow
    def test_inductor(self):
        if shutil.which("g++") is None:
            pytest.skip("inductor needs a C++ compiler")
        gru = quantized(**DEEP).train()
        x, hx = seeded(5, 3, C), states(gru, 3)
        run = compiled(gru, "inductor")
        same(gradients(run, gru, x, hx), gradients(gru, gru, x, hx))

    def test_graph_breaks_of_dynamo_change_nothing(self):
        gru = quantized()
        x = seeded(5, 3, C)
        with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=False):
            same(torch.compile(gru, backend="aot_eager")(x), gru(x))

    @pytest.mark.slow
    @pytest.mark.skipif(
        torch.torch_version.TorchVersion(torch.__version__) < (2, 13),
        reason="older Dynamos fail at packing instead of breaking the graph",
    )
    def test_packed(self):
        gru = quantized()
        sequence, _ = packed(3, 5, 2)
        with torch.no_grad():
            (y, h_n), (expected, expected_h) = (
                torch.compile(gru, backend="aot_eager")(sequence),
                gru(sequence),
            )
        same(unpacked(y), unpacked(expected))
        same(h_n, expected_h)

    def test_frozen(self):
        frozen = quantized(**DEEP).freeze()
        x, hx = seeded(5, 3, C), seeded(4, 3, H)
        run = compiled(frozen)
        same(run(x, hx), frozen(x, hx))
        same(run(x[:3]), frozen(x[:3]))

    @pytest.mark.slow
    def test_frozen_follows_what_is_loaded(self):
        first, second = quantized().freeze(), quantized("pot8-symmetric").freeze()
        x = seeded(5, 3, C)
        run = compiled(first)
        before = run(x)
        first.load_state_dict(second.state_dict())
        same(run(x), second(x))
        assert not torch.equal(run(x)[0], before[0])


class TestNothingIsStale:
    def test_weights_of_an_optimizer(self):
        gru, twin = quantized(), quantized()
        x = seeded(5, 3, C)
        run = compiled(gru)
        results = []
        for module, call in ((gru, run), (twin, twin)):
            optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
            for _ in range(3):
                module.train()
                optimizer.zero_grad()
                call(x)[0].square().sum().backward()
                optimizer.step()
                module.eval()
                with torch.no_grad():
                    results.append(call(x))
        same(results[:3], results[3:])
        assert not torch.equal(results[0][0], results[1][0])

    def test_weights_written_unseen_after_eval(self):
        gru = quantized()
        x = seeded(5, 3, C)
        run = compiled(gru)
        with torch.no_grad():
            before = run(x)
            gru.weight_ih_l0.data.mul_(2)
            gru.eval()
            same(run(x), gru(x))
            assert not torch.equal(run(x)[0], before[0])

    @pytest.mark.slow
    def test_calibrated_again(self):
        gru = quantized()
        x = seeded(5, 3, C)
        run = compiled(gru)
        with torch.no_grad():
            before = run(x)
            gru.reset_calibration()
            gru.set_all_bitwidth(6)
            gru.calibrate(seeded(9, 4, C, seed=8, scale=3))
            gru.finalize_calibration()
            same(run(x), gru(x))
            gru.adjust_quant_config("h", bitwidth=4)
            same(run(x), gru(x))
        assert not torch.equal(run(x)[0], before[0])

    def test_modes(self):
        gru = quantized(num_layers=2, dropout=0.5)
        x = seeded(5, 3, C)
        run = compiled(gru)
        with torch.no_grad():
            same(run(x), gru(x))
            gru.train()
            dropped = run(x)[0]
            assert not torch.equal(dropped, run(x)[0])
            gru.eval()
            same(run(x), gru(x))

    def test_two_modules_of_one_class_share_code_only(self):
        first, second = quantized(), quantized("pot8-symmetric")
        x = seeded(5, 3, C)
        with torch.no_grad():
            same(compiled(first)(x), first(x))
            same(compiled(second)(x), second(x))
            same(compiled(copy.deepcopy(first))(x), first(x))

    def test_plans_are_kept_while_nothing_changes_and_end_with_the_module(self, monkeypatch):
        gru = quantized()
        run = compiled(gru)
        made = []
        build = sources.params.from_document
        monkeypatch.setattr(
            sources.params, "from_document", lambda *args: made.append(1) or build(*args)
        )
        frozen = gru.freeze()
        made.clear()
        run_frozen = compiled(frozen)
        with torch.no_grad():
            for _ in range(3):
                run(seeded(5, 3, C))
                run_frozen(seeded(5, 3, C))
        assert len(made) == 1
        text = gru._state.text
        assert text in sources._sources
        kept = weakref.ref(sources._sources[text])
        del text, gru.__dict__["_state"]
        gc.collect()
        assert kept() is None


def test_dropout_of_backward_is_that_of_forward(monkeypatch):
    gru = quantized(num_layers=2, dropout=0.5).train()
    args = arguments(gru, seeded(5, 3, C), needs_grad=True, dropout=0.5)
    before = torch.get_rng_state()
    y, h_n, _ = FORWARD(*args)
    found = torch.autograd.grad(y.sum() + h_n.sum(), [args[0], args[1], *args[3]])
    assert torch.equal(before, torch.get_rng_state())
    real = [t.detach().requires_grad_() for t in (args[0], args[1], *args[3])]
    monkeypatch.setattr(
        "quant_gru.modules.training_options.draw", lambda *_, **__: Noise(torch.tensor(5), 0.5)
    )
    weights = dict(zip((name for name, _ in gru.named_parameters()), real[2:], strict=True))
    expected_y, expected_h = functional_call(gru, weights, (real[0], real[1]))
    same(y, expected_y)
    same(list(found), list(torch.autograd.grad(expected_y.sum() + expected_h.sum(), real)))


class TestExport:
    @pytest.mark.parametrize("strict", first_of([False, True], 1))
    @pytest.mark.parametrize("frozen", [False, True], ids=["quantized", "frozen"])
    def test_saved_program_needs_no_module(self, frozen, strict):
        gru = quantized(**DEEP, batch_first=True)
        module = gru.freeze() if frozen else gru
        x, hx = seeded(3, 6, C), states(gru, 3)
        dynamic = torch.export.Dim.DYNAMIC
        with torch.no_grad():
            program = torch.export.export(
                module,
                (x, hx),
                strict=strict,
                dynamic_shapes=({0: dynamic, 1: dynamic}, {1: dynamic}),
            )
            file = io.BytesIO()
            torch.export.save(program, file)
            file.seek(0)
            again = torch.export.load(file).module()
            other, other_h = seeded(2, 9, C, seed=4), states(gru, 2, seed=6)
            for run in (program.module(), again):
                same(tuple(run(x, hx)), module(x, hx))
                same(tuple(run(other, other_h)), module(other, other_h))

    def test_saved_program_of_adjusted_scales(self):
        gru = quantized(num_layers=2, bias=False)
        gru.adjust_quant_config("h", bitwidth=5)
        gru.adjust_quant_config("W", bitwidth=4, layer=1)
        x = seeded(5, 3, C)
        file = io.BytesIO()
        with torch.no_grad():
            torch.export.save(torch.export.export(gru, (x,)), file)
            file.seek(0)
            same(tuple(torch.export.load(file).module()(x)), gru(x))

    def test_program_keeps_the_scales_of_its_moment(self):
        gru = quantized()
        x = seeded(5, 3, C)
        with torch.no_grad():
            before = gru(x)
            program = torch.export.export(gru, (x,)).module()
            gru.adjust_quant_config("h", bitwidth=4)
            same(tuple(program(x)), before)


class TestTransforms:
    def test_functional_call_uses_the_weights_given(self):
        gru, other = quantized(), quantized()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.5)
            x = seeded(5, 3, C)
            same(functional_call(gru, dict(other.named_parameters()), (x,)), other(x))

    def test_vmap_over_inputs_is_one_run(self):
        gru = quantized(**DEEP)
        x, hx = seeded(3, 5, 2, C), seeded(3, 4, 2, H)
        with torch.no_grad():
            y, h_n = vmap(lambda x, hx: gru(x, hx))(x, hx)
            for i in range(3):
                same((y[i], h_n[i]), gru(x[i], hx[i]))
            same(vmap(lambda x: gru(x)[0])(x)[1], gru(x[1])[0])
            same(vmap(lambda hx: gru(x[0], hx)[0])(hx)[2], gru(x[0], hx[2])[0])
            same(vmap(lambda x: gru(x)[0], in_dims=1)(x[:, :, 0])[3], gru(x[:, 3, 0])[0])

    def test_vmap_over_weights(self):
        gru = quantized()
        x = seeded(5, 3, C)
        weights = {k: torch.stack((p.detach(), p.detach() / 2)) for k, p in gru.named_parameters()}
        y = vmap(lambda w: functional_call(gru, w, (x,))[0])(weights)
        for i in range(2):
            one = {name: w[i] for name, w in weights.items()}
            same(y[i], functional_call(gru, one, (x,))[0].detach())

    def test_gradients_per_sample(self):
        gru = quantized()
        x = seeded(3, 5, 2, C)

        def loss(weights, x):
            return functional_call(gru, weights, (x,))[0].square().sum()

        weights = {name: p.detach() for name, p in gru.named_parameters()}
        each = vmap(grad(loss), (None, 0))(weights, x)
        for i in range(3):
            gru.zero_grad()
            gru(x[i])[0].square().sum().backward()
            for name, parameter in gru.named_parameters():
                same(each[name][i], parameter.grad)
                same(grad(loss)(weights, x[i])[name], parameter.grad)


def test_results_share_no_memory():
    whole = torch.arange(24, dtype=torch.int8)
    parts = [whole[:12].view(3, 4), whole[12:].view(3, 4), whole.new_empty(0), whole.new_empty(0)]
    found = library._apart(parts)
    same(found, parts)
    assert found[0] is parts[0]
    assert len({t.untyped_storage().data_ptr() for t in found[:2]}) == 2


class TestRefused:
    def test_second_derivatives(self):
        gru = quantized()
        args = arguments(gru, seeded(5, 3, C), needs_grad=True)
        (dx,) = torch.autograd.grad(FORWARD(*args)[0].square().sum(), args[0], create_graph=True)
        with pytest.raises(QuantGRUError, match="differentiated once"):
            dx.sum().backward()
        with pytest.raises(QuantGRUError, match="differentiated once"):
            grad(lambda x: grad(lambda x: gru(x)[0].square().sum())(x).sum())(seeded(5, 3, C))

    def test_gradient_of_a_frozen_gru(self):
        frozen = quantized().freeze()
        with pytest.raises(QuantGRUError, match="requires_grad"):
            grad(lambda x: frozen(x)[0].sum())(seeded(5, 3, C))

    @pytest.mark.parametrize("kind", ["training", "quantized", "frozen"])
    def test_forward_mode(self, kind):
        gru = quantized(**DEEP).train(kind == "training")
        module = gru.freeze() if kind == "frozen" else gru
        x, hx = seeded(5, 3, C), states(gru, 3)
        tangents = pytest.raises(QuantGRUError, match="without tangents")
        with torch.no_grad():
            expected = module(x, hx)
            module(x, hx)  # from here on in the shortest way
            with forward_ad.dual_level():
                same(module(x, hx), expected)
                dual_x, dual_hx = (forward_ad.make_dual(t, torch.ones_like(t)) for t in (x, hx))
                with tangents:
                    module(dual_x, hx)
                with tangents:
                    module(x, dual_hx)
                with tangents:
                    module(PackedSequence(dual_x[:, 0], torch.ones(5, dtype=torch.int64)))
            same(module(x, hx), expected)
        with tangents:
            jvp(lambda x: module(x, hx)[0], (x,), (x,))

    def test_forward_mode_over_weights(self):
        gru, x = quantized(), seeded(5, 3, C)
        parametrize.register_parametrization(gru, "weight_ih_l0", torch.nn.Tanh())
        weights = {name: p.detach() for name, p in gru.named_parameters()}
        moving = {name: w for name, w in weights.items() if "original" in name}
        assert moving
        with pytest.raises(QuantGRUError, match="without tangents"):
            jvp(lambda w: functional_call(gru, weights | w, (x,))[0], (moving,), (moving,))

    def test_without_scales(self):
        gru = QuantGRU(C, H, config=QuantConfig.int8(), use_quantization=True)
        with pytest.raises(CalibrationError, match="calibrated GRU"):
            vmap(lambda x: gru(x)[0])(seeded(2, 5, 3, C))

    @pytest.mark.parametrize("frozen", [False, True], ids=["quantized", "frozen"])
    def test_jit_trace(self, frozen):
        gru = quantized()
        module = gru.freeze() if frozen else gru
        with pytest.raises(QuantGRUError, match=r"torch\.export"):
            torch.jit.trace(module, (seeded(5, 3, C),))

    @pytest.mark.parametrize("kind", ["quantized", "float", "frozen", "in a model"])
    def test_jit_script(self, kind):
        module = quantized()
        module.use_quantization = kind != "float"
        module = module.freeze() if kind == "frozen" else module
        module = torch.nn.ModuleDict({"gru": module}) if kind == "in a model" else module
        with pytest.raises(QuantGRUError, match=r"torch\.export .*QuantGRU, got torch.jit.script"):
            torch.jit.script(module)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestCuda:
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_codes_and_gradients(self, backend):
        gru = quantized(**DEEP).train()
        x, hx = seeded(5, 3, C), states(gru, 3)
        expected = gradients(gru, gru, x, hx)
        gru.cuda()
        found = gradients(compiled(gru, backend), gru, x.cuda(), hx.cuda())
        same([t.cpu() for t in found[:2]], expected[:2])
        same(found, gradients(gru, gru, x.cuda(), hx.cuda()))

    @pytest.mark.parametrize("frozen", [False, True], ids=["quantized", "frozen"])
    @pytest.mark.filterwarnings("ignore")  # of torch's own modules
    def test_cuda_graphs_leave_the_operator_out(self, frozen):
        gru = quantized().cuda()
        module = gru.freeze() if frozen else gru
        run = torch.compile(module, fullgraph=True, mode="reduce-overhead")
        with torch.no_grad():
            for seed in range(4):
                x = seeded(5, 3, C, seed=seed).cuda()
                same([t.clone() for t in run(x)], list(module(x)))

    def test_opcheck(self):
        gru = quantized().cuda()
        x = seeded(5, 3, C).cuda()
        args = list(arguments(gru, x, needs_grad=True, dropout=0.5))
        args[1] = states(gru, 3).cuda().requires_grad_()
        before = torch.cuda.get_rng_state()
        torch.library.opcheck(FORWARD, tuple(args))
        assert torch.equal(before, torch.cuda.get_rng_state())
