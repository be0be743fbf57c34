"""The native backward against `straight_through`, and held units, over random plans."""

from dataclasses import dataclass, replace

import pytest
import torch
from gradient_errors import SUMS, error, terms
from native_runs import NATIVE
from random_plans import random_case
from torch import Tensor

from kept import shared
from quant_gru import QuantConfig, QuantGRU, QuantGRUError
from quant_gru.integer import cell as reference
from quant_gru.integer.backward import Gradients, Tape, Wanted, straight_through
from quant_gru.kernels import _native
from quant_gru.kernels.cpu import executor
from quant_gru.kernels.cpu.backward import backward
from sweeps import batches

SWEEP = dict.fromkeys(("w8a8", "w8a16", "w16a16", "mixed", "wide"), 40)
BATCH = 20
NAMES = ("x", "h0", "W", "R", "bw", "br", "h")
ALL = Wanted(h=True)
LIMIT = 1e-5


@dataclass(frozen=True)
class Drawn:
    """A tape with its last states and gradients of its outputs."""

    tape: Tape
    last: Tensor
    grad_out: Tensor
    grad_last: Tensor


def drawn(plan, x, h0, lengths=None, reverse=False, held=None, seed=0) -> Drawn:
    generator = torch.Generator().manual_seed(seed)
    out, last = reference.run(plan, x, h0, lengths, reverse, held)
    tape = Tape(plan, x, h0, out, lengths, reverse, held)
    grad_out = torch.randn(out.shape, generator=generator)
    return Drawn(tape, last, grad_out, torch.randn(h0.shape, generator=generator))


def random_drawn(seed: int, kind: str, rounding: str = "half_even") -> Drawn:
    case = random_case(seed, kind, rounding)
    shape = (*case.x.shape[:2], case.plan.hidden_size)
    generator = torch.Generator().manual_seed(seed)
    held = torch.rand(shape, generator=generator) < 0.3 if seed % 2 else None
    return drawn(case.plan, case.x, case.h0, case.lengths, case.reverse, held, seed)


def assert_close(ours: Gradients, expected: Gradients, tape: Tape, what: str) -> None:
    for name in NAMES:
        a = getattr(ours, name)
        assert a.dtype == torch.float32
        assert a.shape == getattr(expected, name).shape, f"{what}, {name}"
        found = error(name, a, expected, tape, LIMIT)
        assert found <= LIMIT, f"{what}, {name}: {found:.1e}"


def assert_same_bits(a: Gradients, b: Gradients) -> None:
    for name in NAMES:
        one, other = getattr(a, name), getattr(b, name)
        assert torch.equal(one.view(torch.int32), other.view(torch.int32)), name


@pytest.mark.usefixtures("cheap_threads")
@pytest.mark.parametrize(("kind", "first", "end"), batches(SWEEP, BATCH))
def test_random_plans(kind, first, end):
    for seed in range(first, end):
        case, threads = random_drawn(seed, kind), 1 + seed // 2 % 2
        tape = case.tape
        expected = straight_through(tape, case.grad_out, case.grad_last, ALL)
        for variant in NATIVE:
            before = _native.threads_started()
            got = backward(tape, case.grad_out, case.grad_last, ALL, variant, threads)
            if executor.is_narrow(tape.plan, variant):
                assert _native.threads_started() - before == threads - 1
            what = f"seed {seed}, {kind}, {variant}"
            assert_close(got, expected, tape, what)
            if tape.held is not None:
                arguments = (tape.plan, tape.x, tape.h0, tape.lengths, tape.reverse)
                found = executor.run(*arguments, variant, threads, tape.held)
                for ours, theirs in zip(found, (tape.out, case.last), strict=True):
                    assert torch.equal(ours, theirs), what


@pytest.mark.parametrize("name", SUMS)
def test_terms_of_the_yardstick_add_up(name):
    for seed in range(4):
        case = random_drawn(seed, "mixed")
        expected = straight_through(case.tape, case.grad_out, case.grad_last, ALL)
        whole = getattr(expected, name)
        found = terms(name, expected, case.tape)
        assert (sum(found) - whole).norm() <= 1e-10 * torch.stack(found).norm()


