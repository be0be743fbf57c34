"""Verification of ONNX files of whole models: ONNX Runtime against PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from quant_gru.errors import QuantGRUError
from quant_gru.execution.sequence_layout import Sequence
from quant_gru.interchange.onnx import recorded
from quant_gru.interchange.onnx.source import Source
from quant_gru.interchange.onnx.verify import (
    Difference,
    OutputDifference,
    compare,
    run_session,
    session_of,
)
from quant_gru.whole_models.graph_calls import calls_of, with_outputs
from quant_gru.whole_models.other_sizes import tensors_of
from quant_gru.whole_models.reference_run import GRUS, answered, outputs_of
from quant_gru.whole_models.rounding import beyond_rounding, real_difference

Report = dict[str, Difference]
_MOST = float(1 << 32)


class ModelFile:
    """The file of a whole model beside the model, to be compared on any example.

    Args:
        proto: The file, an `onnx.ModelProto`.
        model: The model, as `reference_run.as_exported` leaves it.

    Raises:
        QuantGRUError: ONNX Runtime refuses the file.
    """

    def __init__(self, proto: Any, model: torch.nn.Module) -> None:
        import onnx

        self.model, self.inputs = model, list(proto.graph.input)
        self._calls = calls_of(proto.graph)
        borders = {name for values in self._calls.values() for name in values.values()}
        self._stored = {
            each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).copy())
            for each in proto.graph.initializer
            if each.name in borders
        }
        self._outputs = [each.name for each in proto.graph.output]
        # more outputs may keep operators from being fused: users get those of the second session
        self._session = session_of(with_outputs(proto, borders).SerializeToString())
        self._own_session = session_of(proto.SerializeToString())
        self._names = {
            recorded.number_of(gru): name
            for name, gru in model.named_modules()
            if isinstance(gru, GRUS)
        }
        self._sources: dict[int, Source] = {}

    def differences(self, example: Any) -> Report:
        """Compare all that the file computes from an example with PyTorch.

        Every GRU is compared with its plan on the values that reach it in the file. The float
        layers run in PyTorch with the results that the GRUs have in the file, so that they may
        differ by rounding alone.

        Returns:
            '<call>.output' and '<call>.h_n' of each call of a GRU, '<call>.input' for what
            reaches it, and the outputs of the model by their names in the file.

        Raises:
            QuantGRUError: ONNX Runtime cannot run the example, or gives other shapes.
        """
        feeds = self._feeds(example)
        values = {**self._stored, **self._run(self._session, feeds)}
        values |= {name: torch.from_numpy(each) for name, each in feeds.items()}
        run = _Run(self, values)
        expected = run.first(example)
        found = {**run.given, **{name: values[name] for name in self._outputs}}
        for name, value in expected.items():
            _expect_shape(name, found[name], value)
        beyond = beyond_rounding(found, expected, lambda: run.again(example))
        # what users see: the file as it is, and the model with its own GRUs
        own, plain = self._run(self._own_session, feeds), self.outputs(example)
        report = dict(run.codes)
        for name, (differing, largest) in beyond.items():
            pair = (own[name], plain[name]) if name in plain else (found[name], expected[name])
            real = real_difference(*pair)
            most = float(real.max()) if real.numel() else 0.0
            each = OutputDifference(real.numel(), differing, int(min(largest, _MOST)), most)
            # the input, states and lengths that reach a GRU are one entry
            key = name if name in plain else f"{name.rpartition('.')[0]}.input"
            report[key] = report[key] + each if key in report else each
        return report

    def outputs(self, example: Any) -> dict[str, Tensor]:
        """Return PyTorch's outputs by their names in the file.

        Raises:
            QuantGRUError: The file has another number of them.
        """
        found = outputs_of(self.model, example)
        if len(found) != len(self._outputs):
            raise QuantGRUError(
                f"Expected the file to have {len(found)} outputs, as the model, got {self._outputs}"
            )
        return dict(zip(self._outputs, found, strict=True))

    def call(self, gru: Any, use: int) -> tuple[str, Mapping[str, str]]:
        """Return the name of a call of a GRU, and the names of its values in the file."""
        number = recorded.number_of(gru)
        name = self._names[number] + (f"#{use}" if use else "")
        return name, self._calls.get((number, use), {})

    def source(self, gru: Any) -> Source:
        """Return what the file has of a GRU."""
        number = recorded.number_of(gru)
        if number not in self._sources:
            self._sources[number] = recorded.source_of(number)
        return self._sources[number]

    def _feeds(self, example: Any) -> dict[str, Any]:
        tensors = tensors_of(example)
        names = [each.name for each in self.inputs]
        if len(tensors) != len(names):
            raise QuantGRUError(
                f"Expected the file to have {len(tensors)} inputs, as the example, got {names}"
            )
        if any(tensor.dtype is torch.bfloat16 for tensor in tensors):
            raise QuantGRUError(
                "Expected inputs of a dtype that numpy has, to run them in ONNX Runtime, got "
                "bfloat16; give verify=False"
            )
        return {
            name: tensor.detach().cpu().numpy() for name, tensor in zip(names, tensors, strict=True)
        }

    def _run(self, session: Any, feeds: Mapping[str, Any]) -> dict[str, Tensor]:
        found = run_session(session, [each.name for each in session.get_outputs()], feeds)
        return {name: torch.as_tensor(each) for name, each in found.items()}


class _Run:
    """Runs of a model in PyTorch with the results that its GRUs have in a file.

    Args:
        file: The file and its model.
        values: Name -> value in ONNX Runtime.

    Attributes:
        codes: How the GRUs differ from their plans, after the first run.
        given: What reaches the GRUs in ONNX Runtime, after the first run: 'encoder.x', ..
    """

    def __init__(self, file: ModelFile, values: Mapping[str, Tensor]) -> None:
        self._file, self._values = file, values
        self.codes: Report = {}
        self.given: dict[str, Tensor] = {}

    def first(self, example: Any) -> dict[str, Tensor]:
        """Return what reaches the GRUs, and the outputs, of a run; fill `codes` and `given`."""
        return self._outputs(example, self._compare)

    def again(self, example: Any) -> dict[str, Tensor]:
        """Return what reaches the GRUs, and the outputs, of a run."""
        return self._outputs(example, lambda *_: None)

    def _outputs(self, example: Any, look: Callable[..., None]) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}

        def answer(gru: Any, use: int, sequence: Sequence) -> tuple[Tensor, Tensor] | None:
            label, names = self._file.call(gru, use)
            given = {key: self._values[each] for key, each in names.items()}
            if not given:
                return None
            own = _border(sequence)
            look(gru, label, given, own)
            seen.update({f"{label}.{key}": each for key, each in own.items() if key in given})
            (T, N, _), (states, _, H) = own["x"].shape, own["h0"].shape
            # a result that the file does not have is one that nothing reads
            nothing = torch.full((), torch.nan, device="cpu")
            y = given.get("y", nothing.expand(T, N, self._file.source(gru).directions * H))
            return y[:T], given.get("h_n", nothing.expand(states, N, H))

        with torch.no_grad(), answered(self._file.model, answer):
            outputs = self._file.outputs(example)
        return {**seen, **outputs}

    def _compare(
        self, gru: Any, label: str, given: Mapping[str, Tensor], own: Mapping[str, Tensor]
    ) -> None:
        """Compare a call with its plan, and keep what reaches it."""
        reaches = {key: each for key, each in given.items() if key in own}
        if "lengths" in own and "x" in reaches:
            # the file has the steps beyond the ends of rows, too
            x, T = reaches["x"], len(own["x"])
            runs = torch.arange(T, device="cpu")[:, None] < own["lengths"]
            reaches["x"] = x[:T].where(runs[..., None], 0.0) if len(x) >= T else x
        for key, each in reaches.items():
            _expect_shape(f"{label}.{key}", each, own[key])
        self.given.update({f"{label}.{key}": each for key, each in reaches.items()})
        plan = self._file.source(gru).plan
        if plan is None:
            return
        # what an optimizer has made a constant is PyTorch's own
        values = {key: each if key == "lengths" else each.float() for key, each in own.items()}
        found = compare(plan, {k: v.numpy() for k, v in {**values, **given}.items()})
        self.codes.update({f"{label}.{key}": each for key, each in found.items()})


def _border(sequence: Sequence) -> dict[str, Tensor]:
    """Return x (T, N, C), h0 and, of packed rows, lengths that reach a GRU in PyTorch."""
    found = {"x": sequence.x, "h0": sequence.h0}
    if sequence.lengths is not None:
        found["lengths"] = sequence.lengths
    return {name: each.detach().cpu() for name, each in found.items()}


def _expect_shape(name: str, found: Tensor, expected: Tensor) -> None:
    if found.shape != expected.shape:
        raise QuantGRUError(
            f"Expected PyTorch's shape {tuple(expected.shape)} from ONNX Runtime, got "
            f"{tuple(found.shape)} ({name!r}): tracing has changed what the model computes"
        )
