"""Keras models whose GRU layers run in integers, on Keras' torch backend."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from quant_gru.analysis.compare import bytes_of
from quant_gru.analysis.sqnr import as_json, decibels, energies, text_of
from quant_gru.errors import QuantGRUError
from quant_gru.interchange.c.export import CSource
from quant_gru.interchange.foreign.keras import check_settings
from quant_gru.interchange.foreign.optional import needed
from quant_gru.model_files.calibration import calibrate_all
from quant_gru.model_files.feeds import split
from quant_gru.model_files.quantize_onnx import identifier
from quant_gru.modules.frozen import FrozenQuantGRU
from quant_gru.modules.gru import QuantGRU
from quant_gru.whole_models.onnx import export_onnx
from quant_gru.whole_models.selection import ModelConfig, Selection


@dataclass(frozen=True)
class KerasReport:
    """What was gained; `print` it.

    Attributes:
        layers: Path of a GRU layer -> sizes of its GRU.
        outputs: Name of an output -> signal over noise in dB against float.
        bytes: Float weights of the GRU layers, and the files of their frozen GRUs.
        batches: Number of batches that were compared.
        notes: What else to know.
    """

    layers: dict[str, str]
    outputs: dict[str, float]
    bytes: tuple[int, int]
    batches: int
    notes: list[str]

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.layers, *self.outputs))
        lines = [f"{name:{width}}  {kind}" for name, kind in self.layers.items()]
        lines.append("")
        for name, value in self.outputs.items():
            unit = " dB" if math.isfinite(value) else ""
            lines.append(f"{name:{width}}  {text_of(value)}{unit}")
        before, after = self.bytes
        lines.append(
            f"\nGRUs: {before:,} bytes in float, {after:,} in integers ({after / before:.2f})"
        )
        lines.append(f"compared on {self.batches} batch{'es' * (self.batches != 1)}")
        return "\n".join((*lines, *self.notes))

    def to_json(self) -> str:
        """Return all figures as JSON; decibels that are not finite are text."""
        document = asdict(self)
        document["outputs"] = {name: as_json(value) for name, value in self.outputs.items()}
        return json.dumps(document, indent=2)


@dataclass
class QuantizedKeras:
    """A Keras model whose GRU layers run in integers; `print(q.report)` says what was gained.

    Attributes:
        model: The Keras model, for inference; its weights are copies.
        grus: Path of a GRU layer -> its QuantGRU.
        report: Decibels and bytes.
    """

    model: Any
    grus: dict[str, QuantGRU]
    report: KerasReport

    def freeze(self) -> dict[str, FrozenQuantGRU]:
        """Return the integer plan of each GRU layer, by path."""
        return {name: gru.freeze() for name, gru in self.grus.items()}

    def export_c(self, directory: str | os.PathLike[str], *, steps: int = 8) -> dict[str, CSource]:
        """Write each GRU as C99 source into a folder of its own; see `FrozenQuantGRU.export_c`.

        Args:
            directory: The folder above them; a GRU's folder and C names are made of its path.
            steps: Steps of the self-test.
        """
        found = {}
        for name, gru in self.freeze().items():
            word = identifier(name)
            found[name] = gru.export_c(os.path.join(directory, word), word, steps=steps)
        return found

    def export_onnx(
        self, path: str | os.PathLike[str], example: Any, profile: str = "integer", **options: Any
    ) -> Any:
        """Write the model as an ONNX file; see `quant_gru.export_onnx`.

        Args:
            path: Where to write.
            example: An input of the model, a tensor or an array.
            profile: 'integer', 'operator', 'qdq', 'float' or 'node'.
            **options: As for `quant_gru.export_onnx`.
        """
        module = _Module(self.model, self.grus)
        return export_onnx(module, path, torch.as_tensor(example), profile, **options)


class _Module(torch.nn.Module):
    """A Keras model as torch knows one: its GRUs are submodules, which Keras' layers hide."""

    def __init__(self, model: Any, grus: Mapping[str, QuantGRU]) -> None:
        super().__init__()
        self.model = model
        for name, gru in grus.items():
            self.add_module(name.replace(".", "_"), gru)

    def forward(self, x: Any) -> Any:
        return self.model(x, training=False)


