"""The native kernels. Tensors are passed as addresses.

cpu/executor.py and cpu/plan_packing.py describe the numbers of layers.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, dtype

from kernel_runtime._native import Fields, Launches

class Layer:
    """One layer and direction, with its numbers packed for one instruction set."""

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
    """All layers and directions, with float32 inputs and outputs."""

    def __init__(
        self,
        layers: list[list[Layer]],
        between: list[list[list[Between]]],
        finite: list[int],
        keep: Any,
    ) -> None: ...

class CPUCalls:
    """Calls of a stack; see bindings/cpu_calls.hpp.

    `torch` are Tensor and get_num_threads. `dtypes` are those of real values and of codes. `parts`
    returns the parts of a tensor maker for a shape, a dtype and whether rows come first in memory.
    """

    def __init__(
        self,
        stack: Stack,
        variable: str,
        torch: tuple[Any, ...],
        dtypes: tuple[dtype, ...],
        parts: Callable[[tuple[int, ...], dtype, bool], tuple[Any, ...]],
        /,
    ) -> None: ...
    def is_chosen(self) -> bool: ...
    # returns y, last states and, if kept, NaN and codes; NotImplemented for negated tensors
    def run(
        self,
        x: Tensor,
        h0: Tensor | None,
        lengths: Tensor | None,
        packing: Packing | None,
        dtype: dtype,
        keeps: bool,
        /,
    ) -> Any: ...

class CPUBackward:
    """Backwards of calls; see bindings/cpu_calls.hpp. `keep` owns the memory of the weights."""

    def __init__(self, calls: CPUCalls, weights: list[dict[str, Any]], keep: object, /) -> None: ...
    def run(
        self,
        x: Tensor,
        h0: Tensor | None,
        lengths: Tensor | None,
        outs: Sequence[Tensor],
        nan: Tensor,
        grad_y: Tensor | None,
        grad_last: Tensor | None,
        wanted: tuple[bool, ...],
        packing: Packing | None,
        dtype: dtype,
        /,
    ) -> list[Tensor | None] | None: ...

class WeightGuard:
    """Compares a module's weights with the given ones.

    `steps` has a `count` of optimizer steps, or is None.
    """

    def __init__(self, tensor: type[Tensor], weights: Sequence[Tensor], steps: Any) -> None: ...
    def unchanged(self, weights: Collection[Tensor | None], /) -> bool: ...
    def in_place(self, weights: Collection[Tensor | None], /) -> bool: ...
    # looks set `found` to `mark` if a part of the weights changed; see bindings/content_watch.hpp
    def watch(
        self,
        looks: Launches,
        found: int,
        mark: int,
        parts: int,
        stream: Callable[[], int],
        fail: Callable[[int], None],
        keep: object,
        /,
    ) -> None: ...
    def look(self) -> None: ...
    def found_silent_write(self) -> bool: ...

class ContentSample:
    """Detects writes to memory that no version records; the memory must stay allocated."""

    def __init__(self, data: int, bytes: int, /) -> None: ...
    def unchanged(self) -> bool: ...

class PreparedCall:
    """A whole call in native code, without Python steps."""

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

class PreparedCheck(PreparedCall):
    """Checks of calls that read the current weights: whether their run must be differentiable."""

    def __init__(
        self, sizes: tuple[int, int, int, int], guard: WeightGuard, torch: tuple[Any, ...], /
    ) -> None: ...

class PreparedCallCPU(PreparedCall):
    """A prepared call on the CPU; without a dtype, results have that of the input."""

    def __init__(
        self, calls: CPUCalls, guard: WeightGuard, torch: tuple[Any, ...], dtype: dtype | None, /
    ) -> None: ...

class PreparedCallGPU(PreparedCall):
    """A prepared call on a GPU.

    `sizes` are the device index, states, C and H. `most` limits the bytes kept between calls.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int, int],
        guard: WeightGuard,
        torch: tuple[Any, ...],
        most: int,
        /,
    ) -> None: ...
    # key: T, N, dtype of x, dtype of the initial states or -1 without them, and a kind: 0 without
    # lengths, 1 with lengths, 2 for packed rows
    def add(self, key: tuple[int, int, int, int, int], call: Call, /) -> None: ...

