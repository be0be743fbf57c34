"""Parameter files and checkpoints of a QuantGRU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quant_gru.errors import QuantGRUError, QuantGRUWarning, caller_stacklevel
from quant_gru.modules.interchange import Interchange
from quant_gru.parameters import document as params

STATE_KEY = "quantization"


class Checkpoints(Interchange):
    """The part of a QuantGRU that writes and reads its quantization."""

    def export_quant_params(self, path: str | os.PathLike[str]) -> None:
        """Write configuration, scales, zero points and tables to a JSON file; no weights.

        Raises:
            CalibrationError: There are no scales.
            ConfigError: The file cannot be written.
        """
        self._finalized()
        params.write(path, self._state.document())

    def load_quant_params(self, path: str | os.PathLike[str]) -> None:
        """Load the result of `export_quant_params`; the same weights then give the same codes.

        `use_quantization` does not change. If it is still False in the next forward, a warning says
        so.

        Raises:
            ParameterError: The file cannot be read, has another version, or does not fit this GRU;
                nothing has changed then.
        """
        self._state.take(params.read(path), f"file {os.fspath(path)!r}")
        self._write_logarithms()
        self._scales_unused = "" if self.use_quantization else "quantization parameters were loaded"

    def _warn_of_unused_scales(self) -> None:
        """Warn about a forward in float mode after scales were made or loaded, once."""
        reason, self._scales_unused = self._scales_unused, ""
        warnings.warn(
            f"{reason}, but use_quantization is False: forward computes in floating point; set "
            "use_quantization to True, or to False if that is meant",
            QuantGRUWarning,
            stacklevel=caller_stacklevel(),
        )

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_calibrated():
            self._follow_logarithms()
            document = self._state.document()
            document["use_quantization"] = bool(self.use_quantization)
            destination[prefix + STATE_KEY] = params.to_tensor(document)

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
        key = prefix + STATE_KEY
        rest = {name: value for name, value in state_dict.items() if name != key}
        # logarithms belong to scales: a checkpoint without scales must not set them
        for name in self._scale_names():
            if name not in self._log2_scales:
                rest.pop(prefix + name, None)
            elif key not in state_dict or prefix + name not in state_dict:
                rest[prefix + name] = getattr(self, name).detach()
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if key in state_dict:
            try:
                document = params.from_tensor(state_dict[key], repr(key))
                before = bool(self.use_quantization)
                use_quantization = params.take_flag(document, "use_quantization", before, repr(key))
                found = params.from_document(document, repr(key))
                self._state.take(found, repr(key))
                self._write_logarithms()
                self.use_quantization = use_quantization
            except QuantGRUError as error:
                error_msgs.append(f"{error}{_hint(state_dict[key])}")


def _hint(tensor: Any) -> str:
    """Return what to do if the entry of a checkpoint was computed with, as averages are."""
    if isinstance(tensor, Tensor) and tensor.dtype is torch.uint8:
        try:
            params.from_tensor(tensor, "")
            return ""
        except QuantGRUError:
            pass
    return (
        "; the entry is text and cannot be averaged or cast: average the results of "
        "float_state_dict(model)"
    )