def quantize_keras(
    model: Any,
    data: Any,
    config: ModelConfig = None,
    *,
    refine: bool = False,
    progress: bool = True,
) -> QuantizedKeras:
    """Return a Keras 3 model whose GRU layers run in integers; needs the torch backend.

    GRU, Bidirectional(GRU) and RNN(GRUCell) are quantized, with all that Keras does around them:
    `return_sequences`, `return_state`, `go_backwards`, `stateful`, masks, initial states. All other
    layers stay. The model given does not change.

    Args:
        model: A functional or sequential model, or the path of a .keras or .h5 file.
        data: Batches of inputs, as the model takes them; every fifth one, at most 16, is held out
            for the report. An array is one batch.
        config: As for `convert_model`, by paths of layers ('encoder/gru').
        refine: As for `QuantGRU.finalize_calibration`.
        progress: Whether to show a progress bar (only on a terminal).

    Returns:
        The model, its GRUs, and a report.

    Raises:
        QuantGRUError: Keras has another backend, the model has no GRU layer or cannot be cloned, or
            a layer computes something else (`reset_after=False`, other activations).
        CalibrationError: There is no batch.

    Example:
        >>> q = quantize_keras("tagger.keras", batches, "int8_wide")  # doctest: +SKIP
        >>> print(q.report)  # doctest: +SKIP
    """
    keras = _keras()
    if isinstance(model, str | os.PathLike):
        model = keras.models.load_model(os.fspath(model), compile=False)
    if not isinstance(model, keras.Model):
        raise QuantGRUError(f"Expected a Keras model, got a {type(model).__name__}")
    # runs change the states of stateful layers, so the float model is a copy, too
    plain, copied = _cloned(model, keras), _cloned(model, keras)
    layers = _recurrent(copied, keras)
    if not layers:
        raise QuantGRUError(f"Expected a model with a GRU layer, got none in {model.name!r}")
    selection = Selection(config)
    selection.check([name] for name in layers)
    grus = {}
    for name, layer in layers.items():
        own = selection.of([name])
        if own is not None:
            check_settings(layer.cell.get_config(), f"layer {name!r}")
            grus[name] = QuantGRU.from_keras(layer.cell.get_weights(), config=own).eval()
            # Keras lets nobody add to a layer that is built
            object.__setattr__(layer, "inner_loop", _inner_loop(layer, name, grus[name]))
    held: list[Any] = []
    batches = split(_batches(data), held)
    first = calibrate_all(grus, partial(_run, copied), batches, refine, progress, "layer", "batch")
    notes = []
    if not held:
        held.append(first)
        notes.append("decibels are those of a batch that calibration saw: give more")
    return QuantizedKeras(copied, grus, _report(plain, copied, grus, held, notes))


def _keras() -> Any:
    keras = needed("keras", "Keras models")
    if keras.backend.backend() != "torch":
        raise QuantGRUError(
            f"Expected Keras with the backend 'torch', got {keras.backend.backend()!r}; set the "
            "environment variable KERAS_BACKEND=torch before keras is imported"
        )
    return keras


def _recurrent(model: Any, keras: Any) -> dict[str, Any]:
    """Return the layers GRU and RNN(GRUCell) of a model by path, those inside of others too."""
    found: dict[str, Any] = {}
    for layer in model._flatten_layers(include_self=False, recursive=True):
        if isinstance(layer, keras.layers.RNN) and type(layer.cell) is keras.layers.GRUCell:
            count = sum(name.partition("#")[0] == layer.path for name in found)
            found[f"{layer.path}#{count}" if count else layer.path] = layer
    return found


def _batches(data: Any) -> Iterable[Any]:
    return [data] if hasattr(data, "shape") or isinstance(data, Mapping) else data


def _cloned(model: Any, keras: Any) -> Any:
    """Return a copy of a model with its weights."""
    try:
        copied = keras.models.clone_model(model)
        copied.set_weights(model.get_weights())
    except Exception as error:  # Keras raises what it likes
        raise QuantGRUError(
            "Expected a functional or sequential Keras model, got one that cannot be cloned: "
            f"{str(error)[:200]}"
        ) from error
    return copied


