"""The native kernels; see executor.py for what the numbers mean. Tensors are given as addresses."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from kernel_runtime._native import Fields, Launches

class Layer:
    """One layer and direction, its numbers laid out for one instruction set."""

    def __init__(self, numbers: dict[str, Any], variant: str) -> None: ...
    @property
    def kind(self) -> str: ...
    def repack(self) -> None: ...
    def run(
        self,
        x: int,
        h0: int,
        out: int,
        last: int,
        T: int,
        N: int,
        lengths: int,
        held: int,
        reverse: bool,
        threads: int,
        /,
    ) -> None: ...
    def backward(self, call: dict[str, Any], /) -> None: ...

class Stack:
    """All layers and directions: float32 in, float32 out."""

    def __init__(
        self,
        layers: list[list[Layer]],
        between: list[list[list[tuple[float, int, int]]]],
        finite: list[int],
        keep: Any,
    ) -> None: ...
    def run(
        self,
        x: int,
        x_step: int,
        x_row: int,
        h0: int,
        y: int,
        y_step: int,
        y_row: int,
        last: int,
        kept: list[int],
        lengths: int,
        T: int,
        N: int,
        threads: int,
        /,
    ) -> None: ...

class WeightGuard:
    """Whether a module's weights are those that were given; `steps` has a `count`, or is None."""

    def __init__(self, tensor: type[Tensor], weights: Sequence[Tensor], steps: Any) -> None: ...
    def unchanged(self, weights: Collection[Tensor | None], /) -> bool: ...
    def in_place(self, weights: Collection[Tensor | None], /) -> bool: ...

class PreparedCall:
    """A whole call in native code."""

    def run(
        self,
        weights: Collection[Tensor | None],
        x: object,
        hx: Tensor | None,
        lengths: Tensor | None,
        batch_first: bool,
        packing: Packing | None = None,
        /,
    ) -> Any: ...

class PreparedCallCPU(PreparedCall):
    """On the CPU; `parts` gives those of a maker of tensors of a shape."""

    def __init__(
        self,
        stack: Stack,
        guard: WeightGuard,
        variable: str,
        torch: tuple[Any, ...],
        parts: Callable[[tuple[int, ...]], tuple[Any, ...]],
        is_real: bool,
        /,
    ) -> None: ...

class PreparedCallGPU(PreparedCall):
    """On a GPU; `sizes`: index of the device, states, C, H; `most`: bytes of memory to keep."""

    def __init__(
        self,
        sizes: tuple[int, int, int, int],
        guard: WeightGuard,
        torch: tuple[Any, ...],
        most: int,
        /,
    ) -> None: ...
    # T, N, dtypes of x and of states or -1, and 0, 1 for lengths or 2 for packed rows
    def add(self, key: tuple[int, int, int, int, int], call: Call, /) -> None: ...

# rows of the first step, of all steps, and the first step of a wrong size or -1
def packed_rows(batch_sizes: int, T: int, /) -> tuple[int, int, int]: ...
def packed_layout(batch_sizes: int, T: int, N: int, to: int, /) -> None: ...

class Stream:
    """A stack that is fed step by step, its states in memory of the caller."""

    def __init__(self, stack: Stack, N: int, states: list[int]) -> None: ...
    def step(self, x: int, y: int, /) -> bool: ...

# what gives the current stream, and what has one wait that the call before did not have
Streams = tuple[Callable[[], int], Callable[[], int]]
Real = tuple[int, int, int, int, int, int]  # address, strides of steps and rows, T, N, C
Quantizer = tuple[float, int, int, int, int]  # scale, zero point, limits, container
Between = tuple[float, float, float, int, int, int, int]  # m, limits, zeros, containers

def quantize(x: Real, quantizer: Quantizer, codes: int, nan: int, /) -> None: ...
def mask(x: Real, quantizer: Quantizer, grad: int, /) -> None: ...
def requantize(
    between: Between, codes: int, rows: int, features: int, to: int, to_row: int, /
) -> None: ...
def mask_requantized(
    between: Between, codes: int, rows: int, features: int, grad: int, grad_row: int, /
) -> None: ...
def events(to: int, A: int, B: int, C: int, seed: int, stream: int, chance: int, /) -> None: ...

class Weights:
    """A weight part, to be rewritten as its weights change; see weights.py."""

    def __init__(self, numbers: dict[str, Any], variant: str) -> None: ...
    def write(
        self, W: int, R: int, bw: int, br: int, dropped: int, keep: float, threads: int, /
    ) -> bool: ...
    def forget(self) -> None: ...

# addresses of strides and of a flag, the flag's width, whether it may be set
CallInput = tuple[int, int, int, int, bool]

class Call:
    """Calls of one size on a GPU: their tensors, arguments and launches."""

    # fields: of x, h0, lengths, y, last states, NaN, codes, space and both orders of packed rows.
    # sizes: T, N, C, bytes of space and of codes. makers: functions and arguments for y, y with
    # rows first or of some packed rows, last states, space, space with codes and, where they are
    # kept, NaN and codes. fail: raises a status. keep: what
    # holds arguments.
    def __init__(
        self,
        launches: Launches,
        fields: list[Fields],
        inputs: list[CallInput],
        sizes: tuple[int, int, int, int, int],
        makers: list[tuple[Callable[..., Tensor], tuple[Any, ...]]],
        tensor: type[Tensor],
        device: int,
        stream: Streams,
        fail: Callable[[int], None],
        keep: Any,
        /,
    ) -> None: ...
    # y, last states and, where they are kept, NaN and codes; NotImplemented where x or h0 would be
    # taken in another layout
    def run(
        self,
        x: Tensor,
        h0: Tensor | None,
        lengths: Tensor | None,
        packing: Packing | None = None,
        /,
    ) -> tuple[Tensor, ...]: ...

# T, N, layout, sorted and unsorted indices
Packing = tuple[int, int, Tensor, Tensor | None, Tensor | None]
# shape, strides and dtype of what is given, or no shape
Layout = tuple[tuple[int, ...], tuple[int, ...], int]

class GPUBackward:
    """Backwards of a GRU that differ in addresses alone, see bindings/cuda_backward.hpp."""

    def __init__(
        self,
        launches: Launches,
        sizes: tuple[int, int, int, int, bool, bool, int, int],
        places: Sequence[tuple[int, int]],
        layouts: Sequence[Layout],
        makers: Sequence[tuple[Callable[..., Tensor], tuple[Any, ...]] | None],
        torch: tuple[type[Tensor], Callable[[], int], Streams, Callable[[], bool]],
        fail: Callable[[int], None],
        keep: object,
        /,
    ) -> None: ...
    def run(
        self,
        x: Tensor,
        h0: Tensor | None,
        lengths: Tensor | None,
        outs: Sequence[Tensor],
        nan: Tensor,
        grad_y: Tensor | None,
        grad_last: Tensor | None,
        packing: Packing | None = None,
        /,
    ) -> list[Tensor | None] | None: ...
    def forget(self) -> bool: ...

def variants(only_runnable: bool = True) -> list[str]: ...

# for tests: what a thread has to be given to do, in parts of what pays; more than 0
def set_thread_price(price: float, /) -> None: ...
def threads_started() -> int: ...
def multiply(variant: str, loops: int) -> int: ...
def read_memory(address: int, bytes: int, loops: int) -> int: ...
