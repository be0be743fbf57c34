"""Loads and launches kernels through the CUDA driver, on torch's devices, streams and contexts."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import torch

from quant_gru.kernel_runtime import _native
from quant_gru.kernel_runtime.cuda import compiler, cublaslt
from quant_gru.kernel_runtime.cuda.cublaslt import Product
from quant_gru.kernel_runtime.cuda.graph_capture import refuse_in_capture
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.kernel_runtime.cuda.sources import RUNTIME, Sources
from quant_gru.kernel_runtime.cuda.streams import streams_of
from quant_gru.kernel_runtime.errors import KernelError, raised_as

_MISSING: Any = object()
_OLDEST = (8, 0)
_PROBE = Kernel.of("probe", "probe", {})


def _late(grid: Grid) -> Grid:
    return grid._replace(early=False)


Launch: TypeAlias = Callable[[_native.Launches], None]
"""Adds a launch to a list of native code, and owns the arguments."""


class Prepared:
    """Launches that can be started repeatedly, in order.

    Args:
        device: The device of the launches.
        load: Returns the launches. It is called at their first use or start, because kernels may
            still be compiling before that.
    """

    def __init__(self, device: Device, load: Callable[[], Sequence[Launch]]) -> None:
        self._device, self._load = device, load

    @cached_property
    def launches(self) -> Sequence[Launch]:
        """The launches."""
        return self._load()

    @cached_property
    def native(self) -> _native.Launches:
        """The launches in native code; valid as long as this object is alive."""
        found = _native.Launches(self._device.native)
        for add_to in self.launches:
            add_to(found)
        return found

    def start(self, stream: int) -> None:
        """Start the kernels on a stream."""
        status = self.native.start(stream)
        if status:
            self._device.raise_for(status)


class Multiplication(NamedTuple):
    """A prepared GEMM.

    Attributes:
        launch: The launch of the GEMM.
        record: The addresses of its matrices and its workspace, see `cublaslt.Described`.
        workspace: Size of its workspace in bytes.
    """

    launch: Prepared
    record: Any
    workspace: int


class Device:
    """One GPU and the kernels of a package loaded on it. In tests, the host stands in for it.

    Args:
        index: Index of the GPU.
        sources: The sources of the kernels, and the class of errors about them.

    Attributes:
        native: The same GPU in native code.
        arch: The architecture for which kernels are compiled, such as 'sm_90a'.
        stream: Returns torch's current stream, which waits for tensors shared by all calls.
    """

    def __init__(self, index: int, sources: Sources = RUNTIME) -> None:
        self._error = sources.error
        self.index = index
        self.stream = streams_of(index).current
        compiler.native(sources)  # before several threads need it
        code = partial(compiler.machine_code, sources)
        self.native = _native.Device(_driver(), index, code, _start_thread, sources.records_graphs)
        self.arch, self.has_clusters = self.native.arch, self.native.has_clusters
        # the handle of a function, by kernel and cluster, and the most shared memory of a block
        self._loaded: dict[tuple[Kernel, int], tuple[int, int]] = {}
        self._clusters: dict[int, int] | None = None
        self._library: Any = _MISSING
        if self.has_clusters:
            # The probe compiles while the numbers of a plan are computed.
            self.expect(_PROBE)

    def clusters(self) -> Mapping[int, int]:
        """Return blocks per cluster -> number of such clusters that run at once."""
        if self._clusters is None:
            if self.has_clusters:
                self._refuse_in_capture(_PROBE)
            with raised_as(self._error):
                self._clusters = self.native.clusters()
        return self._clusters

    def expect(self, kernel: Kernel) -> None:
        """Start compiling a kernel that will be prepared or launched."""
        self.native.expect(kernel.source, _texts(kernel))

    def launch(
        self, kernel: Kernel, grid: Grid, arguments: ctypes.Structure | ctypes.Array[Any]
    ) -> None:
        """Start a kernel on torch's current stream of this device.

        Raises:
            sources.error: The kernel is not loaded yet and the stream is being captured, or the
                driver returns an error.
        """
        given = (self._ready(kernel, grid), _late(grid), ctypes.addressof(arguments))
        status = self.native.launch(*given, self.stream())
        if status:
            self.raise_for(status)

    def prepare(
        self, kernel: Kernel, grid: Grid, arguments: ctypes.Structure | ctypes.Array[Any]
    ) -> Prepared:
        """Start compiling a kernel and prepare its launch, which raises the errors of `launch`."""
        self.expect(kernel)

        def load() -> list[Launch]:
            function = self._ready(kernel, grid)
            known = grid if self.has_clusters else _late(grid)
            return [lambda to: to.add(function, known, ctypes.addressof(arguments))]

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
        record = found.record

        def add_to(launches: _native.Launches) -> None:
            launches.add_product(found.function, ctypes.addressof(record))

        return Multiplication(Prepared(self, lambda: [add_to]), record, found.workspace)

    def join(self, launches: Sequence[Prepared]) -> Prepared:
        """Combine prepared launches into one that a single native call starts."""
        found = [each for launch in launches for each in launch.launches]
        return Prepared(self, lambda: found)

    def raise_for(self, status: int) -> None:
        """Raise the error for the status of a launch; a negative status is of cuBLASLt."""
        if status < 0:
            raise self._error(f"Expected cuBLASLt to succeed, got status {-status}")
        with raised_as(self._error):
            self.native.check(status)

    def _ready(self, kernel: Kernel, grid: Grid) -> int:
        """Return the handle of a loaded function."""
        function, shared_bytes = self._loaded.get((kernel, grid.cluster), (0, -1))
        if shared_bytes < grid.shared_bytes:
            self._refuse_in_capture(kernel)
            given = kernel.source, kernel.function, _texts(kernel), grid
            with raised_as(self._error):
                function = self.native.load(*given)
            self._loaded[kernel, grid.cluster] = function, grid.shared_bytes
        return function

    def _refuse_in_capture(self, kernel: Kernel) -> None:
        what = f"a kernel that is not loaded yet ({kernel.source})"
        refuse_in_capture(torch.device("cuda", self.index), what, self._error)


def _texts(kernel: Kernel) -> dict[str, str]:
    return {name: str(value) for name, value in kernel.macros}


def _start_thread(work: Callable[[], None]) -> None:
    # Never a daemon, even if a daemon starts it: the process waits for it at exit.
    try:
        threading.Thread(target=work, daemon=False).start()
    except RuntimeError:
        pass  # no thread can be started: the kernel is compiled when it is loaded


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
        return (
            f"Expected compute capability {_OLDEST[0]}.{_OLDEST[1]} or later, "
            f"got {capability[0]}.{capability[1]}"
        )
    try:
        _driver()
    except KernelError as error:
        return str(error)
    return compiler.missing()


def machine_of(device: torch.device, sources: Sources = RUNTIME) -> Device:
    """Return the GPU of a torch device, with the kernels of a package."""
    return _device(torch.cuda.current_device() if device.index is None else device.index, sources)


@cache
def _device(index: int, sources: Sources) -> Device:
    torch.cuda.init()
    with raised_as(sources.error):
        return Device(index, sources)


@cache
def _driver() -> _native.Driver:
    """Return the driver.

    Raises:
        KernelError: It is missing or too old.
    """
    return _native.Driver()
