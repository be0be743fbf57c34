"""The native kernels; see executor.py for what the numbers mean. Tensors are given as addresses."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

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

class Quick:
    """The shortest way through a stack; see quick.hpp."""

    def __init__(
        self,
        stack: Stack,
        weights: list[Tensor],
        steps: Any,
        variable: str,
        torch: tuple[Any, ...],
        parts: Callable[[tuple[int, ...]], tuple[Callable[..., Tensor], tuple[Any, ...]]],
    ) -> None: ...
    # NotImplemented where x or hx has to be contiguous
    def run(
        self, weights: Collection[Tensor | None], x: object, hx: Tensor | None, batch_first: bool, /
    ) -> tuple[Tensor, Tensor] | None: ...

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
    ) -> None: ...

class Fields:
    """Fields of arguments that point into one piece of memory."""

    def __init__(self) -> None: ...
    def add(self, field: int, offset: int, /) -> None: ...
    def move(self, base: int, /) -> None: ...

class Driver:
    """The CUDA driver, by the addresses of its functions; statuses are returned."""

    def __init__(self, launch: int, get_current: int, set_current: int, context: int) -> None: ...
    def launch(self, config: int, function: int, parameters: int, /) -> int: ...

class Launches:
    """Launches that are started one after the other."""

    def __init__(self, driver: Driver) -> None: ...
    def add(self, config: int, stream: int, function: int, parameters: int, /) -> None: ...
    def start(self, stream: int, /) -> int: ...
    def follow(self, fields: Fields, /) -> None: ...
    def start_at(self, stream: int, bases: Sequence[int], /) -> int: ...

class Quiet:
    """Whether a call of a module is nothing but that."""

    # names of attributes that have to be False, empty, and None or not the module's own; of one
    # that has to be True; dictionaries that have to be empty; a namespace with the flag of
    # compilers; functions that have to give 0 and None
    def __init__(
        self,
        false_names: tuple[str, ...],
        empty_names: tuple[str, ...],
        absent_names: tuple[str, ...],
        true_name: str,
        hooks: tuple[dict[Any, Any], ...],
        compiler: dict[str, Any],
        counts: tuple[Callable[[], int], ...],
        states: tuple[Callable[[], Any], ...],
        /,
    ) -> None: ...
    def is_(self, attributes: dict[str, Any], /) -> bool: ...

# addresses of strides and of a flag, the flag's width, whether it may be set
CallInput = tuple[int, int, int, int, bool]

class Call:
    """Calls of one size on a GPU: their tensors, arguments and launches."""

    # fields: of x, h0, lengths, y, last states, NaN, codes, space. sizes: T, N, C, bytes of space
    # and of codes. makers: functions and arguments for y, y with rows first, last states, space,
    # space with codes and, where they are kept, NaN and codes. fail: raises a status. keep: what
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
        self, x: Tensor, h0: Tensor | None, lengths: Tensor | None, /
    ) -> tuple[Tensor, ...]: ...

class QuickGPU:
    """Calls of a stack on a GPU, and what they follow from."""

    # sizes: index of the device, states, C, H. torch: Tensor, is_grad_enabled, and what gives the
    # current device and tells of capture. most: bytes that are kept between calls.
    def __init__(
        self,
        sizes: tuple[int, int, int, int],
        weights: Collection[Tensor],
        steps: Any,
        torch: tuple[Any, ...],
        most: int,
        /,
    ) -> None: ...
    def add(self, T: int, N: int, with_h0: bool, call: Call, /) -> None: ...
    # NotImplemented where the size is new, or Python has to see to the call
    def run(
        self, weights: Collection[Tensor | None], x: object, hx: Tensor | None, batch_first: bool, /
    ) -> tuple[Tensor, Tensor] | None: ...

# shape and strides of what is given, or nothing
Layout = tuple[tuple[int, ...], tuple[int, ...]]

class Repeated:
    """Backwards of a GRU that differ in addresses alone, see repeated.hpp."""

    def __init__(
        self,
        launches: Launches,
        sizes: tuple[int, int, int, int, int],
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
        out: Tensor,
        nan: Tensor,
        grad_out: Tensor | None,
        grad_last: Tensor | None,
        /,
    ) -> Any: ...
    def forget(self) -> bool: ...

class Step:
    """Whether a step of training is like the one before, see step.hpp."""

    def __init__(
        self,
        sizes: tuple[int, int, int, int],
        weights: Sequence[Tensor] | Collection[Tensor],
        torch: tuple[type[Tensor], Callable[[], int]],
        /,
    ) -> None: ...
    def holds(self, weights: Collection[Tensor | None], /) -> bool: ...
    def takes(
        self,
        weights: Collection[Tensor | None],
        x: object,
        hx: Tensor | None,
        batch_first: bool,
        /,
    ) -> bool: ...

def variants(only_runnable: bool = True) -> list[str]: ...

# for tests: what a thread has to be given to do, in parts of what pays; more than 0
def set_thread_price(price: float, /) -> None: ...
def threads_started() -> int: ...
def multiply(variant: str, loops: int) -> int: ...
def read_memory(address: int, bytes: int, loops: int) -> int: ...
