"""Writes to weights that raise no version."""

import copy
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from gru_helpers import C, quantized, seeded
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from quant_gru import QuantGRUWarning
from quant_gru.kernels import _native

X = seeded(4, 2, C)


def scaled_data(gru):
    for w in gru.parameters():
        w.data.mul_(0.5)


def copied_storage(gru):
    for w in gru.parameters():
        w.untyped_storage().copy_((w.detach() * 0.5).untyped_storage())


def numpy_view(gru):
    for w in gru.parameters():
        w.detach().numpy()[:] *= 0.5


def fused_function(gru):
    """A functional fused optimizer."""
    for w in gru.parameters():
        state = [torch.zeros_like(w) for _ in range(2)]
        torch._fused_adam_(
            [w.data], [torch.ones_like(w)], [state[0]], [state[1]], [], [torch.ones(())],
            lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False,
            maximize=False,
        )  # fmt: skip


def one_bias(gru):
    gru.bias_hh_l0.data[3] += 0.25


@pytest.mark.parametrize("hidden_size", [6, 96])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "write", [scaled_data, copied_storage, numpy_view, fused_function, one_bias]
)
@pytest.mark.filterwarnings("ignore:Expected writes to weights that PyTorch records")
def test_the_next_call_sees_a_write(write, hidden_size, num_layers, frozen):
    gru = quantized(hidden_size=hidden_size, num_layers=num_layers).eval()
    with torch.no_grad():
        for _ in range(3):
            before = gru(X)[0]
            write(gru)
            assert not torch.equal(gru.freeze()(X)[0], before)
            if not frozen:
                expected = copy.deepcopy(gru)(X)[0]
                for _ in range(3):
                    assert torch.equal(gru(X)[0], expected)


def test_the_next_call_sees_a_vector_of_parameters():
    """The second round of an evolution strategy writes the vector that the parameters share."""
    gru = quantized(hidden_size=64).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantGRUWarning)
        vector = parameters_to_vector(gru.parameters())
        for _ in range(3):
            vector.mul_(0.7)
            vector_to_parameters(vector, gru.parameters())
            assert torch.equal(gru(X)[0], copy.deepcopy(gru)(X)[0])


def test_the_next_call_sees_a_collective(tmp_path):
    gru = quantized(hidden_size=64).eval()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", QuantGRUWarning)
            gru(X)
            for w in gru.parameters():
                dist.scatter(w.data, [w * 0.5])
            assert torch.equal(gru(X)[0], copy.deepcopy(gru)(X)[0])
    finally:
        dist.destroy_process_group()


def test_a_small_write_to_a_large_weight_is_seen_later_with_a_warning():
    gru = quantized(hidden_size=96).eval()
    windows = -(-gru.weight_hh_l0.nbytes // 512)
    with torch.no_grad():
        gru(X)
        # between the lines that every call compares
        gru.weight_hh_l0.data[7, 40] += 4.0
        expected = copy.deepcopy(gru)(X)[0]
        with pytest.warns(QuantGRUWarning, match=r"eval\(\) or train\(\)"):
            seen = [torch.equal(gru(X)[0], expected) for _ in range(windows + 1)]
        assert seen[-1]
        assert seen == sorted(seen)


def test_eval_sees_every_write():
    gru = quantized(hidden_size=96).eval()
    with torch.no_grad():
        gru(X)
        gru.weight_hh_l0.data[7, 40] += 4.0
        gru.eval()
        assert torch.equal(gru(X)[0], copy.deepcopy(gru)(X)[0])


def test_a_write_of_another_thread_that_is_under_way_is_no_silent_one(recwarn):
    gru = quantized(hidden_size=96).eval()
    with torch.no_grad():
        gru(X)
        weight = gru.weight_hh_l0
        weight.data.mul_(0.5)  # its version follows
        end = threading.Timer(0.002, lambda: torch._C._autograd._unsafe_set_version_counter(
            (weight,), (weight._version + 1,)
        ))  # fmt: skip
        end.start()
        found = gru(X)[0]
        end.join()
        assert torch.equal(found, copy.deepcopy(gru)(X)[0])
    assert not [each for each in recwarn if issubclass(each.category, QuantGRUWarning)]


def test_no_warning_without_a_write(recwarn):
    gru = quantized(hidden_size=96).eval()
    with torch.no_grad():
        for _ in range(400):
            gru(X)
        gru.weight_hh_l0.mul_(0.5)
        gru(X)
    assert not [each for each in recwarn if issubclass(each.category, QuantGRUWarning)]


@pytest.mark.parametrize("size", [1, 7, 2048, 2049, 2560, 5000, 9001])
def test_every_byte_of_a_sample_is_compared(size):
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    for at in range(0, size, 1 if size < 3000 else 97):
        sample = _native.ContentSample(data.data_ptr(), size)
        assert all(sample.unchanged() for _ in range(25))
        data[at] += 1
        assert not all(sample.unchanged() for _ in range(25))
        assert not sample.unchanged()


@pytest.mark.parametrize("hidden_size", [6, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_next_call_sees_another_layout_of_the_same_memory(hidden_size, dtype):
    gru = quantized(hidden_size=hidden_size).eval().to(dtype)
    w = gru.weight_hh_l0
    with torch.no_grad():
        before = gru(X)[0]
        w.data = w.data.as_strided(w.shape, (1, w.shape[0]))
        y = gru(X)[0]
        assert torch.equal(y, copy.deepcopy(gru)(X)[0])
        assert not torch.equal(y, before)