@shared
def calibrated(config, C, H, seed=0):
    torch.manual_seed(seed)
    gru = QuantGRU(C, H, config=config).eval()
    gru.calibrate(torch.randn(8, 4, C))
    gru.finalize_calibration()
    return gru._plan().cells[0][0]


def codes(quantizer, *shape):
    return torch.randint(quantizer.lo, quantizer.hi + 1, shape).to(quantizer.container)


SHAPES = [(1, 1, 1, 1), (2, 1, 40, 64), (9, 3, 65, 130), (7, 50, 7, 100), (70, 9, 33, 70)]


# Each size with each width of codes, and with both kinds of scales.
CALIBRATED = [
    (config, ("pot", "free")[(i + j) % 2], *shape)
    for i, config in enumerate(("int8", "w8a16", "int16"))
    for j, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize(("config", "kind", "T", "N", "C", "H"), CALIBRATED)
def test_calibrated_plans(config, kind, T, N, C, H):
    """Blocks that are filled and those that are left over; several chunks of steps."""
    plan = calibrated(getattr(QuantConfig, config)().replace_globals(scale_kind=kind), C, H)
    case = drawn(plan, codes(plan.x, T, N, C), codes(plan.h, N, H), reverse=N == 3)
    expected = straight_through(case.tape, case.grad_out, case.grad_last, ALL)
    for variant in NATIVE:
        got = backward(case.tape, case.grad_out, case.grad_last, ALL, variant, 1)
        assert_close(got, expected, case.tape, variant)


def case_with_everything(config, T, N, C):
    """Lengths, held units, and from the last step to the first."""
    plan = calibrated(getattr(QuantConfig, config)(), C, 64)
    held = torch.rand(T, N, 64) < 0.1
    lengths = torch.randint(1, T + 1, (N,))
    return drawn(plan, codes(plan.x, T, N, C), codes(plan.h, N, 64), lengths, True, held)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["int8", "w8a16", "int16"])
def test_threads_change_no_bit(config):
    """Long enough for threads to start, with rows that do not divide among them."""
    case = case_with_everything(config, 60, 37, 40)
    expected = straight_through(case.tape, case.grad_out, case.grad_last, ALL)
    for variant in NATIVE:
        one, *others = (
            backward(case.tape, case.grad_out, case.grad_last, ALL, variant, threads)
            for threads in (1, 2, 5, 16)
        )
        for other in others:
            assert_same_bits(one, other)
        assert_close(one, expected, case.tape, variant)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "T", "N"),
    [("int8", 200, 1), ("int16", 61, 37), ("int8", 7, 128), ("int16", 9, 257), ("int8", 9, 515)],
)
def test_chunks_change_no_bit(config, T, N):
    """Of one sum, of several with some left over, of as many bytes as may be; blocks of rows."""
    case = case_with_everything(config, T, N, 20)
    expected = straight_through(case.tape, case.grad_out, case.grad_last, ALL)
    for variant in NATIVE:
        whole, *chunked = (
            backward(case.tape, case.grad_out, case.grad_last, ALL, variant, threads, items)
            for threads, items in [(1, 10**9), (1, 1), (2, 300), (3, 4 * N + 1)]
        )
        for each in chunked:
            assert_same_bits(whole, each)
        assert_close(whole, expected, case.tape, variant)


