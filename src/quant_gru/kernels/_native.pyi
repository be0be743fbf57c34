"""The native kernels. Tensors are passed as addresses.

cpu/executor.py and cpu/plan_packing.py describe the numbers of layers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, overload

from torch import Tensor, dtype
from torch.nn.utils.rnn import PackedSequence

from quant_gru.integer.call_form import Packing
from quant_gru.kernel_runtime._native import Fields, Launches

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

    `torch` are Tensor and get_num_threads. `dtypes` are those of real values and of codes. `maker`
    returns a function that makes tensors, for a shape, `dtype` and `strides`: see
    `allocators.maker`.
    """

    def __init__(
        self,
        stack: Stack,
        variable: str,
        torch: tuple[Any, ...],
        dtypes: tuple[dtype, ...],
        maker: Callable[..., Callable[[], Tensor]],
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
        looks: Steps,
        found: int,
        mark: int,
        parts: int,
        stream: Callable[[], int],
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

# T, N, dtype of x, dtype of the initial states or -1 without them, and a kind: 0 without lengths, 1
# with lengths, 2 for packed rows
FormKey = tuple[int, int, int, int, int]

class PreparedCheck(PreparedCall):
    """Checks of calls that read the current weights: whether their run must be differentiable."""

    def __init__(
        self, sizes: tuple[int, int, int, int], guard: WeightGuard, torch: tuple[Any, ...], /
    ) -> None: ...

class UpdateChanges:
    """Counts changes of what prepared updates write, and of the arguments of their launches."""

    count: int
    def __init__(self) -> None: ...

class PreparedStepGPU(PreparedCheck):
    """Steps of training on a GPU: an update of the numbers that follow weights, and a call."""

    def __init__(
        self,
        sizes: tuple[int, int, int, int],
        guard: WeightGuard,
        torch: tuple[Any, ...],
        changes: UpdateChanges,
        most: int,
        fail: Callable[[int], None],
        /,
    ) -> None: ...
    # split(codes) -> the codes of each cell; None if they are those of one cell
    def add(
        self,
        key: FormKey,
        differentiable: bool,
        call: Call,
        split: Callable[[Tensor], Sequence[Tensor]] | None,
        /,
    ) -> None: ...
    def follow(self, update: Launches, stream: int, keep: object, /) -> None: ...
    def follows(self, stream: int, /) -> bool: ...

class PreparedCallCPU(PreparedCall):
    """A prepared call on the CPU; without a dtype, results have that of the input."""

    def __init__(
        self, calls: CPUCalls, guard: WeightGuard, torch: tuple[Any, ...], dtype: dtype | None, /
    ) -> None: ...

class PreparedStepCPU(PreparedCheck):
    """Calls on the CPU that update the numbers that follow weights, and keep what a backward needs.

    `update` updates the numbers. Without a dtype, results have that of the input.
    """

    def __init__(
        self,
        calls: CPUCalls,
        guard: WeightGuard,
        torch: tuple[Any, ...],
        dtype: dtype | None,
        update: Callable[[], None],
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
    def add(self, key: FormKey, call: Call, /) -> None: ...

# returns the rows of the first step, the rows of all steps, the first step with a wrong size or -1,
# and a copy of the sizes
def packed_rows(batch_sizes: int, T: int, /) -> tuple[int, int, int, bytes]: ...

# returns the first of N indices that is not in 0..N-1, or -1
def wrong_index(indices: int, N: int, /) -> int: ...
def packed_layout(sizes: bytes, N: int, to: int, /) -> None: ...

class PackingOf:
    """Finds the packing of a PackedSequence, see bindings/packed_rows.hpp."""

    def __init__(
        self,
        tensor: type[Tensor],
        device: int,
        layout: Callable[[bytes, int], Tensor],
        make: type[Packing],
        /,
    ) -> None: ...
    def __call__(self, packed: PackedSequence, /) -> Packing | None: ...

class Stream:
    """A stack that runs step by step, with its states in the caller's memory.

    A call runs a step, if it is plain and this thread owns the stream. Otherwise it calls
    `_general_call` of the subclass, and `_complete(x, y)` for an x with NaN.
    """

    def __init__(self) -> None: ...
    # states: addresses of the codes of each layer (N, H)
    def _attach(self, calls: CPUCalls, N: int, states: list[int], /) -> None: ...
    def _own(self) -> None: ...
    def _disown(self) -> None: ...
    # returns y, and whether x has a NaN; None, without a step, for an x that is not plain
    def _run_step(self, x: object, /) -> tuple[Tensor, bool] | None: ...
    def __call__(self, x: Tensor) -> Tensor: ...

# one function returns the current stream; the other makes a stream wait if the previous call used
# another stream
Streams = tuple[Callable[[], int], Callable[[], int]]
Real = tuple[int, int, int, int, int, int]  # address, strides of steps and rows, T, N, C
Quantizer = tuple[int, bool, float, int]  # bits, signed, scale, zero point
# shift, multiplier, below, above, rule of rounding
Between = tuple[int, int, Quantizer, Quantizer, int]

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

# addresses of both strides and of an int32 flag, or 0
CallInput = tuple[int, int, int]

class Steps:
    """Launches, and functions between them, that start in order; see bindings/cuda_steps.hpp.

    `uses` are the addresses that each step follows, `fields` follow them, `fail` raises the error
    of a status, and `keep` owns the memory of the arguments.
    """

    def __init__(
        self,
        steps: Sequence[Launches | Callable[..., None]],
        uses: Sequence[Sequence[int]],
        fields: Sequence[Fields],
        fail: Callable[[int], None],
        keep: Any,
        /,
    ) -> None: ...
    # arguments: of the functions
    def start(self, stream: int, bases: Sequence[int], /, *arguments: Any) -> None: ...

class Call:
    """Calls of one size on a GPU: their tensors, arguments and launches."""

    # steps: their fields follow x, h0, lengths, y, last states, NaN, codes, workspace, and both
    # orders of packed rows.
    # features: of x. space: bytes of the workspace.
    # makers: functions that create y, y with rows first or for packed rows, the
    # last states, the workspace and, if saved, NaN and codes.
    def __init__(
        self,
        steps: Steps,
        inputs: Sequence[CallInput],
        features: int,
        space: int,
        makers: Sequence[Callable[..., Tensor]],
        tensor: type[Tensor],
        device: int,
        stream: Streams,
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

# shape, strides and dtype of a tensor; an empty shape if the tensor is absent
Layout = tuple[tuple[int, ...], tuple[int, ...], int]

class GPUBackward:
    """Backwards of a GRU that differ only in addresses; see bindings/cuda_backward.hpp."""

    def __init__(
        self,
        steps: Steps,
        sizes: tuple[int, int, int, int, bool, int, int],
        layouts: Sequence[Layout],
        makers: Sequence[Callable[..., Tensor] | None],
        torch: tuple[type[Tensor], Callable[[], int], Streams, Callable[[], bool]],
        /,
    ) -> None: ...
    def run(
        self,
        x: Tensor,
        h0: Tensor | None,
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

@dataclass
class Gates:
    """The gate arithmetic of a kernel: 'float' or 'double', tables, and bytes of shared memory."""

    real: str
    tables: Tables
    table_bytes: int

@dataclass
class Form:
    """The structural properties of a plan; see cuda/host/plans/cell_form.hpp.

    `real`, `tables` and `table_bytes` are the gate arithmetic of all kernels, `own` that of the
    recurrence if it differs, and `fused` says of op.rRh, op.old_contrib and op.new_contrib whether
    they are rounded to codes.
    """

    narrow: bool
    real: str
    words: bool
    weight_bytes: int
    state_bytes: int
    wide_input: bool
    out_bytes: int
    tables: Tables
    table_bytes: int
    fused: tuple[bool, bool, bool]
    zoneout: bool = False
    own: Gates | None = None
    saturated: bool = False
    powers: bool = False
    rounding: int = 0
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

def compressed(outputs: Sequence[int], /) -> bytes | None: ...

class Shape:
    """The layout of a recurrence on a GPU; see cuda/host/plans/planner.hpp."""

    features: int
    units: int
    blocks: int
    split: int
    spread: int
    rows: int
    threads: int
    strip: int
    def tiles(self, N: int, /) -> int: ...
    def strips(self, N: int, /) -> int: ...
    def projected_words(self, form: Form, T: int, N: int, /) -> int: ...
    def shared_bytes(self, form: Form, /) -> int: ...
    def macros(self, form: Form, H: int, directions: int, /) -> dict[str, object]: ...
    def fits(self, form: Form, clusters: bool = True) -> bool: ...
    def passes(self, form: Form, /) -> int: ...
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

# blocks in x and y, threads, cluster, bytes of shared memory, early, together
NativeGrid = tuple[tuple[int, int], int, int, int, bool, bool]
# source, function, macros, grid
NativeLaunch = tuple[str, str, dict[str, object], NativeGrid]

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

# bits, whether codes are signed, scale, zero point
QuantizerTuple = tuple[int, bool, float, int]

# The blocks of input projections; see cuda/host/plans/projection.hpp, also for their arguments.

class Epilogue:
    def __init__(
        self, planes: int, codes: int = 0, powers: bool = False, longs: bool = False
    ) -> None: ...
    planes: int

class Tile:
    def __init__(self, unit_warps: int, row_warps: int, columns: int, /) -> None: ...
    def macros(self, epilogue: Epilogue, /) -> dict[str, object]: ...
    def launch(self, units: int, rows: int, epilogue: Epilogue, /) -> NativeLaunch: ...

class WeightStationary:
    def __init__(
        self, unit_warps: int, groups: int, columns: int, stages: int, blocks: int, /
    ) -> None: ...
    def across(self, units: int, /) -> int: ...
    def macros(self, epilogue: Epilogue, /) -> dict[str, object]: ...
    # also returns the rows per group
    def launch(
        self, units: int, rows: int, padded: int, processors: int, epilogue: Epilogue, /
    ) -> tuple[NativeLaunch, int]: ...

class TiledReals:
    def __init__(
        self,
        unit_warps: int,
        row_warps: int,
        columns: int,
        stages: int,
        blocks: int,
        parts: int,
        /,
        depth: int = 64,
    ) -> None: ...
    parts: int
    blocks: int
    units: int
    rows: int
    threads: int
    def shared_bytes(self, units: int, padded: int, planes: int, /) -> int: ...

class Warpgroups:
    def __init__(
        self, columns: int, parts: int, units: int, padded: int, /, planes: int = 1
    ) -> None: ...
    columns: int
    parts: int
    planes: int
    rows: int
    group_tiles: int
    panels: int
    stages: int
    shared_bytes: int

CodeBlocks = Tile | WeightStationary
RealBlocks = TiledReals | Warpgroups

class Chip:
    """A GPU by its architecture and its clusters of each size."""

    def __init__(self, arch: str, clusters: Mapping[int, int], /) -> None: ...

class ProjectionSize:
    """T, N, C, bits of W, x, and the shape of the recurrence."""

    def __init__(
        self, T: int, N: int, C: int, W_bits: int, x: QuantizerTuple, shape: Shape, /
    ) -> None: ...
    projects_bytes: bool

class ProjectionPolicy:
    def __init__(self) -> None: ...
    # by planes
    stationary: Sequence[WeightStationary]
    stationary_rows: int
    stationary_weights: int
    by_steps: bool
    overlaps: bool
    overlap_steps: int
    overlap_work: int
    overlap_share: float
    group_rows: int
    group_work: int
    reads_reals: bool
    reals: RealBlocks | None

class Overlap:
    def __init__(
        self, block: WeightStationary, cluster: int, clusters: int, /, chunk: int = 8
    ) -> None: ...
    block: WeightStationary
    cluster: int
    clusters: int
    chunk: int
    def chunks(self, T: int, /) -> int: ...
    def strips(self, units: int, /) -> int: ...
    def grid(self, units: int, padded: int, planes: int, /) -> NativeGrid: ...

class Method(Enum):
    """How a projection is computed: from real values or codes, by warps, tiles or a GEMM."""

    REALS_FEW_ROWS = 0
    REALS_TILED = 1
    CODES_FEW_ROWS = 2
    CODES_TILED = 3
    GEMM = 4

class Selection:
    """A method with the blocks of REALS_TILED or CODES_TILED."""

    method: Method
    reals: RealBlocks | None
    codes: CodeBlocks | None
    reads_reals: bool

def blocks_of(block: RealBlocks, rows: int, /) -> int: ...
def real_macros(
    block: RealBlocks,
    epilogue: Epilogue,
    strip: int,
    features: int,
    exact: bool,
    whole: bool,
    /,
) -> dict[str, object]: ...
def choose_tile(units: int, rows: int, planes: int, processors: int, /) -> Tile: ...
def choose_tiled(
    units: int, rows: int, padded: int, planes: int, processors: int, /, alone: bool = True
) -> TiledReals | None: ...
def choose_warpgroups(
    units: int, rows: int, padded: int, planes: int, processors: int, /
) -> Warpgroups | None: ...
def epilogue_of(gates: GateNumbers, C: int, /) -> Epilogue: ...
def division_of(x: QuantizerTuple, /) -> bytes: ...
def divides(x: QuantizerTuple, /) -> bool: ...
def weight_stationary(
    chip: Chip, size: ProjectionSize, policy: ProjectionPolicy, /
) -> WeightStationary | None: ...
def choose_reals(
    chip: Chip, size: ProjectionSize, policy: ProjectionPolicy, /
) -> RealBlocks | None: ...
def overlap_of(
    chip: Chip, size: ProjectionSize, form: Form, policy: ProjectionPolicy, /
) -> Overlap | None: ...
def select_projection(
    chip: Chip,
    size: ProjectionSize,
    real_values: bool,
    overlap: Overlap | None,
    policy: ProjectionPolicy,
    /,
) -> Selection: ...

class CellArrays:
    """The arrays that kernels derive from the codes of a cell; see cuda/host/derived_arrays.hpp.

    Methods return addresses. `stored` are the addresses of codes, bias, M and k of W and R, and the
    container of the codes; `allocate` returns the address of so many bytes of zeros.
    """

    count: int
    @overload
    def __init__(
        self,
        gates: GateNumbers,
        form: Form,
        sizes: tuple[int, int],
        bits: tuple[int, int],
        tables: Sequence[tuple[int, ...]],
        stored: Sequence[tuple[int, ...]],
        allocate: Callable[[int], int],
        /,
    ) -> None: ...
    @overload
    def __init__(self, other: CellArrays, allocate: Callable[[int], int], /) -> None: ...
    def multipliers(self, which: int, /) -> int: ...
    def exact(self, which: int, /) -> int: ...
    def gemm(self, which: int, /) -> tuple[int, int]: ...
    def byte_weights(self) -> tuple[int, int]: ...
    def tiles(self) -> int: ...
    def transposed(self, which: int, /) -> int: ...
    def fragments(self, features: int, units: int, /) -> tuple[int, int, int]: ...
    # launches that write the arrays asked for since the last call
    def take_new(self) -> Sequence[PlannedLaunch]: ...
    # the same of all arrays
    def launches(self) -> Sequence[PlannedLaunch]: ...
    # lets an update write them, whose arguments are at this address; whether it then writes all
    def add_to(self, update: int, /) -> bool: ...

# macros of kernels that include the header of the gate arithmetic without using it
PLAIN: dict[str, object]

# updates in training, which share arguments; see bindings/tensor_cell.cpp
def update_launches(
    numbers: dict[str, Any], kinds: Sequence[Sequence[int]], space: int, corrected: int, /
) -> Sequence[PlannedLaunch]: ...

# let the arguments at an address read W, R, bw or br, by index, and flags of dropped codes of R
def set_weight(arguments: int, index: int, weight: int, real: int, /) -> None: ...
def set_dropped(arguments: int, dropped: int, keep: float, /) -> None: ...

# arrays, shift and multiplier for each direction below, and the address of whether weights are
# finite
CellNumbers = tuple[CellArrays, Sequence[tuple[int, int]], int]
# a memory of the call, in the order of the fields of Call, and bytes from its start
MemoryPlace = tuple[int, int]
# cell, 0 for W or 1 for R, rows, padded features, columns, and where rows and result are
PlannedProduct = tuple[int, int, int, int, int, MemoryPlace, MemoryPlace]
# source, function, macros, grid, arguments, fields with memory and offset, fields with the strides
# of x and a flag or 0, and a product in place of a kernel
PlannedLaunch = tuple[
    str,
    str,
    dict[str, object],
    NativeGrid,
    bytes,
    Sequence[tuple[int, int, int]],
    tuple[int, int, int] | None,
    PlannedProduct | None,
]

# launches, bytes of the workspace and of codes, and for each cell the offset and container of its
# codes
PlannedCall = tuple[Sequence[PlannedLaunch], int, int, Sequence[tuple[int, int]]]

# see cuda/host/launches.hpp. form: dtypes of x, of the initial states or -1, of both results, and
# whether rows are packed. None if weights do not fit registers.
def launches_of(
    cells: Sequence[CellNumbers],
    directions: int,
    chip: Chip,
    T: int,
    N: int,
    form: tuple[int, int, int, int, bool],
    keeps: bool,
    policy: ProjectionPolicy,
    expect: Callable[[str, str, dict[str, object]], None],
    /,
) -> PlannedCall | None: ...

# addresses of codes of x, h0, out and last, whether steps are reversed, and the address of held
CodeSequence = tuple[int, int, int, int, bool, int]

# launches of the directions of a layer on codes, and bytes of the workspace
def code_launches_of(
    cells: Sequence[CellNumbers],
    chip: Chip,
    T: int,
    N: int,
    sequences: Sequence[CodeSequence],
    policy: ProjectionPolicy,
    /,
) -> tuple[Sequence[PlannedLaunch], int]: ...

# conversions in training, see cuda/host/boundary.hpp; all but sizes, rules and multipliers are
# addresses, 0 for what is absent
def quantize_launch(
    quantizer: Quantizer, rule: int, rows: int, features: int, real: int, codes: int, nan: int, /
) -> PlannedLaunch: ...
def dequantize_launch(
    quantizer: Quantizer, rows: int, features: int, codes: int, nan: int, values: int, /
) -> PlannedLaunch: ...
def mask_launch(
    quantizer: Quantizer,
    rule: int,
    strides: tuple[int, int],
    shape: tuple[int, int, int],
    real: int,
    grad: int,
    /,
) -> PlannedLaunch: ...
def requantize_launch(
    directions: Sequence[Between],
    codes: Sequence[int],
    rows: int,
    H: int,
    to: int,
    grad: int,
    /,
) -> PlannedLaunch: ...
def events_launch(
    seed: int, events: int, shape: tuple[int, int, int], chance: int, stream: int, /
) -> PlannedLaunch: ...

# for tests: the launch of one projection, by blocks or, if a bool says whether from real values, by
# a warp for each unit; it reads x and writes y, NaN flags, and counts at the workspace
def projection_of(
    cell: CellNumbers,
    chip: Chip,
    T: int,
    N: int,
    shape: Shape,
    blocks: CodeBlocks | RealBlocks | bool,
    overlap: Overlap | None = None,
    /,
) -> PlannedLaunch: ...

# a cell, whether steps are reversed, and the containers of the codes of W and R
BackwardDirection = tuple[CellNumbers, bool, tuple[int, int]]
# offset in the workspace, rows, columns, and the element: int8, int32, float32, bfloat16 or float64
NativeMatrix = tuple[int, int, int, int]
# left and right, and whether left is transposed
LastProduct = tuple[NativeMatrix, NativeMatrix, bool]

class BackwardPolicy:
    """What experiments change of a backward's launches; see cuda/host/layer_backward.hpp."""

    product_bytes: int
    codes_blocks: int
    in_clusters: bool
    from_bytes: bool
    derivatives: tuple[int, int] | None
    def __init__(self) -> None: ...

# a launch or, in its place: left, right and result of a product, or a matrix of words that become
# -1; or products with the tensors and offsets of their results
BackwardStep = tuple[
    PlannedLaunch | None, Sequence[NativeMatrix], Sequence[tuple[LastProduct, tuple[int, int]]]
]

# wanted: gradients of x, W, R, bw and br. precision: parts of a gradient, whether weights are
# exact, whether derivatives are in half precision, and the operand of products. Returns steps, the
# gradients of the states of each direction, and bytes of the workspace. Tensors are the memories of
# `launches_of`, one for addresses, the slots of each direction (see cuda/host/layer_backward.hpp),
# then the gradients of x, W and R of each direction.
def layer_backward_of(
    directions: Sequence[BackwardDirection],
    T: int,
    N: int,
    wanted: tuple[bool, bool, bool, bool, bool],
    precision: tuple[int, bool, bool, int],
    clusters: Mapping[int, int],
    policy: BackwardPolicy,
    /,
) -> tuple[Sequence[BackwardStep], Sequence[NativeMatrix], int]: ...

# addresses of arrays, containers of W and R, and addresses of their numbers from W to kh
BackwardCell = tuple[CellNumbers, tuple[int, int], tuple[int, ...]]
# T, N, and whether rows are packed; layouts of x, h0, and the gradients of the output and the last
# states; dtype of gradients of weights; wanted gradients
BackwardForm = tuple[int, int, bool, Sequence[Layout], int, Sequence[bool]]

# zero: address of a float32 zero. precision: as for `layer_backward_of`. Returns steps, and bytes
# of the workspace. For their tensors see `GRUTensor` in cuda/host/gru_backward.hpp.
def gru_backward_of(
    cells: Sequence[BackwardCell],
    directions: int,
    form: BackwardForm,
    zero: int,
    precision: tuple[int, bool, bool, int],
    clusters: Mapping[int, int],
    policy: BackwardPolicy,
    /,
) -> tuple[Sequence[BackwardStep], int]: ...

# for tests: the shapes of a backward's launches, see cuda/host/plans/backward_shapes.hpp
class BackShape:
    """The shape of a recurrence of gradients in clusters."""

    units: int
    blocks: int
    tiles: int
    split: int
    rows: int
    fits: bool
    def __init__(
        self,
        units: int,
        blocks: int,
        tiles: int,
        split: int,
        rows: int,
        planes: int,
        weight_planes: int,
        /,
    ) -> None: ...
    def macros(self, half: bool, operand: int, directions: int, /) -> dict[str, object]: ...

def possible_back_shapes(
    H: int, planes: int, weight_planes: int, clusters: Mapping[int, int], /
) -> list[BackShape]: ...
def choose_back_shape(
    H: int,
    N: int,
    directions: int,
    planes: int,
    weight_planes: int,
    clusters: Mapping[int, int],
    /,
) -> BackShape | None: ...

class BackGridShape:
    """The shape of a recurrence of gradients over a whole GPU."""

    blocks: int
    tiles: int
    columns: int
    warps: int
    parked: int
    chunk: int
    ahead: int
    loads: int
    rows: int
    groups: int
    registers: int
    shared_bytes: int
    def __init__(
        self,
        H: int,
        blocks: int,
        tiles: int,
        columns: int,
        warps: int,
        parked: int,
        chunk: int,
        ahead: int,
        /,
    ) -> None: ...
    def clusters(self, N: int, /) -> int: ...
    def macros(self, half: bool, /) -> dict[str, object]: ...

def possible_back_grids(H: int, N: int, clusters: Mapping[int, int], /) -> list[BackGridShape]: ...
def choose_back_grid(H: int, N: int, clusters: Mapping[int, int], /) -> BackGridShape | None: ...

class DerivativesShape:
    """The blocks of the derivatives of bytes."""

    unit_warps: int
    groups: int
    macros: dict[str, object]
    def __init__(
        self, unit_warps: int, groups: int, padded: tuple[int, int], table_bytes: int, /
    ) -> None: ...
    def grid(
        self, H: int, rows: int, directions: int, processors: int, /
    ) -> tuple[NativeGrid, int]: ...

def choose_derivatives(
    H: int, rows: int, padded: tuple[int, int], table_bytes: int, clusters: bool, /
) -> DerivativesShape | None: ...
def variants(only_runnable: bool = True) -> list[str]: ...
def left_out() -> list[str]: ...

# for tests: a factor greater than 0 on the least work that a thread is started for
def set_thread_price(price: float, /) -> None: ...
def threads_started() -> int: ...
def multiply(variant: str, loops: int) -> int: ...
def read_memory(address: int, bytes: int, loops: int) -> int: ...
