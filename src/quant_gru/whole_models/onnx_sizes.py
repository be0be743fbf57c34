"""Which sizes of an exported model are dynamic: those that change in PyTorch and in the file."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch

from quant_gru.errors import QuantGRUError, QuantGRUWarning, caller_stacklevel
from quant_gru.interchange.onnx.profiles import EXACT
from quant_gru.interchange.onnx.verify import OutputDifference
from quant_gru.whole_models.onnx_model_verify import ModelFile, Report
from quant_gru.whole_models.other_sizes import freeze_sizes, others, sizes_of
from quant_gru.whole_models.reference_run import as_exported, outputs_of
from quant_gru.whole_models.rounding import real_difference


def verified_model(
    proto: Any,
    model: torch.nn.Module,
    example: Any,
    profile: str,
    traced: Collection[str],
    asked: bool,
) -> Report:
    """Compare a file with its model, and fix sizes that are not as dynamic as the file says.

    Args:
        proto: The file, an `onnx.ModelProto`, which is changed in place.
        model: The model.
        example: As for `export_onnx`.
        profile: As for `export_onnx`.
        traced: Named sizes of inputs that the graph has as constants.
        asked: Whether the caller has said which sizes are dynamic.

    Returns:
        Names of what GRUs read and give, and of outputs of the model -> how they differ, on the
        example and on others of other sizes.

    Raises:
        QuantGRUError: ONNX Runtime refuses the file, it gives other shapes than PyTorch, the
            model gives other outputs when it is called again, or a size that should be dynamic is
            not.
    """
    with as_exported(model, profile != "float"):
        _expect_repeatable(model, example)
        file = ModelFile(proto, model)
        report = file.differences(example)
        check = _Check(file, example, report)
        # a file that is wrong on the example says nothing about sizes
        if not any(isinstance(each, OutputDifference) and each.wrong for each in report.values()):
            check.run([name for name in check.sizes.values if name not in traced])
        check.find_frozen([name for name in check.sizes.values if name in traced])
    if check.frozen:
        check.tell(asked)
    freeze_sizes(proto, check.fixed)
    if profile not in EXACT:
        _warn_of_float_layers(check.report)
    return check.report


def _warn_of_float_layers(report: Report) -> None:
    """Warn if float layers differ by more than rounding, which no profile explains."""
    listed = "; ".join(
        f"{name}: {each}"
        for name, each in report.items()
        if isinstance(each, OutputDifference) and each.wrong
    )
    if listed:
        warnings.warn(
            f"the float layers of the file differ from the model's by more than rounding: {listed}",
            QuantGRUWarning,
            stacklevel=caller_stacklevel(),
        )


def _expect_repeatable(model: torch.nn.Module, example: Any) -> None:
    """Raise if a model gives other outputs at a second call, as no file does.

    Raises:
        QuantGRUError: It does.
    """
    before, after = outputs_of(model, example), outputs_of(model, example)
    same = [
        a.shape == b.shape and not real_difference(a, b).any()
        for a, b in zip(before, after, strict=False)
    ]
    if not all(same) or len(before) != len(after):
        raise QuantGRUError(
            f"Expected a model that gives the same outputs when it is called again, got a "
            f"{type(model).__name__} that does not: it keeps a state between calls, or draws "
            "random numbers, and a file does neither as PyTorch does. Take the state as an input "
            "and return it, or give verify=False"
        )


class _Check:
    """The sizes of a file's inputs, changed one after the other.

    Args:
        file: The file.
        example: The example.
        report: How the file differs on the example; differences at other sizes are added.

    Attributes:
        sizes: The named sizes.
        fixed: Names of sizes that are not dynamic in the file, or not in PyTorch -> values.
        frozen: Those that are dynamic in PyTorch -> how the file differs there.
    """

    def __init__(self, file: ModelFile, example: Any, report: Report) -> None:
        self._file, self._example = file, example
        self.report, self.sizes = report, sizes_of(file.inputs, example)
        self.fixed: dict[str, int] = {}
        self.frozen: dict[str, str] = {}

    def run(self, names: Sequence[str]) -> None:
        """Find out which of these sizes are dynamic."""
        dynamic = [part for group in self.sizes.groups(names) for part in self._dynamic(group)]
        every = [name for part in dynamic for name in part]
        wrong = self._wrong(every) if len(dynamic) > 1 else None
        if wrong:
            self._fix(every, wrong)

    def find_frozen(self, names: Sequence[str]) -> None:
        """Find out which of these sizes, constants in the graph, are dynamic in PyTorch."""
        for group in self.sizes.groups(names):
            alone = [name for name in group if self._accepted([name]) is not None]
            together = group if not alone and self._accepted(group) is not None else []
            self.frozen.update(dict.fromkeys([*alone, *together], "the graph has it as a constant"))

    def tell(self, asked: bool) -> None:
        """Warn of sizes that the file has fixed.

        Raises:
            QuantGRUError: The caller has asked for dynamic sizes.
        """
        inputs = [each.name for each in self._file.inputs]
        listed = "; ".join(
            f"axis {axis} of {inputs[index]!r} is {self.sizes.values[name]} ({reason})"
            for name, reason in self.frozen.items()
            for index, axis in self.sizes.axes[name][:1]
        )
        why = "tracing fixes sizes that pass through len(x), int(..) or a loop over them"
        if asked:
            raise QuantGRUError(
                f"Expected the sizes of dynamic_shapes, got fixed ones: {listed}; {why}"
            )
        warnings.warn(
            f"the model takes other sizes, the file does not: {listed}; {why}",
            QuantGRUWarning,
            stacklevel=caller_stacklevel(),
        )

    def _dynamic(self, group: Sequence[str]) -> list[list[str]]:
        """Return the sizes of a group that are dynamic, together or one by one; fix the others."""
        together = self._wrong(group)
        if together == "":
            return [list(group)]
        found = []
        alone = {name: self._wrong([name]) if len(group) > 1 else together for name in group}
        for name, wrong in alone.items():
            if wrong == "":
                found.append([name])
            else:
                self._fix([name], wrong)
        if together and not any(alone.values()):
            # sizes that PyTorch changes together only
            self._fix([name for name, wrong in alone.items() if wrong is None], together)
        return found

    def _fix(self, names: Sequence[str], reason: str | None) -> None:
        self.fixed.update({name: self.sizes.values[name] for name in names})
        if reason:
            self.frozen.update(dict.fromkeys(names, reason))

    def _accepted(self, names: Sequence[str]) -> Any:
        """Return an example in which these sizes are others and PyTorch runs, or None."""
        for example in others(self._example, self.sizes, names):
            try:
                self._file.outputs(example)
            except Exception:  # what models raise shares no other class
                continue
            return example
        return None

    def _wrong(self, names: Sequence[str]) -> str | None:
        """Return how the file differs at other sizes: '' not at all, None if PyTorch has none."""
        example = self._accepted(names)
        if example is None:
            return None
        try:
            found = self._file.differences(example)
        except QuantGRUError as error:
            return str(error)
        for name, each in found.items():
            if isinstance(each, OutputDifference) and each.differing:
                return f"{name}: {each}"
        for name, each in found.items():
            self.report[name] = self.report[name] + each if name in self.report else each
        return ""
