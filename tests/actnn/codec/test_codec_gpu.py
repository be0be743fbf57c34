"""The codec on a GPU: bytes of the definition, streams, graphs, devices, no synchronization."""

import pytest
import torch
from same_codes import bits_equal, random_tensor

from actnn.codec import UNBOUNDED, Codes, Key, decode, encode, group_ranges, noise_state, reference
from actnn.codec.codes import DTYPES
from actnn.codec.cuda.executor import SOURCES, kernel_of
from quant_gru.kernel_runtime.cuda import driver

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or driver.missing(CUDA) is not None, reason="needs a GPU"
)


# dtype, bits, group: tiles of all dtypes, all packings, the general path
FORMS = [
    *((torch.float32, bits, 256) for bits in range(1, 9)),
    *((torch.bfloat16, bits, 256) for bits in (2, 3, 4, 8)),
    (torch.float16, 5, 64),
    (torch.float16, 8, 512),
    (torch.float64, 4, 256),
    (torch.float32, 3, 96),
    (torch.bfloat16, 7, 96),
    (torch.float32, 2, 2080),
    (torch.bfloat16, 4, 1024),
    (torch.float16, 2, 32),
]
SIZES = (1, 31, 257, 4173, 70_001, 1_000_003)


@pytest.fixture(scope="module")
def _compiled():
    """Compiles the kernels of all forms at the same time."""
    machine = driver.machine_of(CUDA, SOURCES)
    for dtype, bits, group in FORMS:
        for tiles in (True, False):
            machine.expect(kernel_of("encode", dtype, bits, group, True, tiles).kernel)
        machine.expect(kernel_of("encode", dtype, bits, group, False, True).kernel)
        machine.expect(kernel_of("decode", dtype, bits, group, False, True).kernel)


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_random_tensors_return_the_same_bytes(form):
    dtype, bits, group = form
    for seed in range(10):
        n = SIZES[seed % len(SIZES)]
        # a tensor that begins at any address takes the general path
        stochastic, start = seed != 3, seed if seed in (2, 5) and n > 100 else 0
        x = random_tensor(n, dtype, seed).to(CUDA)[start:]
        state = noise_state(seed, step=seed, device=CUDA)
        bounds = (-1.0, 1.0) if seed in (4, 6) else UNBOUNDED
        codes = encode(x, bits, Key(state, seed), group=group, stochastic=stochastic, bounds=bounds)
        expected = reference.encode_flat(x, bits, state, seed, group, stochastic, bounds)
        assert bits_equal(codes.data, expected[0]), (seed, n)
        assert bits_equal(codes.params, expected[1]), (seed, n)
        wanted = reference.decode_flat(*expected, bits, group, len(x), dtype, bounds)
        torch.testing.assert_close(decode(codes), wanted, rtol=0, atol=0, equal_nan=True)


def test_the_definition_is_equal_on_both_devices():
    x = random_tensor(100_000, torch.float32, 4)
    here = reference.encode_flat(x, 4, noise_state(1), 2, 256, True)
    there = reference.encode_flat(x.to(CUDA), 4, noise_state(1, device=CUDA), 2, 256, True)
    assert all(bits_equal(a, b.cpu()) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize("m", [777, 704, 6400])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_samples(dtype, m):
    bits = torch.randint(1, 9, (300,))
    x = torch.randn(300, m).to(dtype)
    capacity = int(bits.sum()) - 9
    stored = int(bits.cumsum(0)[bits.cumsum(0) <= capacity][-1]) * 4 * -(-m // 32)  # bytes
    here = encode(x, bits, Key(noise_state(1), 2), capacity=capacity)
    there = encode(
        x.to(CUDA), bits.to(CUDA), Key(noise_state(1, device=CUDA), 2), capacity=capacity
    )
    assert bits_equal(here.data[:stored], there.data[:stored].cpu())
    assert bits_equal(here.params, there.params.cpu())
    torch.testing.assert_close(decode(there).cpu(), decode(here), rtol=0, atol=0, equal_nan=True)


def test_the_current_stream_is_used():
    """The other stream is kept busy; a launch there would come too late."""
    key = Key(noise_state(1, device=CUDA), 2)
    x = torch.randn(1 << 20, device=CUDA)
    expected = decode(encode(x, 4, key))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.equal(decode(encode(x, 4, key)), expected)  # memory for this stream
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    with torch.cuda.stream(side):
        y = decode(encode(x, 4, key))
        found = torch.equal(y, expected)
    assert not torch.cuda.default_stream().query()
    assert found
    torch.cuda.synchronize()


def test_a_captured_step_draws_new_noise():
    state = noise_state(1, device=CUDA)
    x = torch.randn(5000, device=CUDA)

    def step():
        codes = encode(x, 2, Key(state, 7))
        y = decode(codes)
        state[1] += 1
        return codes.data, y

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data, y = step()
    seen = []
    for number in range(3):
        state[1] = number
        graph.replay()
        expected = encode(x, 2, Key(noise_state(1, step=number, device=CUDA), 7))
        assert torch.equal(data, expected.data)
        assert torch.equal(y, decode(expected))
        seen.append(data.clone())
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device():
    state = noise_state(1, device=CUDA)
    x = torch.randn(32, 5000, device=CUDA)
    bits = torch.randint(1, 9, (32,), device=CUDA)

    def all_calls():
        codes = encode(x, 4, Key(state, 1))
        assert codes.flags.shape == (1,)
        decode(encode(x, bits, Key(state, 1), capacity=200))
        decode(codes)
        group_ranges(x)

    all_calls()
    torch.cuda.set_sync_debug_mode("error")
    try:
        all_calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current():
    there = torch.device("cuda", 1)
    x = torch.randn(5000)
    y = decode(encode(x.to(there), 4, Key(noise_state(1, device=there), 2)))
    assert y.device == there
    assert torch.equal(y.cpu(), decode(encode(x, 4, Key(noise_state(1), 2))))
    assert torch.cuda.current_device() == 0


def test_more_elements_than_31_bits_can_count():
    n = (1 << 31) + 1
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs a GPU with 20 GiB")
    x = torch.zeros(n, dtype=torch.float16, device=CUDA)
    x[-300:] = torch.arange(300, device=CUDA).half()
    codes = encode(x, 2, Key(noise_state(1, device=CUDA), 2))
    y = decode(codes)
    assert not bool(y[:-600].any())
    assert ((y[-300:] - x[-300:]).abs() <= 100).all()
    # the last groups alone; their noise has the position that they had
    first = (n - 1000) // 256 * 256
    tail = reference.encode_rows(
        x[first:].view(1, -1), 2, noise_state(1, device=CUDA), 2, 256, False
    )
    nearest = encode(x, 2, Key(noise_state(1, device=CUDA), 2), stochastic=False)
    found = reference.unpack(nearest.data[first // 4 :], 2)
    assert torch.equal(found, tail[0][0].int())
    assert isinstance(codes, Codes)
