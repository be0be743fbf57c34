"""An inference-only GRU that contains only integers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.nn.utils.rnn import PackedSequence

from quant_gru.config.choice import described
from quant_gru.errors import ParameterError, QuantGRUError
from quant_gru.execution.frozen_plan import BUFFERS, FrozenPlans, check_integers, key_of
from quant_gru.execution.integer_io import integer_forward, quantize_state, trace_codes
from quant_gru.execution.prepared_call import PreparedCall, prepare
from quant_gru.execution.sequence_layout import Sequence, normalize
from quant_gru.integer.plan import GRUPlan, WeightPart
from quant_gru.integer.quantizer import container_dtype
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.interchange import frozen_file
from quant_gru.interchange.aimet import encodings
from quant_gru.interchange.c import CSource, export_c
from quant_gru.interchange.onnx import recorded
from quant_gru.interchange.onnx.source import Source
from quant_gru.modules import call
from quant_gru.modules.bias_overflow import cut_biases_of, warn_of_cut_biases
from quant_gru.modules.stream import Stream
from quant_gru.parameters import document as params
from quant_gru.torch_ops import watchers
from quant_gru.torch_ops.operators import Settings

_DOCUMENT = "plan"


class FrozenQuantGRU(torch.nn.Module):
    """The integer plan of a QuantGRU as a module: same codes, no float parameters, no gradients.

    `QuantGRU.freeze()` creates it, and `FrozenQuantGRU.from_state_dict(module.state_dict())`
    restores it. Its state_dict contains only integer tensors: weights in their containers, biases
    in accumulator units, multipliers, shifts, and the parameter document as bytes.

    Example:
        >>> frozen = gru.freeze()
        >>> frozen.save("gru.safetensors")
        >>> y, h = FrozenQuantGRU.load("gru.safetensors")(x)
        >>> torch.equal(y, gru(x)[0])
        True
    """

    def __init__(self, document: dict[str, Any], batch_first: bool, plan: GRUPlan) -> None:
        super().__init__()
        for cells in plan.cells:
            for cell in cells:
                if not bool(cell.weights.finite):
                    raise QuantGRUError(
                        "Expected finite weights to freeze, got NaN or infinity in one"
                    )
        found = params.from_document(document, "plan")
        self._restore(found, batch_first, plan.cells[0][0].weights.W.device)
        for layer, cells in enumerate(plan.cells):
            for direction, cell in enumerate(cells):
                for name, tensor in _compact(cell.weights).items():
                    self.register_buffer(key_of(name, layer, direction), tensor)

    def _restore(self, found: params.Parameters, batch_first: bool, device: torch.device) -> None:
        self.shape = found.shape
        self.batch_first = batch_first
        self._plans = FrozenPlans(found.cells, found.shape)
        document = params.to_document(found.shape, found.config, found.cells)
        text = params.to_packed_tensor({**document, "batch_first": batch_first})
        # on the device of the integers, because a module is on one device
        self.register_buffer(_DOCUMENT, text.to(device))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file: all integers, and the parameter document as metadata.

        The file also has the numbers that an executor derives, so that a reader needs no Python.
        It replaces an existing file in one step; on failure the previous contents remain.

        Raises:
            ParameterError: The file cannot be written.

        Example:
            >>> gru.freeze().save("gru.safetensors")
            >>> frozen = FrozenQuantGRU.load("gru.safetensors")
        """
        frozen_file.write(path, *self._content())

    def _content(self) -> tuple[dict[str, Any], bool, dict[str, Tensor], GRUPlan]:
        """Return what a file has of it."""
        state, plan = self._on_cpu()
        document = params.from_tensor(state.pop(_DOCUMENT), f"key {_DOCUMENT!r}")
        batch_first = params.take_flag(document, "batch_first", False, f"key {_DOCUMENT!r}")
        return document, batch_first, state, plan

    def _parts(self) -> list[frozen_file.Part]:
        """Return the parts of its file, with their bytes."""
        return frozen_file.parts_of(frozen_file.to_bytes(*self._content()))

    def export_c(self, directory: str | os.PathLike[str], name: str, *, steps: int = 8) -> CSource:
        """Write the GRU as C99 source that computes the same codes, for microcontrollers.

        Args:
            directory: Created if it does not exist. Files of the same names are replaced.
            name: Start of all public names, a C identifier in lower case.
            steps: Steps of the golden vectors in the self-test.

        Returns:
            The files, and the bytes of flash and RAM.

        Raises:
            QuantGRUError: An argument is invalid, or the directory cannot be written.

        Example:
            >>> gru.freeze().export_c("firmware/gru", "denoiser").ram_bytes
            432
        """
        return export_c(self._on_cpu()[1], directory, name, steps)

    def export_quant_params(self, path: str | os.PathLike[str]) -> None:
        """Write scales, zero points and tables as a parameter file; weights are not in it.

        Raises:
            ConfigError: The file cannot be written.
        """
        params.write(path, self._document())

    def export_encodings(self, path: str | os.PathLike[str], version: str = "1.0.0") -> None:
        """Write encodings of AIMET and a parameter file; see `QuantGRU.export_encodings`.

        Tensors have the names of nn.GRU's parameters. Scales of weights are those of the integers,
        equal to the scales of the QuantGRU within 2^-15. Biases have no encoding: their integers
        are in units of the accumulators.

        Raises:
            QuantGRUError: The version is unknown, or a file cannot be written.
        """
        encodings.write_frozen(path, version, self._on_cpu()[1], self._document())

    def _document(self) -> dict[str, Any]:
        """Return the parameter document."""
        document = params.from_tensor(self.get_buffer(_DOCUMENT).cpu(), f"key {_DOCUMENT!r}")
        params.take_flag(document, "batch_first", False, f"key {_DOCUMENT!r}")
        return document

    def _on_cpu(self) -> tuple[dict[str, Tensor], GRUPlan]:
        """Return the state_dict and the plan on the CPU."""
        state = {name: tensor.cpu() for name, tensor in self.state_dict().items()}
        return state, FrozenQuantGRU._of_state_dict(state)._plan()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FrozenQuantGRU:
        """Read a file of `save`, onto the CPU.

        Raises:
            ParameterError: The file cannot be read, or a part of it is wrong; the message names
                the part, the rule and the value.
        """
        file = frozen_file.read(path)
        try:
            module = cls._made_of(file.parameters, file.batch_first, file.buffers, "cpu")
        except QuantGRUError as error:
            raise ParameterError(f"{error} ({file.where})") from None
        columns = params.columns_of(module.get_buffer(_DOCUMENT))
        plan = module._plan()
        frozen_file.check(file, columns, plan)
        warn_of_cut_biases(cut_biases_of(plan))
        return module

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Tensor]) -> FrozenQuantGRU:
        """Rebuild a frozen GRU from its state_dict.

        Raises:
            ParameterError: A tensor is missing or does not fit.
        """
        module = cls._of_state_dict(state_dict)
        warn_of_cut_biases(cut_biases_of(module._plan()))
        return module

    @classmethod
    def _of_state_dict(cls, state_dict: Mapping[str, Tensor]) -> FrozenQuantGRU:
        if _DOCUMENT not in state_dict:
            raise ParameterError(f"Expected key {_DOCUMENT!r} in the state_dict, got none")
        where = f"key {_DOCUMENT!r}"
        document = params.from_tensor(state_dict[_DOCUMENT], where)
        batch_first = params.take_flag(document, "batch_first", False, where)
        found = params.from_document(document, "plan")
        return cls._made_of(found, batch_first, state_dict, state_dict[_DOCUMENT].device)

    @classmethod
    def _made_of(
        cls,
        parameters: params.Parameters,
        batch_first: bool,
        integers: Mapping[str, Tensor],
        device: torch.device | str,
    ) -> FrozenQuantGRU:
        """Return the module of parameters and of integers by name, which are checked."""
        module = cls.__new__(cls)
        torch.nn.Module.__init__(module)
        module._restore(parameters, batch_first, torch.device(device))
        for layer, cells in enumerate(module._plans.qparams):
            for direction in range(len(cells)):
                found = {name: integers.get(key_of(name, layer, direction)) for name in BUFFERS}
                check_integers(found, module.shape, cells[direction], layer, direction)
                for name, tensor in found.items():
                    assert tensor is not None
                    module.register_buffer(key_of(name, layer, direction), tensor.clone())
        return module

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # all or nothing: buffers of one plan do not match the document of another
        found = {
            key.removeprefix(prefix): value
            for key, value in state_dict.items()
            if key.startswith(prefix)
        }
        if _DOCUMENT not in found and any(key.startswith("weight_ih") for key in found):
            error_msgs.append(
                f"Expected the state_dict of a frozen GRU at {prefix!r}, got that of a GRU in "
                "floating point; load it into the model before freeze_model(model)"
            )
            return
        missing_keys.extend(prefix + key for key in self._buffers if key not in found)
        unexpected_keys.extend(prefix + key for key in found if key not in self._buffers)
        if any(key not in found for key in self._buffers):
            return
        try:
            other = FrozenQuantGRU.from_state_dict(found)
            if other.shape != self.shape:
                raise ParameterError(
                    f"Expected the plan of a GRU like {self.shape}, got {other.shape}"
                )
        except QuantGRUError as error:
            error_msgs.append(str(error))
            return
        device = self.get_buffer(key_of("W", 0, 0)).device
        self._plans, self.batch_first = other._plans, other.batch_first
        for name, tensor in other._buffers.items():
            self._buffers[name] = None if tensor is None else tensor.to(device)

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run the GRU; shapes and values as for `QuantGRU.forward` in quantized mode.

        Results have the dtype of the input. Their values are computed in float32 and rounded to it.

        Raises:
            QuantGRUError: A shape does not fit, or an input requires a gradient.
        """
        if isinstance(input, Proxy) or isinstance(hx, Proxy):
            return watchers.leaf(self, input, hx)
        data = input.data if isinstance(input, PackedSequence) else input
        wanted = [each for each in (data, hx) if isinstance(each, Tensor) and each.requires_grad]
        if wanted and torch.is_grad_enabled():
            raise QuantGRUError(
                "Expected an input without requires_grad, got one that asks for a gradient: a "
                "frozen GRU is for inference only; use torch.no_grad() or the QuantGRU"
            )
        if torch.compiler.is_compiling() or watchers.traced(input, hx):
            return self._forward_traced(input, hx)
        prepared = self._plans.prepared
        if prepared is not None:
            own = self._buffers.values()
            result = prepared.start(own, input, hx, None, self.batch_first)
            if result is not None:
                return result
        sequence = self._normalize(input, hx)
        if prepared is not None:
            own, x, h0 = self._buffers.values(), sequence.values, sequence.states
            result = prepared.start(own, x, h0, None, False, sequence.packing)
            if result is not None:
                return sequence.finish(*result)
        return call.run(self._prepared(), sequence, None, data.dtype)

    def __prepare_scriptable__(self) -> NoReturn:
        watchers.refuse_script(self)

    def _prepared(self) -> PreparedCall:
        """Return the shared state of calls: that of the last call if it holds, or a new one."""
        plans, own = self._plans, self._buffers.values()
        kept = plans.prepared
        if kept is not None:
            if kept.holds(own):
                return kept
            plans.forget_settled()
        self._give_versions()
        integers = self._integers()
        found = prepare(lambda: plans.plan(integers), [integers], own, None)
        plans.keep(found)
        return found

    def _give_versions(self) -> None:
        """Copy inference-mode buffers, which have no version, so that changes can be detected."""
        with torch.inference_mode(False):
            for name, tensor in self._buffers.items():
                if tensor is not None and tensor.is_inference():
                    self._buffers[name] = tensor.clone()

    def _forward_traced(
        self, input: Tensor | PackedSequence, hx: Tensor | None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run the forward as one operator that tracers and transforms can handle."""
        data = input.data if isinstance(input, PackedSequence) else input
        if recorded.exporting or torch.onnx.is_in_onnx_export():
            normalize = partial(self._normalize, input, hx)
            return call.record(self, input, hx, normalize, self.shape, data.dtype)
        settings = Settings(bidirectional=self.shape.bidirectional)
        # the export of PyTorch 2.6 reads attributes and no `get_buffer`
        sequence, text = self._normalize(input, hx), getattr(self, _DOCUMENT)
        return call.run_as_operator(sequence, self._integers(), text, settings, data.dtype)

    def forward_integer(
        self, x_codes: Tensor, h_codes: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `QuantGRU.forward_integer`."""
        return integer_forward(self._prepared().plan, x_codes, h_codes, self.batch_first)

    def quantize_state(self, hx: Tensor) -> Tensor:
        """See `QuantGRU.quantize_state`."""
        return quantize_state(self._prepared().plan, hx)

    def stream(self, batch_size: int = 1) -> Stream:
        """See `QuantGRU.stream`."""
        return Stream(self._plan(), batch_size, self._plans.qparams[0][0].config)

    def trace_codes(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> dict[str, Tensor]:
        """See `QuantGRU.trace_codes`; biases appear only in accumulator units."""
        codes = trace_codes(self._plan(), self._normalize(input, hx))
        return {
            name: tensor
            for name, tensor in codes.items()
            if not name.startswith(("weight.bw", "weight.br"))
        }

    def _normalize(self, input: Tensor | PackedSequence, hx: Tensor | None) -> Sequence:
        like: Tensor = getattr(self, key_of("W", 0, 0))
        return normalize(input, hx, self.shape, self.batch_first, like, torch.float32)

    def _integers(self) -> list[Tensor]:
        return [
            getattr(self, key_of(name, layer, direction))
            for layer in range(self.shape.num_layers)
            for direction in range(self.shape.directions)
            for name in BUFFERS
        ]

    def _plan(self) -> GRUPlan:
        """Return the plan of the current integers, which are read again."""
        self._plans.forget_settled()
        return self._plans.plan(self._integers())

    def _source(self) -> Source:
        with torch.no_grad():
            plan = self._plan()
        shape = self.shape
        sizes = (shape.input_size, shape.hidden_size, shape.num_layers, shape.directions)
        return Source(plan, None, *sizes, self.batch_first, shape.zoneout)

    def __getattr__(self, name: str) -> Any:
        """Raise for names that a frozen GRU does not have, as hooks on float weights want."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if not name.startswith(("weight_", "bias_")):
                raise
            raise AttributeError(
                f"{error}: a frozen GRU has integers in place of its weights; remove the hook that "
                "reads them, or keep it at the QuantGRU"
            ) from None

    def extra_repr(self) -> str:
        """Return the shape, the widths and the size of the GRU as text."""
        sizes = f"{self.shape.input_size}, {self.shape.hidden_size}"
        return (
            f"{sizes}, num_layers={self.shape.num_layers}, batch_first={self.batch_first}, "
            f"bidirectional={self.shape.bidirectional}, "
            f"{described(self._plans.qparams[0][0].config)}, "
            f"{sum(each.nbytes for each in self.buffers())} bytes"
        )


def _compact(w: WeightPart) -> dict[str, Tensor]:
    """Return the integers of a weight part, each in the smallest dtype that holds its values."""

    def numbers(weighted_sum: WeightedSum) -> tuple[Tensor, Tensor]:
        (M,), k = weighted_sum.multipliers, weighted_sum.shift
        assert isinstance(M, Tensor)
        assert isinstance(k, Tensor)
        return M, k

    (Mx, kx), (Mh, kh) = numbers(w.Wx), numbers(w.Rh)
    wide = {"Bw": w.Bw, "Br": w.Br, "Mx": Mx, "kx": kx, "Mh": Mh, "kh": kh}
    small = {
        name: value.to(container_dtype(int(value.min()), int(value.max())), copy=True)
        for name, value in wide.items()
    }
    return {"W": w.W.clone(), "R": w.R.clone(), **small}