# returns the rows of the first step, the rows of all steps, and the first step with a wrong size,
# or -1
def packed_rows(batch_sizes: int, T: int, /) -> tuple[int, int, int]: ...

# returns the first of N indices that is not in 0..N-1, or -1
def wrong_index(indices: int, N: int, /) -> int: ...
def packed_layout(batch_sizes: int, T: int, N: int, to: int, /) -> None: ...

class Stream:
    """A stack that runs step by step, with its states in the caller's memory."""

    def __init__(self, calls: CPUCalls, N: int, states: list[int]) -> None: ...
    # only the thread that has claimed a stream runs steps
    def claim(self) -> None: ...
    def release(self) -> None: ...
    # returns y, or (y,) if x has a NaN; None, without a step, in another thread or for an x that
    # is not plain
    def step(self, x: object, /) -> Tensor | tuple[Tensor] | None: ...

# one function returns the current stream; the other makes a stream wait if the previous call used
# another stream
Streams = tuple[Callable[[], int], Callable[[], int]]
Real = tuple[int, int, int, int, int, int]  # address, strides of steps and rows, T, N, C
Quantizer = tuple[int, bool, float, int]  # bits, signed, scale, zero point
Between = tuple[int, int, Quantizer, Quantizer]  # shift, multiplier, below, above

def quantize(x: Real, quantizer: Quantizer, codes: int, nan: int, /) -> None: ...
def mask(x: Real, quantizer: Quantizer, grad: int, /) -> None: ...
def requantize(
    between: Between, codes: int, rows: int, features: int, to: int, to_row: int, /
) -> None: ...
def mask_requantized(
    between: Between, codes: int, rows: int, features: int, grad: int, grad_row: int, /
) -> None: ...
def events(to: int, A: int, B: int, C: int, seed: int, stream: int, chance: int, /) -> None: ...

class Effects:
    """What quantizing operators of a cell does to its states; see calibration/effects.py."""

    def __init__(
        self, H: int, batch_sizes: list[int], reverse: bool, Wx: int, Rh: int, before: int, /
    ) -> None: ...
    def choose(self, op: int, codes: dict[str, Any], /) -> tuple[bool, float, float]: ...
    def effect(
        self,
        op: int,
        codes: dict[str, Any],
        scale: float,
        zero_point: float,
        stretch: float,
        /,
    ) -> float: ...

class Weights:
    """Rewrites a weight part when its weights change; see cpu/requantize_weights.py."""

    def __init__(self, numbers: dict[str, Any], variant: str) -> None: ...
    def write(
        self, W: int, R: int, bw: int, br: int, dropped: int, keep: float, threads: int, /
    ) -> bool: ...
    def forget(self) -> None: ...

class LiveUpdate:
    """Updates of cells: their `Weights`, the layers made of them, addresses of W, R, bw, br."""

    def __init__(
        self, cells: Sequence[tuple[Weights, dict[str, Layer], tuple[int, ...]]], /
    ) -> None: ...
    # returns whether any number changed
    def run(self, threads: int, /) -> bool: ...

# addresses of both strides and of a flag, the width of the flag, whether the flag may be set
CallInput = tuple[int, int, int, int, bool]

class Call:
    """Calls of one size on a GPU: their tensors, arguments and launches."""

    # fields: those that point to x, h0, lengths, y, last states, NaN, codes, workspace, and both
    # orders of packed rows.
    # sizes: T, N, C, bytes of the workspace, and bytes of codes.
    # makers: functions and their arguments that create y, y with rows first or for packed rows, the
    # last states, the workspace, the workspace with codes and, if saved, NaN and codes.
    # fail: raises the error of a status.
    # keep: the owner of the arguments.
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
    # returns y, last states and, if saved, NaN and codes; NotImplemented if x or h0 needs another
    # layout
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
# shape, strides and dtype of a tensor; an empty shape if the tensor is absent
Layout = tuple[tuple[int, ...], tuple[int, ...], int]

class GPUBackward:
    """Backwards of a GRU that differ only in addresses; see bindings/cuda_backward.hpp."""

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
def left_out() -> list[str]: ...

# for tests: a factor greater than 0 on the least work that a thread is started for
def set_thread_price(price: float, /) -> None: ...
def threads_started() -> int: ...
def multiply(variant: str, loops: int) -> int: ...
def read_memory(address: int, bytes: int, loops: int) -> int: ...
