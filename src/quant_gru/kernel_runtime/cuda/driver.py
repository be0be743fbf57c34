"""Loads and launches kernels through the CUDA driver, on torch's devices, streams and contexts."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch

from quant_gru.kernel_runtime import _native
from quant_gru.kernel_runtime.cuda import compiler, cublaslt
from quant_gru.kernel_runtime.cuda.cublaslt import Described, Product
from quant_gru.kernel_runtime.cuda.graph_capture import refuse_in_capture
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel, Multiplication
from quant_gru.kernel_runtime.cuda.parallel_compile import ParallelCompiler
from quant_gru.kernel_runtime.cuda.sources import RUNTIME, Sources
from quant_gru.kernel_runtime.cuda.streams import streams_of
from quant_gru.kernel_runtime.errors import KernelError, raised_as

_MISSING: Any = object()
_OLDEST = (8, 0)
_WITH_CLUSTERS = (9, 10)
_CLUSTERS = (2, 4, 8, 16)
_PORTABLE = 8
_PROBE = Kernel.of("probe", "probe", {})
# Clusters are counted for blocks so large that each occupies a whole multiprocessor.
_PROBE_THREADS, _PROBE_BYTES = 256, 128 << 10
_LAUNCH = ("cuLaunchKernelEx", "cuCtxGetCurrent", "cuCtxSetCurrent")
# in the order of `GraphDriver` in native/recorded_graphs.hpp
_GRAPHS = (
    "cuStreamCreate",
    "cuStreamIsCapturing",
    "cuStreamBeginCapture",
    "cuStreamEndCapture",
    "cuThreadExchangeStreamCaptureMode",
    "cuGraphInstantiateWithFlags",
    "cuGraphUpload",
    "cuGraphLaunch",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
)


def _late(grid: Grid) -> Grid:
    return grid._replace(early=False)


class Loaded(NamedTuple):
    """A loaded kernel.

    Attributes:
        function: The driver's handle.
        shared_bytes: Maximum shared memory of a block.
    """

    function: Any
    shared_bytes: int


class _Launch(NamedTuple):
    function: int
    grid: Grid
    arguments: ctypes.Structure | ctypes.Array[Any]

    def add_to(self, launches: _native.Launches) -> None:
        launches.add(self.function, self.grid, ctypes.addressof(self.arguments))


class _Multiply(NamedTuple):
    described: Described

    def add_to(self, launches: _native.Launches) -> None:
        launches.add_product(self.described.function, ctypes.addressof(self.described.record))


class Prepared:
    """Launches that can be started repeatedly, in order.

    Args:
        device: The device of the launches.
        load: Returns the launches. It is called at their first use or start, because kernels may
            still be compiling before that.
    """

    def __init__(self, device: Device, load: Callable[[], Sequence[_Launch | _Multiply]]) -> None:
        self._device, self._load = device, load

    @cached_property
    def launches(self) -> Sequence[_Launch | _Multiply]:
        """The launches."""
        return self._load()

    @cached_property
    def native(self) -> _native.Launches:
        """The launches in native code; valid as long as this object is alive."""
        found = _native.Launches(self._device.native)
        for each in self.launches:
            each.add_to(found)
        return found

    def start(self, stream: int) -> None:
        """Start the kernels on a stream."""
        status = self.native.start(stream)
        if status:
            self._device.raise_for(status)


class Device:
    """One GPU and the kernels of a package loaded on it.

    Args:
        index: Index of the GPU.
        sources: The sources of the kernels, and the class of errors about them.

    Attributes:
        native: The driver's functions, in the context of this device.
        stream: Returns torch's current stream, which waits for tensors shared by all calls.
    """

    _error: type[Exception] = KernelError

    def __init__(self, index: int, sources: Sources = RUNTIME) -> None:
        self._driver, self._error = _driver(), sources.error
        self.index = index
        self.stream = streams_of(index).current
        capability = torch.cuda.get_device_capability(index)
        if capability < _OLDEST:
            raise self._error(_too_old(capability))
        # GPUs of other major versions have no clusters, or too little memory for our kernels.
        self.has_clusters = capability[0] in _WITH_CLUSTERS
        self.arch = f"sm_{capability[0]}{capability[1]}" + ("a" if capability == (9, 0) else "")
        compiler.native(sources)  # before several threads need it
        self._compiler = ParallelCompiler(self.arch, sources)
        self._context = self._check(self._driver.cuDevicePrimaryCtxRetain(index))
        launch, get_current, set_current = map(_address, _LAUNCH)
        graphs = _graph_functions() if sources.records_graphs else []
        self.native = _native.Driver(launch, get_current, set_current, int(self._context), graphs)
        self._loaded: dict[tuple[Kernel, int], Loaded] = {}
        self._shared: dict[Kernel, int] = {}  # maximum shared memory of a block
        self._modules: dict[tuple[Any, ...], Any] = {}
        self._clusters: dict[int, int] | None = None
        self._library: Any = _MISSING
        self._lock = threading.RLock()
        if self.has_clusters:
            # The probe compiles while the numbers of a plan are computed.
            self.expect(_PROBE)

    def clusters(self) -> Mapping[int, int]:
        """Return blocks per cluster -> number of such clusters that run at once."""
        if self._clusters is None:
            blocks = torch.cuda.get_device_properties(self.index).multi_processor_count
            self._clusters = {1: blocks, **self._count_clusters()}
        return self._clusters

    def expect(self, kernel: Kernel) -> None:
        """Start compiling a kernel that will be prepared or launched."""
        if (kernel.source, kernel.macros) not in self._modules:
            self._compiler.expect(kernel)

    def launch(
        self, kernel: Kernel, grid: Grid, arguments: ctypes.Structure | ctypes.Array[Any]
    ) -> None:
        """Start a kernel on torch's current stream of this device.

        Raises:
            sources.error: The kernel is not loaded yet and the stream is being captured, or the
                driver returns an error.
        """
        function, _ = self._ready(kernel, grid)
        given = (int(function), _late(grid), ctypes.addressof(arguments))
        status = self.native.launch(*given, self.stream())
        if status:
            self.raise_for(status)

    def prepare(
        self, kernel: Kernel, grid: Grid, arguments: ctypes.Structure | ctypes.Array[Any]
    ) -> Prepared:
        """Start compiling a kernel and prepare its launch, which raises the errors of `launch`."""
        self.expect(kernel)

        def load() -> list[_Launch]:
            function, _ = self._ready(kernel, grid)
            known = grid if self.has_clusters else _late(grid)
            return [_Launch(int(function), known, arguments)]

        return Prepared(self, load)

    def multiply(self, product: Product) -> Multiplication | None:
        """Prepare a GEMM; return None if cuBLASLt is not available or does not support it."""
        if self._library is _MISSING:
            functions = cublaslt.loaded()
            with torch.cuda.device(self.index):
                self._library = None if functions is None else cublaslt.Library(functions)
        if self._library is None or not self._library.works:
            return None
        with torch.cuda.device(self.index):
            found = self._library.describe(product)
        if found is None:
            return None
        product_of = [_Multiply(found)]
        return Multiplication(Prepared(self, lambda: product_of), found.record, found.workspace)

    def join(self, launches: Sequence[Prepared]) -> Prepared:
        """Combine prepared launches into one that a single native call starts."""
        found = [each for launch in launches for each in launch.launches]
        return Prepared(self, lambda: found)

    def raise_for(self, status: int) -> None:
        """Raise the error for the status of a launch; a negative status is of cuBLASLt."""
        if status < 0:
            raise self._error(f"Expected cuBLASLt to succeed, got status {-status}")
        self._check((self._driver.CUresult(status),))

    def _ready(self, kernel: Kernel, grid: Grid) -> Loaded:
        loaded = self._loaded.get((kernel, grid.cluster))
        if loaded is None or loaded.shared_bytes < grid.shared_bytes:
            with self._current():
                loaded = self._load(kernel, grid)
        return loaded

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make this device's context current, then restore the previous one, which torch uses."""
        driver = self._driver
        before = self._check(driver.cuCtxGetCurrent())
        if int(before) == int(self._context):
            yield
            return
        self._check(driver.cuCtxSetCurrent(self._context))
        try:
            yield
        finally:
            self._check(driver.cuCtxSetCurrent(before))

    def _load(self, kernel: Kernel, grid: Grid) -> Loaded:
        what = f"a kernel that is not loaded yet ({kernel.source})"
        refuse_in_capture(torch.device("cuda", self.index), what, self._error)
        driver = self._driver
        attribute = driver.CUfunction_attribute
        with self._lock:
            key = (kernel.source, kernel.macros)
            module = self._modules.get(key)
            if module is None:
                code = self._compiler.take(kernel)
                module = self._modules[key] = self._check(driver.cuModuleLoadData(code))
            function = self._check(driver.cuModuleGetFunction(module, kernel.function.encode()))
            # Launches with other cluster sizes share the function, and may need more shared memory.
            shared = max(grid.shared_bytes, self._shared.get(kernel, 0))
            self._shared[kernel] = shared
            settings = {attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: shared}
            if grid.cluster > _PORTABLE:
                settings[attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
            for name, value in settings.items():
                self._check(driver.cuFuncSetAttribute(function, name, value))
            loaded = self._loaded[kernel, grid.cluster] = Loaded(function, grid.shared_bytes)
        return loaded

    def _count_clusters(self) -> dict[int, int]:
        if not self.has_clusters:
            return {}
        driver, found = self._driver, {}
        with self._current():
            for blocks in _CLUSTERS:
                grid = Grid((blocks, 1), _PROBE_THREADS, blocks, _PROBE_BYTES)
                function = self._load(_PROBE, grid).function
                config, wanted = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
                config.gridDimX, config.blockDimX = blocks, _PROBE_THREADS
                config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
                config.sharedMemBytes = _PROBE_BYTES
                wanted.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                wanted.value.clusterDim.x = blocks
                wanted.value.clusterDim.y = wanted.value.clusterDim.z = 1
                config.attrs, config.numAttrs = [wanted], 1
                status, count = driver.cuOccupancyMaxActiveClusters(function, config)
                if int(status) == 0 and count:
                    found[blocks] = count
        return found

    def _check(self, result: tuple[Any, ...]) -> Any:
        status, *rest = result
        if int(status) != 0:
            _, text = self._driver.cuGetErrorName(status)
            name = text.decode() if isinstance(text, bytes) else str(status)
            raise self._error(f"Expected the CUDA driver to succeed, got {name}")
        return rest[0] if rest else None


def available(device: torch.device) -> bool:
    """Whether kernels can be compiled for a device and run on it."""
    return device.type == "cuda" and missing(device) is None


def missing(device: torch.device) -> str | None:
    """Return why kernels cannot run on a CUDA device of torch; None if they can."""
    return _missing(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _missing(index: int) -> str | None:
    if torch.version.hip is not None:
        return f"Expected a GPU of NVIDIA, got one of ROCm {torch.version.hip}"
    capability = torch.cuda.get_device_capability(index)
    if capability < _OLDEST:
        return _too_old(capability)
    try:
        _driver()
    except KernelError as error:
        return str(error)
    return compiler.missing()


def _too_old(capability: tuple[int, int]) -> str:
    return (
        f"Expected compute capability {_OLDEST[0]}.{_OLDEST[1]} or later, "
        f"got {capability[0]}.{capability[1]}"
    )


def machine_of(device: torch.device, sources: Sources = RUNTIME) -> Device:
    """Return the GPU of a torch device, with the kernels of a package."""
    return _device(torch.cuda.current_device() if device.index is None else device.index, sources)


@cache
def _device(index: int, sources: Sources) -> Device:
    torch.cuda.init()
    with raised_as(sources.error):
        return Device(index, sources)


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise compiler.missing_package(error) from error
    return driver


@cache
def _address(name: str) -> int:
    """Return the address of a function of the driver that native code calls."""
    driver = _driver()
    flags = int(driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT)
    status, address, *_ = driver.cuGetProcAddress(name.encode(), 12000, flags)
    if int(status) != 0 or not address:
        raise KernelError(f"Expected a driver of CUDA 12 or later, got {status!s} for {name}")
    return int(address)


@cache
def _graph_functions() -> list[int]:
    """Return the addresses of the functions of graphs; none if the driver lacks one."""
    try:
        return [_address(name) for name in _GRAPHS]
    except KernelError:
        return []
