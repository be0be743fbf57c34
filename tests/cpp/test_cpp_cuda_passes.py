"""The passes over memory of a GPU: on a GPU, and with stand-ins for its libraries.

On a machine with a GPU, run `pytest tests/cpp/test_cpp_cuda_passes.py -v`. Stand-ins run kernels
and products on the host. For them all memory is memory of a GPU.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from c_access import Access
from code_passes import Codes, Drawn
from cpp_build import NEEDS_TOOLS, run
from cuda_library import nvrtc
from float_passes import SIZES, Passes, check_against_gru

from quant_gru import QuantConfig

pytestmark = NEEDS_TOOLS
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float", "double"])
ZONEOUT = pytest.mark.parametrize("zoneout", [False, True], ids=["plain", "zoneout"])
STEPS = pytest.mark.parametrize("by_steps", [False, True], ids=["run", "iterate"])


@pytest.fixture
def gpu(build: Path, monkeypatch: pytest.MonkeyPatch) -> Access:
    """The library on a GPU."""
    if nvrtc():
        monkeypatch.setenv("QUANT_GRU_NVRTC", str(nvrtc()))
    torch.zeros(1, device="cuda")  # makes the context current, which the next line expects
    torch.cuda.current_blas_handle()  # PyTorch's cuBLAS is open from now on
    return Access(next((build / "cpp/tests").glob("libaccess.*")))


@pytest.fixture(scope="module")
def copy(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the library, which opens libraries of its own."""
    folder = tmp_path_factory.mktemp("stand_in")
    return Path(shutil.copy(next((build / "cpp/tests").glob("libaccess.*")), folder / "access.so"))


