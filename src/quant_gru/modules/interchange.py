"""GRUs of other frameworks, read into a QuantGRU and written from one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from quant_gru.config.choice import OneConfig
from quant_gru.interchange.foreign import haste, keras, onnx_node
from quant_gru.interchange.foreign.float_gru import FloatGRU
from quant_gru.modules import encodings
from quant_gru.modules.calibration_methods import CalibrationMethods

GRU = TypeVar("GRU", bound="Interchange")


class Interchange(CalibrationMethods):
    """The part of a QuantGRU that reads and writes the formats of others."""

    @classmethod
    def from_onnx(
        cls: type[GRU],
        model: Any,
        node: str | Sequence[str] | None = None,
        *,
        reverse: bool = False,
        config: OneConfig | None = None,
    ) -> GRU:
        """Return a GRU with the weights of GRU nodes in an ONNX model; needs the package onnx.

        `batch_first` is True if the node has `layout` 1. A constant initial state other than zero
        is not part of a QuantGRU; it causes a warning.

        Args:
            model: The path of an .onnx file, or an `onnx.ModelProto`.
            node: Name of the node or of one of its outputs; None if there is one GRU node. Several
                names, from the lowest layer to the highest, give a GRU of several layers.
            reverse: Whether to accept nodes of direction 'reverse'. The result is then a forward
                GRU: flip inputs and outputs in time.
            config: Configuration of the result, as for `QuantGRU`; None for the default.

        Raises:
            QuantGRUError: There is no such node, its attributes are not those of torch.nn.GRU
                (`linear_before_reset` 1, Sigmoid and Tanh, no clip), or its weights depend on
                inputs of the model.

        Example:
            >>> gru = QuantGRU.from_onnx("denoiser.onnx", "/encoder/GRU")
        """
        return _made(cls, onnx_node.read(model, node, reverse), config)

    @classmethod
    def from_keras(
        cls: type[GRU],
        weights: Any,
        layer: str | Sequence[str] | None = None,
        *,
        config: OneConfig | None = None,
    ) -> GRU:
        """Return a GRU with the weights of Keras' GRU, with `batch_first` True as in Keras.

        Only `reset_after=True` is possible, Keras' default. Arrays without a bias do not show it
        and are taken to have it.

        Args:
            weights: The result of `get_weights()` of a layer GRU or Bidirectional(GRU): kernel
                (C, 3H), recurrent_kernel (H, 3H) and bias (2, 3H), for each direction. A list of
                such results gives a GRU of several layers. Or the path of a .keras, .h5 or
                .weights.h5 file, which needs the package h5py.
            layer: Name of a layer in a file; names from the lowest to the highest for several
                layers; None if the file has one GRU.
            config: Configuration of the result, as for `QuantGRU`; None for the default.

        Raises:
            QuantGRUError: The weights are not those of a GRU, or of one that computes something
                else (`reset_after=False`, other activations, another `merge_mode`).

        Example:
            >>> gru = QuantGRU.from_keras(model.get_layer("gru").get_weights())
        """
        return _made(cls, keras.read(weights, layer), config)

    @classmethod
    def from_haste(cls: type[GRU], parameters: Any, *, config: OneConfig | None = None) -> GRU:
        """Return a GRU with the parameters of Haste's GRU.

        Args:
            parameters: 'kernel' (C, 3H), 'recurrent_kernel' (H, 3H), 'bias' (3H,) and
                'recurrent_bias' (3H,), columns in the order z, r, h: the state_dict of
                `haste_pytorch.GRU`. A sequence has one such mapping per layer, or a pair for both
                directions.
            config: Configuration of the result, as for `QuantGRU`; None for the default.

        Raises:
            QuantGRUError: A parameter is missing, unknown or of a wrong shape.
        """
        return _made(cls, haste.read(parameters), config)

    def to_haste(self, layer: int = 0, reverse: bool = False) -> dict[str, Tensor]:
        """Return the float weights of one layer and direction as parameters of Haste's GRU.

        Args:
            layer: Index of the layer.
            reverse: Whether to return the reverse direction.

        Returns:
            'kernel' (C, 3H), 'recurrent_kernel' (H, 3H), 'bias' (3H,) and 'recurrent_bias' (3H,),
            copies with columns in the order z, r, h; zero biases for a GRU without biases.

        Raises:
            QuantGRUError: There is no such layer or direction.
        """
        self._check_cell(layer, reverse)
        W, R, bw, br = (
            None if each is None else each.detach() for each in self._weights()[layer][int(reverse)]
        )
        assert W is not None
        assert R is not None
        return haste.write(W, R, bw, br)

    def export_encodings(
        self,
        path: str | os.PathLike[str],
        version: str = "1.0.0",
        *,
        onnx: Any = None,
        nodes: str | Sequence[str] | None = None,
    ) -> None:
        """Write the scales of inputs, states, outputs and weights as encodings of AIMET.

        AIMET has no place for the operators inside a GRU. A parameter file beside the encodings has
        all operators: 'gru.encodings' comes with 'gru.quant_params.json'. A warning names tensors
        whose scales do not fit the format, such as both directions of a bidirectional GRU in one
        tensor.

        Args:
            path: The file of encodings.
            version: '0.6.1', '1.0.0' or '2.0.0'.
            onnx: The path of an ONNX model, or an `onnx.ModelProto`, whose GRU nodes give the
                names of tensors; rows are then in the order of ONNX (z, r, n). None for names like
                those of nn.GRU's parameters: 'input_l0', 'output_l0', 'weight_ih_l0_reverse'.
            nodes: Names of the GRU nodes, lowest layer first; None to find them by their weights.

        Raises:
            CalibrationError: There are no scales.
            QuantGRUError: The version is unknown, the ONNX model does not fit, or a file cannot be
                written.

        Example:
            >>> gru.export_encodings("gru.encodings", "2.0.0", onnx="model.onnx")
        """
        encodings.write({"": self}, path, version, onnx, None if nodes is None else {"": nodes})

    def load_encodings(
        self,
        path: str | os.PathLike[str],
        *,
        onnx: Any = None,
        nodes: str | Sequence[str] | None = None,
    ) -> None:
        """Take the scales of inputs, states, outputs and weights from encodings of AIMET.

        Scales of other operators do not change, and tensors without an encoding keep theirs.
        Signed and unsigned codes of the same real values are equal: an operator keeps
        `is_unsigned`, unless only the other one has zero point 0 in a symmetric operator.

        Args:
            path: A file of version 0.6.1, 1.0.0, 2.0.0 or 2.1.0.
            onnx: As for `export_encodings`.
            nodes: As for `export_encodings`.

        Raises:
            CalibrationError: The GRU has no scales; encodings do not have those of its inner
                operators.
            ParameterError: The file is malformed, or an encoding does not fit: weights that are
                not symmetric, scales that are no powers of two with `scale_kind` 'pot', floating
                point, blocks. Nothing has changed then.
        """
        encodings.read({"": self}, path, onnx, None if nodes is None else {"": nodes})


def _made(kind: type[GRU], source: FloatGRU, config: OneConfig | None) -> GRU:
    """Return a GRU of class `kind` with these weights, on the CPU, in float32."""
    options = {} if config is None else {"config": config}
    gru = kind(
        source.input_size,
        source.hidden_size,
        len(source.cells),
        bias=source.bias,
        batch_first=source.batch_first,
        bidirectional=source.bidirectional,
        device="cpu",
        dtype=torch.float32,
        **options,
    )
    gru.load_state_dict(source.parameters())
    return gru
