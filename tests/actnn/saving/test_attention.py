"""The gradient of attention is that of exact attention on the operands as they are decoded."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import actnn
from actnn.saving import Saving
from sweeps import first_of

LENGTH = 64
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KERNELS = [
    pytest.param("cpu", "FLASH_ATTENTION", id="cpu"),
    *(
        pytest.param("cuda", f"{name}_ATTENTION", id=name.lower(), marks=ON_GPU)
        for name in ("FLASH", "EFFICIENT", "CUDNN")
    ),
]
CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.5},
    "mask of bools": {"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(3)},
    "mask of numbers": {"attn_mask": torch.linspace(-4, 4, LENGTH * LENGTH).view(LENGTH, LENGTH)},
    "groups of queries": {"enable_gqa": True},
}


def operands(sharp, *, heads=(4, 4, 4), dtype=torch.float32, device="cpu"):
    """Queries, keys and values (N, T, H, D) whose scores have the standard deviation `sharp`."""
    scales = sharp**0.5, sharp**0.5, 1.0
    return [
        (torch.randn(2, LENGTH, n, 32) * scale).to(device, dtype).requires_grad_()
        for n, scale in zip(heads, scales, strict=True)
    ]


def attend(leaves, **how):
    """Attention of tensors that are no leaves, as layers make them."""
    return scaled_dot_product_attention(*(1 * x.transpose(1, 2) for x in leaves), **how)


def gradients(leaves, upstream, bits, **how):
    """The gradients of attention, and its operands as its backward sees them."""
    with Saving(bits=bits, min_bytes=0):
        y = attend(leaves, **how)
    saved = y.grad_fn._saved_query, y.grad_fn._saved_key, y.grad_fn._saved_value
    decoded = [x.transpose(1, 2).detach() for x in saved]
    return torch.autograd.grad(y, leaves, upstream), decoded


@pytest.mark.parametrize(("device", "kernel"), KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_decoded_operands(case, dtype, device, kernel):
    how = dict(CASES[case])
    mask = how.get("attn_mask")
    if mask is not None:
        how["attn_mask"] = mask.to(device, dtype if mask.is_floating_point() else torch.bool)
    if device == "cuda":
        if dtype == torch.float32 and kernel != "EFFICIENT_ATTENTION":
            pytest.skip("not for float32")
        if mask is not None and kernel == "FLASH_ATTENTION":
            pytest.skip("not for masks")
        if "enable_gqa" in how and kernel == "EFFICIENT_ATTENTION":
            pytest.skip("not for groups of queries")
    heads = (4, 2, 2) if "enable_gqa" in how else (4, 4, 4)
    leaves = operands(8.0, heads=heads, dtype=dtype, device=device)
    upstream = torch.randn(2, 4, LENGTH, 32).to(device, dtype)
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        found, decoded = gradients(leaves, upstream, 4, **how)
        expected, _ = gradients([x.requires_grad_() for x in decoded], upstream, 32, **how)
    assert not any(torch.equal(x, y) for x, y in zip(decoded, leaves, strict=True))
    for ours, theirs in zip(found, expected, strict=True):
        if device == "cpu":
            assert torch.equal(ours, theirs)
        else:  # kernels add in any order
            assert torch.linalg.vector_norm(ours - theirs) <= 1e-2 * torch.linalg.vector_norm(ours)


@ON_GPU
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_probabilities_of_attention_with_dropout_sum_to_one(kernel):
    """Where they do not, gradients are thousands of times too large."""
    leaves = operands(16.0, dtype=torch.bfloat16, device="cuda")
    upstream = torch.randn(2, 4, LENGTH, 32).to("cuda", torch.bfloat16)
    found = {}
    for bits in (4, 32):
        torch.manual_seed(0)
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            found[bits], _ = gradients(leaves, upstream, bits, dropout_p=0.1)
    pairs = zip(*found.values(), strict=True)
    assert max((x - y).float().norm() / y.float().norm() for x, y in pairs) < 5


@pytest.mark.parametrize(("bits", "most"), [(4, 0.25), (2, 1.5)])
@pytest.mark.parametrize("sharp", [1.0, 4.0, 8.0, 16.0])
@pytest.mark.parametrize("backend", first_of([None, "aot_eager"], 1))
def test_sharp_attention_does_not_make_gradients_wrong(sharp, bits, most, backend):
    leaves, upstream = operands(sharp), torch.randn(2, 4, LENGTH, 32)
    exact, _ = gradients(leaves, upstream, 32)
    run = attend if backend is None else torch.compile(attend, backend=backend)
    with Saving(bits=bits, min_bytes=0):
        found = torch.autograd.grad(run(leaves), leaves, upstream)
    error = sum((x - y).square().sum() for x, y in zip(found, exact, strict=True))
    assert error < most**2 * sum(x.square().sum() for x in exact)


def test_queries_and_keys_have_twice_the_bits_however_they_are_made():
    q, k, v = (x.transpose(1, 2) for x in operands(1.0))
    saving = Saving(bits=3, min_bytes=0)
    with saving:
        scaled_dot_product_attention(q * 1 + 1, k.contiguous() * 1, v * 1)
    bits = [r.choice.bits for r in saving.records if r.reason == "compressed"]
    assert sorted(bits) == [3, 6, 6]
    assert saving.held_bytes == 0


@ON_GPU
def test_a_rounded_mask_is_that_of_the_forward_that_runs_again():
    leaves = operands(4.0, device="cuda")
    bias = torch.randn(2, 4, LENGTH, LENGTH, device="cuda", requires_grad=True)
    with Saving(bits=4, min_bytes=0), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        y = attend(leaves, attn_mask=bias * 3)
        node, upstream = y.grad_fn, torch.randn_like(y)
        q, k, v, exact = (
            getattr(node, f"_saved_{name}").detach().requires_grad_()
            for name in ("query", "key", "value", "attn_bias")
        )
        assert not torch.equal(exact, bias * 3)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):  # which saves q, k and v as they are
        again = scaled_dot_product_attention(q, k, v, attn_mask=exact)
    expected = 3 * torch.autograd.grad(again, exact, upstream)[0]
    found = torch.autograd.grad(y, bias, upstream)[0]
    assert torch.linalg.vector_norm(found - expected) <= 1e-2 * torch.linalg.vector_norm(expected)


def test_the_result_is_held_by_the_next_layer_alone():
    leaves, weight = operands(1.0), torch.randn(128, 8, requires_grad=True)
    saving = Saving(bits=4, min_bytes=0)
    for _ in range(2):  # the first step holds more: see test_divisors.py
        with saving:
            y = attend(leaves)
            z = y.transpose(1, 2).reshape(2, LENGTH, 128) @ weight
    [again] = [r for r in saving.records if r.reason == "made again in backward"]
    [codes] = [r for r in saving.records if r.shape == (2 * LENGTH, 128)]
    assert (again.shape, again.held, again.nbytes) == (y.shape, 0, 0)
    assert (codes.reason, codes.choice.bits, codes.nbytes) == ("compressed", 4, y.nbytes)
    assert saving.held_bytes == sum(record.held for record in saving.records)
    z.sum().backward()
    assert weight.grad is not None


def test_backward_runs_twice_and_leaves_nothing():
    leaves = operands(4.0)
    with Saving(bits=4, min_bytes=0) as saving:
        y = attend(leaves)
    storage = StorageWeakRef(y.untyped_storage())
    first = torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True)
    second = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert all(map(torch.equal, first, second))
    del y
    assert storage.expired()
    assert saving.held_bytes == 0


def test_a_checkpoint_around_attention_changes_nothing():
    leaves, upstream = operands(4.0), torch.randn(2, 4, LENGTH, 32)
    exact, _ = gradients(leaves, upstream, 32)
    with Saving(bits=4, min_bytes=0):
        y = checkpoint(lambda *x: attend(x), *leaves, use_reentrant=False)
    found = torch.autograd.grad(y, leaves, upstream)
    assert all(map(torch.equal, found, exact))  # inputs of a model are not rounded


def test_other_operations_save_the_result_itself():
    """Those that read it directly, before and after others that save something exactly."""
    leaves, gate = operands(4.0), torch.randn(2, 4, LENGTH, 32, requires_grad=True)
    scale = torch.ones(2, 4, LENGTH)

    def gated(x):
        y = attend(x)
        return (y * gate).square().sum() + ((gate.sum(-1) * scale) ** 2).sum() + y.sin().sum()

    exact = torch.autograd.grad(gated(leaves), [*leaves, gate])
    with Saving(bits=8, min_bytes=0) as saving:
        loss = gated(leaves)
    reasons = [record.reason for record in saving.records]
    assert reasons.count("made again in backward") == 1
    found = torch.autograd.grad(loss, [*leaves, gate])
    for a, b in zip(exact, found, strict=True):
        assert 0 < torch.linalg.vector_norm(a - b) < 0.1 * torch.linalg.vector_norm(a)


def test_attention_that_no_hook_has_seen_is_none_that_runs_again():
    leaves = operands(4.0)
    q, k, v = (1 * x.transpose(1, 2) for x in leaves)
    with Saving(bits=8, min_bytes=0) as saving:
        other = q.sin().sum() + k.sin().sum() + v.sin().sum()
        sums = (q.detach().sum(-1) * q.sum(-1)).sum()  # saves something exactly
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            y = scaled_dot_product_attention(q, k, v)
        loss = other + sums + y.square().sum()
    assert "made again in backward" not in {record.reason for record in saving.records}
    exact = torch.autograd.grad(
        sum(x.sin().sum() for x in (q, k, v))
        + (q.detach().sum(-1) * q.sum(-1)).sum()
        + scaled_dot_product_attention(q, k, v).square().sum(),
        leaves,
        retain_graph=True,
    )
    found = torch.autograd.grad(loss, leaves)
    for a, b in zip(exact, found, strict=True):
        assert torch.linalg.vector_norm(a - b) < 0.1 * torch.linalg.vector_norm(a)


def test_attention_on_exact_operands_is_as_without_actnn():
    leaves = operands(4.0)
    saving = Saving(bits=4, min_bytes=1 << 30)
    with saving:
        y = attend(leaves)
    assert "made again in backward" not in {record.reason for record in saving.records}
    assert torch.equal(y.grad_fn._saved_output, y)


def test_the_result_that_is_made_again_belongs_to_backward():
    with Saving(bits=4, min_bytes=0):
        y = attend(operands(1.0))
    with pytest.raises(actnn.ActNNError, match="used by its backward alone, got other code"):
        _ = y.grad_fn._saved_output


@torch.library.custom_op("quant_gru_tests::attention", mutates_args=())
def _aligned(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Stand for attention whose mask needs rows at multiples of 8 elements, as on a GPU."""
    assert mask.stride(-2) % 8 == 0
    return x * mask