@pytest.mark.parametrize("variant", NATIVE)
@pytest.mark.parametrize("config", ["int8", "int16"])
def test_nan_spreads_like_the_definition(variant, config):
    """Through its row and to the weights, and nowhere else."""
    plan = calibrated(getattr(QuantConfig, config)(), 6, 11)
    case = drawn(plan, codes(plan.x, 5, 4, 6), codes(plan.h, 4, 11))
    case.grad_last[2, 3] = torch.nan
    expected = straight_through(case.tape, case.grad_out, case.grad_last, ALL)
    got = backward(case.tape, case.grad_out, case.grad_last, ALL, variant, 1)
    for name in NAMES:
        assert torch.equal(getattr(got, name).isnan(), getattr(expected, name).isnan()), name
    rows = torch.tensor([0, 1, 3])
    for name, dim in (("x", 1), ("h0", 0)):
        a, b = (getattr(g, name).index_select(dim, rows) for g in (got, expected))
        assert (a - b).norm() <= LIMIT * b.norm()


@pytest.mark.parametrize("wanted", NAMES)
def test_only_what_is_wanted(wanted):
    plan = calibrated(QuantConfig.int8(), 5, 6)
    case = drawn(plan, codes(plan.x, 4, 3, 5), codes(plan.h, 3, 6))
    arguments = (case.tape, case.grad_out, case.grad_last)
    every = backward(*arguments, ALL, NATIVE[0])
    nothing = Wanted(False, False, False, False, False)
    few = nothing if wanted == "h0" else replace(nothing, **{wanted: True})
    got = backward(*arguments, few, NATIVE[0])
    for name in NAMES:
        if name in ("h0", wanted):
            assert torch.equal(getattr(got, name), getattr(every, name))
        else:
            assert getattr(got, name) is None


@pytest.mark.parametrize(("T", "N"), [(0, 3), (4, 0), (0, 0)])
def test_nothing_to_do(T, N):
    plan = calibrated(QuantConfig.int8(), 5, 6)
    case = drawn(plan, codes(plan.x, T, N, 5), codes(plan.h, N, 6))
    got = backward(case.tape, case.grad_out, case.grad_last, ALL, NATIVE[0])
    expected = straight_through(case.tape, case.grad_out, case.grad_last, ALL)
    assert_close(got, expected, case.tape, "empty")
    assert got.h0 is not case.grad_last


def test_strided_gradients_are_taken():
    plan = calibrated(QuantConfig.int8(), 5, 6)
    case = drawn(plan, codes(plan.x, 4, 3, 5), codes(plan.h, 3, 6))
    expected = backward(case.tape, case.grad_out, case.grad_last, ALL, NATIVE[0])
    batch_first = case.grad_out.transpose(0, 1).contiguous().transpose(0, 1)
    units_apart = case.grad_out.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    half = torch.cat((case.grad_out, case.grad_out), 2)[..., :6]
    spread = torch.ones(()).expand(4, 3, 6)
    for grad_out in (batch_first, units_apart, half, case.grad_out.double()):
        got = backward(case.tape, grad_out, case.grad_last, ALL, NATIVE[0])
        assert_same_bits(got, expected)
    got = backward(case.tape, spread, case.grad_last, ALL, NATIVE[0])
    assert_same_bits(got, backward(case.tape, spread.clone(), case.grad_last, ALL, NATIVE[0]))


def test_shapes_are_checked_before_addresses_are_taken():
    plan = calibrated(QuantConfig.int8(), 5, 6)
    case = drawn(plan, codes(plan.x, 4, 3, 5), codes(plan.h, 3, 6))
    held = torch.zeros(4, 3, 5, dtype=torch.bool)
    bad = [
        (replace(case.tape, held=held), case.grad_out, case.grad_last, "held"),
        (replace(case.tape, lengths=torch.ones(2)), case.grad_out, case.grad_last, "lengths"),
        (case.tape, case.grad_out[1:], case.grad_last, "grad_out"),
        (case.tape, case.grad_out, case.grad_last[:, 1:], "grad_last"),
    ]
    for tape, grad_out, grad_last, name in bad:
        with pytest.raises(QuantGRUError, match=f"Expected {name} to be of shape"):
            backward(tape, grad_out, grad_last, ALL, NATIVE[0])
    with pytest.raises(QuantGRUError, match="Expected held to be of shape"):
        executor.run(plan, case.tape.x, case.tape.h0, None, False, NATIVE[0], held=held)
