"""What a forward pass saves, and the forms in which it is held; see saving/native."""

from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from actnn.saving.held import Held, Layout
from actnn.saving.records import Choice, Record
from actnn.saving.sides import Intervals, Sides

class Counter:
    """Bytes that are held for the backward passes to come."""

    def __init__(self) -> None: ...
    @property
    def bytes(self) -> int: ...

class Kept:
    """The tensor itself; an in-place operation after saving is an error, as in plain PyTorch."""

    @property
    def held(self) -> int: ...
    @property
    def tensor(self) -> Tensor: ...
    @property
    def codes(self) -> None: ...
    def replace(self, function: Callable[[], Tensor], /) -> None:
        """Let unpack return the result of a function instead of the tensor."""
        ...

    def unpack(self, view: Layout | None = None) -> Tensor: ...

class Compressed:
    """Codes of the tensor, in storage order; they fit every dense view of the same elements.

    Args:
        codes: Packed codes and the parameters of their groups, in the form that `decode` takes.
        decode: Returns the tensor.
        sides: What `positive_mask` returned, if no element is below 0, or `Sides`.
        shape: Shape of the tensor.
        strides: Strides of the decoded tensor.
        dtype: Its dtype.
        held: Bytes of codes, parameters and mask.
        groups: Groups of codes.
        counter: Counts the bytes.
    """

    def __init__(
        self,
        codes: Any,
        decode: Callable[[Any], Tensor],
        sides: Tensor | Sides | None,
        shape: torch.Size,
        strides: tuple[int, ...],
        dtype: torch.dtype,
        held: int,
        groups: int,
        counter: Counter,
        /,
    ) -> None: ...
    @property
    def held(self) -> int: ...
    @property
    def codes(self) -> tuple[Any, int, torch.Size] | None: ...
    def keep(self, other: Held, /) -> None: ...
    def divided(self) -> None:
        """Say that backward divides by the tensor: the next ones like it are to be exact."""
        ...

    def compares(self, intervals: Intervals, /) -> None:
        """Say with what backward compares the tensor: the next ones like it get their sides."""
        ...

    def hold_beside(self, tensor: Tensor | None, /) -> None:
        """Hold the tensor beside its codes, for operations that divide by it; None: only codes."""
        ...

    def unpack(self, view: Layout | None = None) -> Tensor: ...

class View:
    """A view of elements that are held once."""

    @property
    def codes(self) -> tuple[Any, int, torch.Size] | None: ...
    def keep(self, other: Held, /) -> None: ...
    def divided(self) -> None: ...
    def compares(self, intervals: Intervals, /) -> None: ...
    def hold_beside(self, tensor: Tensor | None, /) -> None: ...
    def unpack(self) -> Tensor: ...

class ModulePaths:
    """Paths of modules by their ids; the code of a call, the file of torch.utils.checkpoint."""

    def __init__(self, paths: Mapping[int, str], call: CodeType, checkpoint: str, /) -> None: ...
    def current(self) -> tuple[str, bool, nn.Module | None]: ...

class Records:
    """Records, made when somebody asks for them."""

    def __init__(self, record: type[Record], /) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Record: ...
    def change(self, index: int, held: int, reason: str, choice: Choice, /) -> None: ...

class ModelTensors:
    """Parameters and buffers of a model: they are alive anyway."""

    def __init__(self) -> None: ...
    def read(self, model: nn.Module, paths: ModulePaths, /) -> None:
        """Read which ones a model has now; quick if they are those of the last time."""
        ...

class Decisions:
    """Decisions about kinds of tensors, valid as long as the settings are."""

    def __init__(self) -> None: ...

class Uses:
    """What the first steps find out about kinds of tensors."""

    def __init__(self) -> None: ...

class Step:
    """The saved tensors of one forward pass in one thread."""

    opaque: Any

    def __init__(
        self,
        min_bytes: int,
        by_sample: bool,
        decides_by_path: bool,
        caches: bool,
        adaptive: bool,
        counter: Counter,
        paths: ModulePaths,
        model: ModelTensors,
        decisions: Decisions,
        uses: Uses,
        records: Records,
        /,
    ) -> None: ...
    def pack(self, tensor: Tensor, /) -> Held | View:
        """Return a tensor in the form in which it is held for backward."""
        ...

    def add_known(self, tensor: Tensor, reason: str, /) -> None:
        """Say that a storage is alive anyway, and why."""
        ...

    def keep_exact(self, tensor: Tensor, reason: str, /) -> None:
        """Say that a tensor is about to be saved, and is rounded only if a choice names it."""
        ...

    def forget(self) -> None:
        """Release what only the forward pass needs."""
        ...

    @property
    def records(self) -> Records: ...
    @property
    def is_first(self) -> bool:
        """Whether it is the first one for which the uses of tensors are found out."""
        ...

    def _next(self) -> int: ...
    def _claim(self, codes: Tensor, reason: str, instead_of: Tensor, choice: Choice, /) -> None: ...
    def _promise(
        self,
        tensor: Tensor,
        instead_of: Tensor,
        op: str,
        choice: Choice,
        made: Tensor | None,
        scale: Any,
        /,
    ) -> None: ...
    def _note(self, reason: str, instead_of: Tensor, choice: Choice, /) -> None: ...
    def _keep_operand(self, tensor: Tensor, nbytes: int, /) -> Kept: ...
    def _compare(self, tensor: Tensor, /) -> None: ...
    def _operands(self) -> list[tuple[Any, Any, int, int]]: ...
    def _last_kept(self) -> Kept | None: ...

def pack_hook(other: Callable[[Any], Any], /) -> Callable[[Any], Any]:
    """Return the hook of a saved tensor; another function is for subclasses of Tensor."""
    ...

def unpack_hook(other: Callable[[Any], Any] | None, /) -> Callable[[Any], Any]:
    """Return the hook that returns it.

    Another function is for tensors and tuples; None if there are none.
    """
    ...

def set_rules(keep: Choice, forms: frozenset[str], looking_back: frozenset[str], /) -> None: ...
def set_held_rules(
    refuse_changed: Callable[[Tensor, int], None],
    refuse_second_derivative: Callable[[], None],
    restore_sides: Callable[[Tensor, Tensor | Sides], Tensor],
    view_of_storage: Callable[..., Tensor],
    norms: frozenset[str],
    limit_normalized: Callable[[Any, Tensor, Any, int, torch.Size], Tensor],
    /,
) -> None: ...
def in_custom_function(frame: FrameType, /) -> bool:
    """Whether a frame is that in which a Function of the user saves tensors."""
    ...

def set_divides(divides: Callable[[Tensor, int, str | None], bool | Intervals], /) -> None: ...
def mark_computed() -> None: ...
def begin(step: Step, pack: Callable[[Tensor], Any] | None, /) -> None: ...
def end() -> None: ...
def active() -> Any: ...
def active_for(tensor: Tensor, least: int = 0, /) -> Any: ...
def transformed() -> bool: ...
def pack(tensor: Tensor, /) -> Held | View: ...