@pytest.fixture
def stand_in(build: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The library with stand-ins for the driver, NVRTC and cuBLAS."""
    tests = build / "cpp/tests"
    cuda, cublas = (str(next(tests.glob(f"libfake_{name}.*"))) for name in ("cuda", "cublas"))
    for name in ("CUDA_DRIVER", "NVRTC"):
        monkeypatch.setenv(f"QUANT_GRU_{name}", cuda)
    monkeypatch.setenv("QUANT_GRU_CUBLAS", cublas)
    monkeypatch.setenv("QUANT_GRU_CACHE", "/dev/null")
    monkeypatch.setenv("FAKE_CUDA_HOST", str(copy.parent))
    monkeypatch.setenv("FAKE_CUDA_ALL_MEMORY", "1")
    return StandIn(copy, ctypes.CDLL(cuda))


class StandIn(Access):
    """The library, with the stand-in for the driver."""

    def __init__(self, path: Path, fake: ctypes.CDLL) -> None:
        super().__init__(path)
        self.path, self.fake = path, fake


@STEPS
@ZONEOUT
@DTYPES
@pytest.mark.parametrize("size", [*SIZES[:3], (2, 11, 5, 300)], ids=str)
def test_stand_ins(
    stand_in: StandIn, size: tuple[int, ...], dtype: torch.dtype, zoneout: bool, by_steps: bool
) -> None:
    """Kernels, products and their order are right."""
    before = stand_in.fake.fake_launches()
    check_against_gru(stand_in, size, dtype, zoneout=zoneout, by_steps=by_steps)
    # a kernel for each step of both passes; for each backward one that ends dh, one for the biases
    calls = size[0] if by_steps else 1
    assert stand_in.fake.fake_launches() - before == 2 * size[0] + 2 * calls


@DTYPES
def test_stand_ins_with_many_rows(stand_in: StandIn, dtype: torch.dtype) -> None:
    """Products with R are cuBLAS's."""
    before = stand_in.fake.fake_launches()
    check_against_gru(stand_in, (2, 33, 3, 600), dtype, zoneout=True, by_steps=False)
    assert stand_in.fake.fake_launches() - before == 2 * 2 + 1


def test_states_in_place(stand_in: StandIn) -> None:
    """A step may write its state over the one before."""
    gru, x, h = torch.nn.GRU(3, 40), torch.randn(1, 2, 3), torch.randn(2, 40)
    with torch.no_grad():
        expected = gru(x, h[None])[0][0]
    assert torch.allclose(Passes(stand_in, gru, True).in_place(x[0], h), expected, atol=1e-6)


def test_zoneout_in_inference(stand_in: StandIn) -> None:
    gru, x, h0 = torch.nn.GRU(3, 5), torch.randn(4, 2, 3), torch.randn(2, 5)
    found, _ = Passes(stand_in, gru, False).forward(x, h0, 0.25, None, False)
    plain, _ = Passes(stand_in, gru, False).forward(x[:1], h0, 0.0, None, False)
    assert torch.allclose(found[1], 0.25 * h0 + 0.75 * plain[1], atol=1e-6)


def test_memory_of_one_place(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays on the host and on a GPU do not mix; without memory of a GPU, the CPU computes."""
    monkeypatch.delenv("FAKE_CUDA_ALL_MEMORY")
    gru, x, h0 = torch.nn.GRU(3, 5), torch.randn(4, 2, 3), torch.randn(2, 5)
    passes, before = Passes(stand_in, gru, False), stand_in.fake.fake_launches()
    passes.forward(x, h0, 0.0, None, True)
    assert stand_in.fake.fake_launches() == before
    memory = ctypes.c_uint64()
    stand_in.fake.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(3 * 5 * 4))
    passes.bx = torch.frombuffer(
        (ctypes.c_char * 60).from_address(memory.value), dtype=torch.float32
    )
    with pytest.raises(ValueError, match=r"Expected bx to be on the host as h is, got .* GPU 0"):
        passes.forward(x, h0, 0.0, None, True)
    stand_in.fake.cuMemFree_v2(memory)


@pytest.mark.parametrize("seed", [2, 4])
def test_codes_with_stand_ins(stand_in: StandIn, seed: int) -> None:
    """Codes of 8 and 16 bits; a second call with other steps and the same weights."""
    case = Codes(seed, 0.0)
    drawn = Drawn(case, seed, zoneout=False)
    expected = case.gru.forward_integer(drawn.x, drawn.h0[None])[0].to(torch.int64)
    assert torch.equal(case.run(stand_in, drawn.x, drawn.h0), expected)
    before = stand_in.fake.fake_launches()
    assert torch.equal(case.run(stand_in, drawn.x[:1], drawn.h0), expected[:1])
    assert stand_in.fake.fake_launches() > before


def trained(
    access: Access, case: Codes, drawn: Drawn, device: str, by_steps: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """States (T, N, H) of a forward in training, and all gradients added to 1."""
    mask = drawn.code_mask
    h = case.run(
        access, drawn.x, drawn.h0, mask=mask, training=True, by_steps=by_steps, device=device
    )
    states = torch.cat((drawn.h0[None], h))
    return h, case.gradients(
        access, drawn.x, states, drawn.grad, mask, start=1.0, by_steps=by_steps, device=device
    )


@pytest.mark.parametrize(
    ("seed", "zoneout", "by_steps"), [(2, True, False), (2, False, True), (4, True, True)]
)
def test_training_on_codes_with_stand_ins(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, seed: int, zoneout: bool, by_steps: bool
) -> None:
    """Codes of 8 and 16 bits equal the CPU's, and gradients are close to the CPU's."""
    case = Codes(seed, 0.0)
    drawn = Drawn(case, seed, zoneout)
    before = stand_in.fake.fake_launches()
    found, gradients = trained(stand_in, case, drawn, "cpu", by_steps)
    assert stand_in.fake.fake_launches() > before + 5
    monkeypatch.delenv("FAKE_CUDA_ALL_MEMORY")
    states, expected = trained(stand_in, case, drawn, "cpu", by_steps)
    assert torch.equal(found, states)
    for name, gradient in expected.items():
        error = float((gradients[name] - gradient).norm() / gradient.norm())
        assert error < 1e-5, f"{name}: {error}"


SMALL = ("--input", "8", "--hidden", "16", "--steps", "3", "--batch", "2", "--repeats", "0")


def test_gru_example_with_stand_ins(stand_in: StandIn, build: Path, tmp_path: Path) -> None:
    """The example compares the integers of a GPU with those of the CPU."""
    QuantConfig.int8().to_json(tmp_path / "int8.json")
    printed = run(build / "gru_example", "--cuda", *SMALL, "--config", tmp_path / "int8.json")
    assert printed.count("the same on the GPU") == 1


@pytest.mark.parametrize("variable", ["QUANT_GRU_CUBLAS", "QUANT_GRU_NVRTC"])
def test_missing_libraries(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    """The error names what is missing and what to do."""
    monkeypatch.setenv(variable, "/nowhere/library.so")
    fresh = Access(Path(shutil.copy(stand_in.path, tmp_path / "fresh.so")))
    passes = Passes(fresh, torch.nn.GRU(3, 5), False)
    with pytest.raises(ValueError, match=rf"to be installed \(set {variable} to"):
        passes.forward(torch.randn(4, 2, 3), torch.randn(2, 5), 0.0, None, True)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_kernels_compile(
    build: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arch: str
) -> None:
    """NVRTC compiles the kernels, without a GPU."""
    if not nvrtc():
        pytest.skip("needs NVRTC")
    monkeypatch.setenv("QUANT_GRU_NVRTC", str(nvrtc()))
    monkeypatch.setenv("QUANT_GRU_CACHE", "/dev/null")
    native = ctypes.CDLL(shutil.copy(build / "cpp/tests/libcuda_access.so", tmp_path / "fresh.so"))
    native.compile_kernel.restype = ctypes.c_char_p
    for source, macros in (
        (b"units", b"REAL=float STEP_ROWS=1"),
        (b"units", b"REAL=double STEP_ROWS=8"),
        (b"code_conversions", b"CODE=int8_t"),
        (b"code_conversions", b"CODE=int16_t"),
    ):
        told = native.compile_kernel(b"passes/" + source, macros, arch.encode()).decode()
        assert told.isdigit(), told


@NEEDS_GPU
@STEPS
@ZONEOUT
@DTYPES
@pytest.mark.parametrize("size", [*SIZES, (50, 64, 128, 256)], ids=str)
def test_on_a_gpu(
    gpu: Access, size: tuple[int, ...], dtype: torch.dtype, zoneout: bool, by_steps: bool
) -> None:
    """Beside nn.GRU, with a handle of the library's own and on the default stream."""
    set_handles(gpu, None, None)
    check_against_gru(gpu, size, dtype, zoneout=zoneout, by_steps=by_steps, device="cuda")


@NEEDS_GPU
@pytest.mark.parametrize(("weights", "by_steps"), [("cpu", False), ("cuda", True)])
@pytest.mark.parametrize("seed", [2, 3, 4, 5])
def test_codes_on_a_gpu(gpu: Access, seed: int, weights: str, by_steps: bool) -> None:
    set_handles(gpu, None, None)
    zoneout = (0.0, 0.3)[seed % 2]
    case = Codes(seed, zoneout)
    drawn = Drawn(case, seed, zoneout=False)
    expected = case.gru.forward_integer(drawn.x, drawn.h0[None])[0].to(torch.int64)
    found = case.run(
        gpu, drawn.x, drawn.h0, p=zoneout, by_steps=by_steps, device="cuda", weights=weights
    )
    assert torch.equal(found, expected)


@NEEDS_GPU
@pytest.mark.parametrize(
    ("seed", "size"),
    [*((seed, None) for seed in range(12)), (2, (64, 128, 16, 50)), (4, (100, 700, 33, 6))],
    ids=str,
)
def test_training_on_codes_on_a_gpu(
    gpu: Access, seed: int, size: tuple[int, int, int, int] | None
) -> None:
    """Codes and gradients are those of QuantGRU on this GPU, bit for bit."""
    set_handles(gpu, torch.cuda.current_blas_handle(), None)
    case = Codes(seed, 0.0, size)
    drawn = Drawn(case, seed, zoneout=seed % 3 == 0)
    y, expected = drawn.python(case, "cuda")
    h = case.run(
        gpu, drawn.x, drawn.h0, mask=drawn.code_mask, training=True, device="cuda", weights="cuda"
    )
    assert torch.equal(case.q["output.h"].dequantize(h), y.cpu())
    states = torch.cat((drawn.h0[None], h))
    for by_steps in (False, True):
        found = case.gradients(
            gpu, drawn.x, states, drawn.grad, drawn.code_mask, by_steps=by_steps, device="cuda"
        )
        for name, gradient in expected.items():
            if by_steps:  # products of other sizes round at other places
                assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-4), name
            else:
                assert torch.equal(found[name], gradient), name


@NEEDS_GPU
def test_training_on_codes_in_a_graph(gpu: Access) -> None:
    """A captured backward adds the same gradients at each replay; weights are on the host."""
    side = torch.cuda.Stream()
    set_handles(gpu, None, side)
    case = Codes(2, 0.0, (64, 128, 16, 50))
    drawn = Drawn(case, 2, zoneout=True)
    with torch.cuda.stream(side):
        h, _ = trained(gpu, case, drawn, "cuda", by_steps=False)
        found, run = case.backward(
            gpu, drawn.x, torch.cat((drawn.h0[None], h)), drawn.grad, drawn.code_mask,
            device="cuda", weights="cpu",
        )  # fmt: skip
        run()
        once = {name: each.clone() for name, each in found.items()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            run()
        for each in found.values():
            each.zero_()
        graph.replay()
        for name, gradient in once.items():
            assert torch.equal(found[name], gradient), name


@NEEDS_GPU
@pytest.mark.usefixtures("gpu")
def test_gru_example_on_a_gpu(build: Path) -> None:
    printed = run(build / "gru_example", "--cuda", *SMALL)
    assert printed.count("the same on the GPU") == 4


@NEEDS_GPU
@DTYPES
@pytest.mark.parametrize("own", [False, True], ids=["given", "own"])
def test_user_stream(gpu: Access, dtype: torch.dtype, own: bool) -> None:
    """Passes run on the caller's stream, with the caller's handle or with their own."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        set_handles(gpu, None if own else torch.cuda.current_blas_handle(), side)
        check_against_gru(gpu, (9, 8, 40, 64), dtype, zoneout=True, by_steps=False, device="cuda")


@NEEDS_GPU
@DTYPES
@pytest.mark.parametrize("own", [False, True], ids=["given", "own"])
def test_cuda_graph(gpu: Access, dtype: torch.dtype, own: bool) -> None:
    """A captured pass launches on its stream only, and its replays follow new inputs."""
    T, N, C, H = 12, 16, 40, 64
    tolerance = 1e-5 if dtype is torch.float32 else 1e-12
    torch.manual_seed(0)
    gru = torch.nn.GRU(C, H, dtype=dtype, device="cuda")
    x, h0, grad = (
        torch.randn(size, dtype=dtype, device="cuda") for size in ((T, N, C), (N, H), (T + 1, N, H))
    )
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        set_handles(gpu, None if own else torch.cuda.current_blas_handle(), side)
        passes = Passes(gpu, gru, False)

        def both() -> list[torch.Tensor]:
            h, v = passes.forward(x, h0, 0.0, None, True)
            return [h, v, *passes.backward(x, h, v, grad, None).values()]

        both()  # opens libraries and loads kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            found = both()
        for _ in range(3):
            x.normal_()
            graph.replay()
            for ours, eager in zip(found, both(), strict=True):
                error = float((ours - eager).abs().max() / eager.abs().max())
                assert error <= tolerance, f"a replay differs by {error}"
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            error = float((found[0][1:] - gru(x, h0[None])[0]).abs().max())
        assert error <= tolerance, f"states differ by {error}"


def set_handles(gpu: Access, blas: int | None, stream: torch.cuda.Stream | None) -> None:
    """Set the handle of cuBLAS and the stream of the next passes."""
    number = None if stream is None else stream.cuda_stream
    gpu.native.set_handles(ctypes.c_void_p(blas), ctypes.c_void_p(number))