@torch.library.custom_op("quant_gru_tests::attention_backward", mutates_args=())
def _aligned_backward(
    gradient: torch.Tensor, x: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    assert mask.stride(-2) % 8 == 0
    return gradient * mask, gradient * x


@_aligned.register_fake
def _(x, mask):
    return torch.empty_like(x)


@_aligned_backward.register_fake
def _(gradient, x, mask):
    return torch.empty_like(gradient), torch.empty_like(gradient)


_aligned.register_autograd(
    lambda ctx, gradient: _aligned_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Biased(nn.Module):
    """Attention with a mask that is trained, and padded as PyTorch does for kernels of GPUs."""

    def __init__(self):
        super().__init__()
        self.x, self.mask = nn.Linear(27, 27), nn.Linear(27, 27)

    def forward(self, x):
        mask = nn.functional.pad(self.mask(x).sin(), (0, 5))[..., :27]
        return _aligned(self.x(x), mask)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("compiled", first_of([False, True], 1))
def test_rows_of_masks_stay_aligned(compiled, dynamic):
    torch.manual_seed(0)
    model, x = Biased(), torch.randn(4, 3, 27, 27)
    exact = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    torch._dynamo.reset()
    actnn.compress(model, bits=8, min_bytes=0)
    run = torch.compile(model, backend="aot_eager", dynamic=dynamic) if compiled else model
    found = torch.autograd.grad(run(x).square().sum(), list(model.parameters()))
    for a, b in zip(exact, found, strict=True):
        assert 0 < torch.linalg.vector_norm(a - b) < 0.02 * torch.linalg.vector_norm(a)
