"""Compressed models under transforms: second derivatives, torch.func, tracing, replicas."""

import copy
import warnings

import pytest
import torch
from actnn_models import compressed_copy, gradients
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.utils import checkpoint as checkpoints

import actnn
from actnn.saving import Choice


def network():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.LeakyReLU(0.1),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 2),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Dropout(0.0),
        nn.Flatten(),
        nn.LayerNorm(16),
        nn.Linear(16, 1),
    )


def images():
    return torch.randn(4, 3, 12, 12)


def small():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1))


def penalty(model, x):
    """Gradients of a loss that contains the gradient of the input."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (dx.square().sum() + model(x).sum()).backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def test_second_derivatives_are_exact_without_rounding():
    model, x = network().double(), images().double()
    exact = penalty(model, x)
    for settings in ({"bits": 32}, {"level": "L0"}):
        same = penalty(compressed_copy(model, **settings), x)
        assert all(torch.equal(a, b) for a, b in zip(exact, same, strict=True))


@pytest.mark.parametrize("index", [0, 4, 8, 9])
def test_second_derivatives_of_codes_are_errors(index):
    """Of a convolution's input, of codes of a derivative, of a normalized and of a linear input."""
    model = nn.Sequential(nn.Softplus(), network()[index])
    shapes = {0: (4, 3, 12, 12), 4: (4, 16), 8: (4, 16), 9: (4, 16)}
    ours = compressed_copy(model, bits=8)
    ours.actnn.set_choices({"0": Choice("keep")})
    x = torch.randn(shapes[index], requires_grad=True)
    with pytest.raises(actnn.ActNNError, match="without create_graph"):
        torch.autograd.grad(ours(x).sum(), x, create_graph=True)


def test_second_derivatives_of_recurrent_layers_are_errors():
    ours, x = compressed_copy(nn.GRU(4, 5), bits=32), torch.randn(6, 2, 4, requires_grad=True)
    with pytest.raises(actnn.ActNNError, match=r"compressed nn\.GRU to be without create_graph"):
        torch.autograd.grad(ours(x)[0].sum(), x, create_graph=True)


def test_transforms_of_torch_func_run_the_model_as_torch_does():
    model, x = small(), torch.randn(6, 8)
    ours = compressed_copy(model, bits=2)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(module):
        return lambda parameters, x: functional_call(module, parameters, x[None]).sum()

    each = [vmap(grad(loss(module)), (None, 0))(parameters, x) for module in (model, ours)]
    assert all(torch.equal(each[0][name], each[1][name]) for name in parameters)
    x.requires_grad_()
    with actnn.compressed(bits=8, min_bytes=0):
        y = vmap(model)(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    (exact,) = torch.autograd.grad(model(x).sum(), x)
    assert (dx - exact).norm() <= 0.05 * exact.norm()


@pytest.mark.filterwarnings("ignore:.*jit:DeprecationWarning")  # torch's own, at the first use
def test_forward_mode_runs_the_layers_of_torch():
    model, x = small(), torch.randn(6, 8)
    ours, tangents = compressed_copy(model, bits=2), []
    for module in (model, ours):
        with forward_ad.dual_level():
            y = module(forward_ad.make_dual(x, torch.ones_like(x)))
            tangents.append(forward_ad.unpack_dual(y).tangent)
    assert torch.equal(*tangents)


def test_models_can_be_traced_and_exported():
    model, x = small().eval(), torch.randn(6, 8)
    ours = compressed_copy(model, bits=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(ours, x)
    assert torch.equal(traced(x), model(x))
    assert torch.equal(torch.export.export(ours, (x,)).module()(x), model(x))


def test_lazy_modules_are_an_error_until_they_know_their_shapes():
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(4))
    with pytest.raises(actnn.ActNNError, match="lazy LazyLinear at '1'; run a forward"):
        actnn.compress(model)
    assert not hasattr(model, "actnn")
    model(torch.randn(2, 8))
    assert gradients(actnn.compress(model, min_bytes=0), torch.randn(2, 8))


def test_replicas_of_data_parallel_are_errors():
    device, devices = ("cuda", [0]) if torch.cuda.is_available() else ("cpu", None)
    model, x = compressed_copy(small().to(device)), torch.ones(2, 8, device=device)
    assert torch.equal(nn.DataParallel(model, devices)(x), model(x))
    with pytest.raises(actnn.ActNNError, match="DistributedDataParallel around it, got a replica"):
        model._replicate_for_data_parallel()(x)


def test_nested_tensors_run_as_in_torch():
    layer = nn.Linear(8, 4)
    model, results = nn.Sequential(layer, nn.ReLU(), nn.Tanh()), []
    parts = [torch.randn(3, 8), torch.randn(5, 8)]
    for each in (model, compressed_copy(model)):
        x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        each(x).values().sum().backward()
        results.append(x.grad.values())
    assert torch.equal(*results)


def test_selective_checkpoints_keep_their_own_tensors():
    """They hold what they choose outside of autograd, where no hook sees it."""

    def policy(_, op, *arguments, **named):
        keep = op is torch.ops.aten.addmm.default
        return getattr(checkpoints.CheckpointPolicy, "MUST_SAVE" if keep else "PREFER_RECOMPUTE")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = small(), nn.Linear(1, 2)

        def forward(self, x):
            def contexts():
                return checkpoints.create_selective_checkpoint_contexts(policy)

            run = checkpoints.checkpoint
            return self.head(run(self.inner, x, use_reentrant=False, context_fn=contexts))

    model, x = Model(), torch.randn(6, 8)
    exact = gradients(model, x)
    same = gradients(compressed_copy(model, bits=32), x)
    assert all(torch.equal(a, b) for a, b in zip(exact, same, strict=True))
    ours = compressed_copy(model, bits=8)
    for a, b in zip(exact, gradients(ours, x), strict=True):
        assert (a - b).norm() <= 0.05 * a.norm() + 1e-6
    assert "inner.0" not in {record.module for record in ours.actnn.records}


def test_outer_hooks_and_anomaly_mode():
    model, x = network(), images()
    exact = gradients(model, x)
    with torch.autograd.graph.save_on_cpu():
        same = gradients(compressed_copy(model, bits=32), x)
    assert all(torch.equal(a, b) for a, b in zip(exact, same, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(check_nan=True):
            assert gradients(compressed_copy(model, bits=4), x)


def test_averages_of_models_are_compressed_on_their_own():
    model = compressed_copy(small(), bits=4)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    average(torch.randn(4, 8)).sum().backward()
    assert average.module.actnn is not model.actnn
    assert average.module.actnn.records
    assert copy.deepcopy(average).module.actnn.model is None
