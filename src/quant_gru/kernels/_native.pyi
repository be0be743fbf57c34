"""The native kernels. Tensors are passed as addresses.

cpu/executor.py and cpu/plan_packing.py describe the numbers of layers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

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

class PreparedCallCPU(PreparedCall):
    """A prepared call on the CPU; `parts` returns the parts of a tensor maker for a shape."""

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
def packed_layout(batch_sizes: int, T: int, N: int, to: int, /) -> None: ...

class Stream:
    """A stack that runs step by step, with its states in the caller's memory."""

    def __init__(self, stack: Stack, N: int, states: list[int]) -> None: ...
    def step(self, x: int, y: int, /) -> bool: ...

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

# how kernels read the tables of z, r and g, see cuda/plan/structure.py
Tables = tuple[int, int, int]

class Gates:
    """The gate arithmetic of a kernel: 'float' or 'double', tables, and bytes of shared memory."""

    def __init__(self, real: str, tables: Tables, table_bytes: int, /) -> None: ...
    @property
    def real(self) -> str: ...
    @property
    def tables(self) -> Tables: ...
    @property
    def table_bytes(self) -> int: ...

class Form:
    """The structural properties of a plan; see cuda/host/plans/cell_form.hpp.

    `real`, `tables` and `table_bytes` are the gate arithmetic of all kernels, `own` that of the
    recurrence if it differs, and `fused` says of op.rRh, op.old_contrib and op.new_contrib whether
    they are rounded to codes.
    """

    def __init__(
        self,
        narrow: bool,
        real: str,
        words: bool,
        weight_bytes: int,
        state_bytes: int,
        wide_input: bool,
        out_bytes: int,
        tables: Tables,
        table_bytes: int,
        fused: tuple[bool, bool, bool],
        zoneout: bool = False,
        own: Gates | None = None,
        saturated: bool = False,
        powers: bool = False,
    ) -> None: ...
    @property
    def narrow(self) -> bool: ...
    @property
    def real(self) -> str: ...
    @property
    def words(self) -> bool: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def state_bytes(self) -> int: ...
    @property
    def wide_input(self) -> bool: ...
    @property
    def out_bytes(self) -> int: ...
    @property
    def tables(self) -> Tables: ...
    @property
    def table_bytes(self) -> int: ...
    @property
    def fused(self) -> tuple[bool, bool, bool]: ...
    @property
    def zoneout(self) -> bool: ...
    @property
    def own(self) -> Gates | None: ...
    @property
    def saturated(self) -> bool: ...
    @property
    def powers(self) -> bool: ...
    @property
    def recurrence(self) -> Gates: ...
    @property
    def in_int32(self) -> bool: ...
    @property
    def products(self) -> dict[str, int]: ...

class GateNumbers:
    """The gate arithmetic of a plan, from `plan_packing.pack_gates`."""

    def __init__(self, numbers: dict[str, Any], /) -> None: ...
    # for z, r and g, float32 outputs of all codes and int32 lines of compressed tables
    def tables(self) -> list[tuple[bytes | None, bytes | None]]: ...
    # places: the addresses of both, of bounds and of coefficients
    def cell(self, real: str, places: Sequence[tuple[int, ...]], /) -> bytes: ...
    def saturated(self) -> bytes | None: ...
    # C, H, bits of W and R, whether the GPU has 227 KB of shared memory for a block
    def form(self, C: int, H: int, W: int, R: int, large_shared: bool, /) -> Form: ...

Directions = Sequence[tuple[Form, GateNumbers]]

def joint_form(directions: Directions, /) -> Form | None: ...
def compressed(outputs: Sequence[int], /) -> bytes | None: ...

class Shape:
    """The layout of a recurrence on a GPU; see cuda/host/plans/planner.hpp."""

    @property
    def features(self) -> int: ...
    @property
    def units(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def split(self) -> int: ...
    @property
    def spread(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def strip(self) -> int: ...
    @property
    def elements(self) -> int: ...
    def tiles(self, N: int, /) -> int: ...
    def strips(self, N: int, /) -> int: ...
    def projected_words(self, form: Form, T: int, N: int, /) -> int: ...
    def shared_bytes(self, form: Form, /) -> int: ...
    def macros(self, form: Form, H: int, directions: int, /) -> dict[str, object]: ...
    def fits(self, form: Form, clusters: bool = True) -> bool: ...
    def step_time(self, form: Form, /) -> float: ...
    def resident(self, form: Form, clusters: Mapping[int, int], /) -> tuple[int, int]: ...
    def waves(self, form: Form, tiles: int, clusters: Mapping[int, int], /) -> float: ...
    def bulk(self, form: Form, /) -> bool: ...
    def ring(self, form: Form, /) -> int: ...

def make_shape(H: int, blocks: int, split: int, spread: int, rows: int, /) -> Shape: ...
def possible_shapes(form: Form, H: int, clusters: Mapping[int, int], /) -> list[Shape]: ...

# form, H, N, directions, clusters; raises ValueError where a shape is named that cannot run
def choose_shape(
    form: Form, H: int, N: int, directions: int, clusters: Mapping[int, int], /
) -> Shape | None: ...
def time_of(
    shape: Shape, form: Form, N: int, directions: int, clusters: Mapping[int, int], /
) -> float: ...
def starts_early(shape: Shape, N: int, directions: int, clusters: Mapping[int, int], /) -> bool: ...
def shared_form(
    directions: Directions, H: int, N: int, clusters: Mapping[int, int], /
) -> Form | None: ...

# source, function, macros, blocks in x and y, threads, cluster, bytes of shared memory, early
NativeLaunch = tuple[str, str, dict[str, object], tuple[int, int], int, int, int, bool]

def recurrence_layout(
    shape: Shape,
    form: Form,
    H: int,
    N: int,
    directions: int,
    held: bool,
    outputs: tuple[bool, bool] | None,
    early: bool,
    chunk: int,
    /,
) -> NativeLaunch: ...
def variants(only_runnable: bool = True) -> list[str]: ...
def left_out() -> list[str]: ...

# for tests: a factor greater than 0 on the least work that a thread is started for
def set_thread_price(price: float, /) -> None: ...
def threads_started() -> int: ...
def multiply(variant: str, loops: int) -> int: ...
def read_memory(address: int, bytes: int, loops: int) -> int: ...
