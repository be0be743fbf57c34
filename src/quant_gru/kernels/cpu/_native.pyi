"""The native kernels; see executor.py for what the numbers mean. Tensors are given as addresses."""

from collections.abc import Callable, Collection
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
    ) -> bool: ...

class Quick:
    """The shortest way through a stack; see quick.hpp."""

    def __init__(
        self,
        stack: Stack,
        weights: list[Tensor],
        steps: Any,
        variable: str,
        torch: tuple[Any, ...],
        like: Callable[[tuple[int, ...]], Tensor],
    ) -> None: ...
    # NotImplemented where x or hx has to be contiguous
    def run(
        self, weights: Collection[Tensor | None], x: object, hx: Tensor | None, batch_first: bool, /
    ) -> tuple[Tensor, Tensor] | None: ...

class Stream:
    """A stack that is fed step by step, its states in memory of the caller."""

    def __init__(self, stack: Stack, N: int, states: list[int]) -> None: ...
    def step(self, x: int, y: int, /) -> bool: ...

Real = tuple[int, int, int, int, int, int]  # address, strides of steps and rows, T, N, C
Border = tuple[float, int, int, int, int]  # scale, zero point, limits, container
Between = tuple[float, float, float, int, int, int, int]  # m, limits, zeros, containers

def quantize(x: Real, quantizer: Border, codes: int, nan: int, /) -> None: ...
def mask(x: Real, quantizer: Border, grad: int, /) -> None: ...
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

def variants(only_runnable: bool = True) -> list[str]: ...

# for tests: what a thread has to be given to do, in parts of what pays; more than 0
def set_thread_price(price: float, /) -> None: ...
def threads_started() -> int: ...
def multiply(variant: str, loops: int) -> int: ...
def read_memory(address: int, bytes: int, loops: int) -> int: ...
