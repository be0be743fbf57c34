"""Products among launches: what a library is told, and that a stand-in's give torch's."""

import gc

import pytest
import torch
from fake_driver import FakeDriver
from stub_cublas import FAILED, Cublas

from quant_gru.kernel_runtime.cuda import cublaslt, driver
from quant_gru.kernel_runtime.cuda.cublaslt import Product
from quant_gru.kernel_runtime.cuda.workspace import Memory
from quant_gru.kernel_runtime.errors import KernelError
from quant_gru.kernels.cuda.backward.steps import add_steps, matrix_in
from quant_gru.kernels.cuda.machine import machine_of
from quant_gru.kernels.cuda.planned_launches import Steps


class Device(driver.Device):
    """A device that knows nothing but a library."""

    def __init__(self, library):
        self._driver = FakeDriver()
        self.native = self._driver.device()
        self.index, self._library, self._error = 0, library, KernelError


@pytest.fixture
def cublas():
    return Cublas()


@pytest.fixture
def device(cublas, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    return Device(cublaslt.Library(cublas.functions))


def operands(m, n, k, transposed):
    generator = torch.Generator().manual_seed(m + n + k)
    left = torch.randn(*((k, m) if transposed else (m, k)), generator=generator).bfloat16()
    return left, torch.randn(k, n, generator=generator).bfloat16()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_is_that_of_the_matrices(cublas, device, transposed):
    m, n, k = 6, 5, 7
    left, right = operands(m, n, k, transposed)
    made = device.multiply(Product(m, n, k, transposed))
    result, memory = torch.empty(m, n), Memory()
    for name in "cd":
        memory.point(made.record, name)
    made.record.a, made.record.b = right.data_ptr(), left.data_ptr()
    made.record.workspace = 4096
    memory.move(result.data_ptr())
    made.launch.start(33)
    expected = (left.t() if transposed else left).double() @ right.double()
    assert torch.equal(result, expected.float())
    # the library counts in columns
    assert cublas.started == [(n, m, k, 4096, 33)]
    assert made.workspace == 512


def test_what_is_made_goes(cublas, device):
    before = dict(cublas.alive)
    made = device.multiply(Product(2, 3, 4, False))
    # an operation and layouts; what was preferred has gone
    assert len(cublas.alive) == len(before) + 4
    del made
    gc.collect()
    assert cublas.alive == before


@pytest.mark.parametrize(
    "name", ["MatmulDescCreate", "MatrixLayoutCreate", "MatmulAlgoGetHeuristic"]
)
def test_torch_makes_what_the_library_refuses(cublas, device, name):
    before = len(cublas.alive)
    cublas.refuses = name
    assert device.multiply(Product(2, 3, 4, True)) is None
    gc.collect()
    assert len(cublas.alive) == before


def test_no_library_no_product(cublas, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    assert Device(None).multiply(Product(2, 3, 4, True)) is None
    cublas.refuses = "Create"
    library = cublaslt.Library(cublas.functions)
    assert not library.works
    assert Device(library).multiply(Product(2, 3, 4, True)) is None


def test_failures_are_told(cublas, device):
    made = device.multiply(Product(2, 3, 4, True))
    made.record.workspace_size = 1
    with pytest.raises(KernelError, match=f"cuBLASLt to succeed, got status {FAILED}"):
        made.launch.start(0)


@pytest.mark.skipif(torch.version.cuda is not None, reason="not for builds of torch with CUDA")
def test_there_is_no_library_without_cuda():
    assert cublaslt.loaded() is None


@pytest.mark.skipif(cublaslt.loaded() is None, reason="needs a GPU's library")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("m", "n", "k"), [(384, 64, 1600), (60, 5, 21), (1536, 512, 4096)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_gpus_products_also_in_graphs(m, n, k, transposed):
    gpu = machine_of(torch.device("cuda", 0))
    left, right = (each.cuda() for each in operands(m, n, k, transposed))
    made = gpu.multiply(Product(m, n, k, transposed))
    if made is None:
        assert min(n, k) % 8
        return
    result = torch.empty(m, n, device="cuda")
    workspace = torch.empty(max(1, made.workspace), dtype=torch.int8, device="cuda")
    made.record.a, made.record.b = right.data_ptr(), left.data_ptr()
    made.record.c = made.record.d = result.data_ptr()
    made.record.workspace = workspace.data_ptr()
    made.launch.start(gpu.stream())
    first = result.clone()
    exact = (left.t() if transposed else left).double() @ right.double()
    assert (first - exact).norm() < 1e-4 * exact.norm()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.launch.start(gpu.stream())
    result.zero_()
    graph.replay()
    assert torch.equal(result, first)


def matrices(space, *sizes, element=3):
    """Matrices in a memory of a call, 512 bytes each, with random numbers."""
    found = [(512 * i, *size, element) for i, size in enumerate(sizes)]
    for each in found:
        matrix = matrix_in(space, each)
        matrix.copy_(torch.randn(matrix.shape))
    return found


@pytest.mark.parametrize("element", [3, 2, 4])
def test_last_products_are_launches_that_share_a_workspace(cublas, device, element):
    """Torch makes those of other kinds."""
    space = torch.zeros(4096, dtype=torch.int8)
    dWx, weights, codes = matrices(space, (8, 6), (6, 5), (8, 5), element=element)
    steps, made = Steps(device, 3), [torch.empty(8, 5), torch.empty(6, 5)]
    products = [((dWx, weights, False), (1, 0)), ((dWx, codes, True), (2, 0))]
    size = add_steps(steps, [(None, (), products)], 1536, 0, 1)
    bases = [each.data_ptr() for each in (space, *made)]
    steps.native(None).start(7, bases, space, made)
    launched = element == 3
    assert size == 1536 + 512 * launched
    assert {each[3:] for each in cublas.started} == ({(bases[0] + 1536, 7)} if launched else set())
    left, *right = (matrix_in(space, each).double() for each in (dWx, weights, codes))
    for found, expected in zip(made, (left @ right[0], left.t() @ right[1]), strict=True):
        torch.testing.assert_close(found, expected.float())


def test_torch_makes_products_without_terms(cublas, device):
    space = torch.zeros(4096, dtype=torch.int8)
    left, right = matrices(space, (0, 3), (0, 5))
    steps, made = Steps(device, 2), [torch.empty(3, 5)]
    size = add_steps(steps, [(None, (), [((left, right, True), (1, 0))])], 1024, 0, 1)
    steps.native(None).start(7, [space.data_ptr(), made[0].data_ptr()], space, made)
    assert size == 1024
    assert not cublas.started
    assert not made[0].any()
