"""What a step held for its backward: by whom, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actnn.errors import ActNNError
from actnn.planning.blocks import Unhooked
from actnn.planning.meter import meter_for
from actnn.planning.plot import plot_memory
from actnn.planning.sizes import format_bytes
from actnn.planning.timeline import Timeline, record
from actnn.planning.units import Unit, find_units
from actnn.saving import Record, Saving
from actnn.saving.module_classes import is_swapped
from actnn.saving.records import LOSSLESS


@dataclass(frozen=True)
class Report:
    """Saved tensors of one step.

    Attributes:
        records: Each saved tensor: module, shape, bytes before and after, reason.
        peak: Peak of the step in bytes; None if it was not measured.
        timeline: Memory over the step; None if it was not measured.
        comparisons: Steps that a comparison of gradients ran before the measured step began. The
            peak contains them; most steps have none.
    """

    records: list[Record]
    peak: int | None = None
    timeline: Timeline | None = None
    comparisons: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the saved tensors before compression.

        Without actnn a step may save more tensors: modules such as norms keep fewer. `estimate`
        and level L0 have all of them.
        """
        return sum(record.nbytes for record in self.records)

    @property
    def held(self) -> int:
        """Bytes that are held."""
        return sum(record.held for record in self.records)

    def by_reason(self) -> dict[str, tuple[int, int, int]]:
        """Reason -> tensors, bytes without compression, bytes held; the largest first."""
        tensors: Counter[str] = Counter()
        before: Counter[str] = Counter()
        after: Counter[str] = Counter()
        for each in self.records:
            reason = "shared" if each.reason.startswith("shared with") else each.reason
            tensors[reason] += 1
            before[reason] += each.nbytes
            after[reason] += each.held
        order = sorted(tensors, key=lambda reason: -after[reason])
        return {reason: (tensors[reason], before[reason], after[reason]) for reason in order}

    def by_module(self) -> dict[str, tuple[int, int]]:
        """Path of a module -> bytes without compression, bytes held, in order of saving."""
        before: Counter[str] = Counter()
        after: Counter[str] = Counter()
        for each in self.records:
            before[each.module] += each.nbytes
            after[each.module] += each.held
        return {module: (before[module], after[module]) for module in before}

    def plot(self, path: str | Path) -> None:
        """Draw memory over the step into a file; needs matplotlib."""
        plot_memory(self.timeline, path)

    def __str__(self) -> str:
        modules = {m or "(model)": each for m, each in self.by_module().items() if any(each)}
        reasons = self.by_reason()
        width = max(map(len, [*modules, *reasons, "module"]))
        lines = [f"{'module':<{width}}  {'exact':>10}  {'held':>10}"]
        lines += [
            f"{name:<{width}}  {format_bytes(before):>10}  {format_bytes(after):>10}"
            for name, (before, after) in modules.items()
        ]
        lines += ["", f"{'why':<{width}}  {'exact':>10}  {'held':>10}  tensors"]
        lines += [
            f"{name:<{width}}  {format_bytes(before):>10}  {format_bytes(after):>10}  {count:7d}"
            for name, (count, before, after) in reasons.items()
        ]
        lines += ["", f"held {format_bytes(self.held)}, exact {format_bytes(self.nbytes)}"]
        if self.peak is not None:
            lines[-1] += f", peak {format_bytes(self.peak)}"
        if self.comparisons:
            lines.append(
                "The peak is that of a comparison with exact tensors, which ran "
                f"{self.comparisons} steps before this one. Run report again for that of most steps"
            )
        return "\n".join(lines)


def report(model: nn.Module, step: Callable[[], Tensor] | None = None) -> Report:
    """Say what the last step of a compressed model held for its backward, and why.

    Args:
        model: A model after `compress` or `fit`, or a wrapper around one.
        step: Runs a forward and returns the loss. If it is given, this step is run, backward
            included, and its memory measured; gradients are added to the parameters'.

    Returns:
        The report: print it, or plot memory over the step.

    Raises:
        ActNNError: If the model is not compressed, no step has been run, or `step` does not return
            a loss.

    Example:
        >>> network = compress(network, bits=4)
        >>> found = report(network, lambda: network(images).sum())
        >>> found.peak > 0
        True
    """
    model = _compressed(model)
    saving = cast(Saving, model.actnn)
    if step is None:
        if not saving.records:
            raise ActNNError(
                "Expected a training step before report(), got none, or one that records nothing: "
                "that of a plan without codes, or of compiled code; pass step=. A method other "
                "than forward counts inside of `with model.actnn:`"
            )
        return Report(list(saving.records))
    if not callable(step):
        raise ActNNError(f"Expected step to be a function without arguments, got {step!r}")
    device = next(model.parameters()).device
    known: list[Tensor] = [*model.parameters(), *model.buffers()]
    units = _finest(model) if next(model.children(), None) is not None else []
    allocator = saving.adaptive
    before = 0 if allocator is None else allocator.runs
    with _observed(model) as observer, meter_for(device, known) as meter:
        memory = record(units, partial(_loss_of, step), device, meter)
    compared = 0 if allocator is None else allocator.runs - before
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Report(list(observer.records), memory.peak, memory, compared)


def _loss_of(step: Callable[[], Tensor]) -> Tensor:
    loss = step()
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = type(loss).__name__
        if isinstance(loss, Tensor):
            what = f"a tensor {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
        raise ActNNError(
            "Expected step to return the loss, one number with a graph, of which report() runs "
            f"the backward, got {what}"
        )
    return loss


@contextmanager
def _observed(model: nn.Module) -> Iterator[Saving]:
    """Yield what records the steps of a model: its Saving, unless it runs without one.

    A model that runs without keeps doing so. Hooks see what autograd saves, and change nothing.
    """
    if not is_swapped(model, Unhooked):
        yield cast(Saving, model.actnn)
        return
    observer = Saving(bits=LOSSLESS, model=model)
    hooks = saved_tensors_hooks(lambda x: observer.hooks_in("").pack(x), lambda held: held.unpack())

    def enter(_: nn.Module, args: object, named: object) -> None:
        observer.__enter__()
        hooks.__enter__()  # not those that tell layers to keep less
        observer.add_inputs((args, named))

    def leave(*_: object) -> None:
        hooks.__exit__(None, None, None)
        observer.__exit__(None, None, None)

    handles = [
        model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
        model.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield observer
    finally:
        for handle in handles:
            handle.remove()


def _compressed(model: nn.Module) -> nn.Module:
    """Return the model itself if it is compressed, or the one in it that is."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    found = [each for each in modules if isinstance(vars(each).get("actnn"), Saving)]
    if not found or (found[0] is not model and len(found) > 1):
        raise ActNNError(
            f"Expected a model after actnn.compress or actnn.fit, or one with one of these inside, "
            f"got {type(model).__name__} with {len(found)}"
        )
    return found[0]


def _finest(model: nn.Module) -> list[Unit]:
    """The units of the model and, inside of blocks, their children."""
    finest = []
    for unit in find_units(model):
        children = [Unit(f"{unit.path}.{n}", m) for n, m in unit.module.named_children()]
        finest += children or [unit]
    return finest