def _run(model: Any, batch: Any) -> Any:
    with torch.no_grad():
        return model(batch, training=False)


def _forget(model: Any) -> None:
    """Set the states of stateful layers to zeros."""
    for layer in model._flatten_layers(include_self=False, recursive=True):
        if getattr(layer, "stateful", False):
            layer.reset_state()


def _report(
    model: Any, quantized: Any, grus: Mapping[str, QuantGRU], batches: list[Any], notes: list[str]
) -> KerasReport:
    _forget(quantized)  # of calibration
    sums: dict[str, list[float]] = {}
    for batch in batches:
        real, found = (_named(each, _run(each, batch)) for each in (model, quantized))
        for name, value in real.items():
            total = sums.setdefault(name, [0.0, 0.0])
            for i, part in enumerate(energies(value, found[name])):
                total[i] += part
    _forget(quantized)
    sizes = [bytes_of(gru) for gru in grus.values()]
    floats = sum(4 * parameter.numel() for gru in grus.values() for parameter in gru.parameters())
    layers = {name: f"GRU({gru.input_size}, {gru.hidden_size})" for name, gru in grus.items()}
    outputs = {name: decibels(*total) for name, total in sums.items()}
    return KerasReport(
        layers, outputs, (floats, sum(each.files for each in sizes)), len(batches), notes
    )


def _named(model: Any, value: Any) -> dict[str, Tensor]:
    """Return the outputs of a model by name."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple)):
        names = [f"{name}_{i}" for i, name in enumerate(model.output_names)]
        return dict(zip(names, value, strict=True))
    return {"output": value}


def _inner_loop(
    layer: Any, name: str, gru: QuantGRU
) -> Callable[..., tuple[Tensor, Tensor, list[Tensor]]]:
    """Return what takes the place of a layer's loop over time: the same results, by a QuantGRU."""

    def inner_loop(
        sequences: Tensor, initial_state: Any, mask: Any, training: bool = False
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        if training:
            raise QuantGRUError(
                "Expected inference, got training=True: the model of quantize_keras cannot be "
                f"trained (layer {name!r})"
            )
        state = initial_state[0] if isinstance(initial_state, (list, tuple)) else initial_state
        mask = mask[0] if isinstance(mask, (list, tuple)) else mask
        x = sequences.flip(1) if layer.go_backwards else sequences
        if mask is None:
            y, h_n = gru(x, state[None])
            return y[:, -1], y, [h_n[0]]
        runs = mask.bool().reshape(mask.shape[0], -1)
        runs = runs.flip(1) if layer.go_backwards else runs
        y, last = _masked(gru, x, state, runs)
        if layer.zero_output_for_mask:
            y = torch.where(runs[..., None], y, 0.0)
        return y[:, -1], y, [last]

    return inner_loop


def _masked(gru: QuantGRU, x: Tensor, state: Tensor, runs: Tensor) -> tuple[Tensor, Tensor]:
    """Run the steps that a mask leaves; others repeat the output before them, at first zeros.

    Args:
        gru: The GRU, with the batch first.
        x: (N, T, C).
        state: (N, H).
        runs: bool (N, T).

    Returns:
        Outputs (N, T, H), and last states (N, H).
    """
    T, counts = x.shape[1], runs.sum(1)
    order = torch.argsort(runs.logical_not().to(torch.uint8), dim=1, stable=True)
    front = x.gather(1, order[..., None].expand(x.shape))
    lengths = counts.clamp(min=1).cpu()
    packed = pack_padded_sequence(front, lengths, batch_first=True, enforce_sorted=False)
    y, h_n = gru(packed, state[None])
    y, _ = pad_packed_sequence(y, batch_first=True, total_length=T)
    done = runs.cumsum(1)
    index = (done - 1).clamp(min=0)[..., None].expand(y.shape)
    y = torch.where(done[..., None] > 0, y.gather(1, index), 0.0)
    return y, torch.where(counts[:, None] > 0, h_n[0], state)
