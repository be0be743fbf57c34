"""The output files of the demo, and the instructions for them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from quant_gru.demo.comparison import quantized_gru
from quant_gru.demo.errors import DataError
from quant_gru.demo.model import SequenceClassifier


@dataclass(frozen=True)
class OutputFolder:
    """A folder that was writable when checked.

    Attributes:
        path: The folder.
    """

    path: Path

    @property
    def checkpoint(self) -> Path:
        """state_dict of the int8 classifier, in the format of torch.save."""
        return self.path / "classifier_int8.pt"

    @property
    def parameters(self) -> Path:
        """Quantization parameters of its GRU, JSON, without weights."""
        return self.path / "gru_int8.json"

    @classmethod
    def prepare(cls, path: Path) -> OutputFolder:
        """Create the folder and test that it is writable, before any time is spent on training.

        Raises:
            DataError: The folder cannot be created or written.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise _unwritable(path, error) from error
        return cls(path)

    def save(self, model: SequenceClassifier) -> None:
        """Write checkpoint and parameter file of the int8 classifier.

        Raises:
            DataError: A file cannot be written.
        """
        try:
            with self.checkpoint.open("wb") as file:
                torch.save(model.state_dict(), file)
            quantized_gru(model).export_quant_params(self.parameters)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def next_steps(self, n_features: int, hidden_size: int, n_classes: int) -> str:
        """Return instructions for using the files, and for converting other models."""
        sizes = f"{n_features}, {hidden_size}, {n_classes}"
        return f"""\
Written
  {self.checkpoint}  state_dict of the int8 classifier
  {self.parameters}  its GRU's scales, zero points and tables (no weights)

Next
  Load the int8 classifier:
    import torch
    from quant_gru import QuantConfig, calibrate_model, convert_model
    from quant_gru.demo import SequenceClassifier
    model = convert_model(SequenceClassifier({sizes}), QuantConfig.int8())
    model.load_state_dict(torch.load("{self.checkpoint.as_posix()}"))
  Or only the parameters, for a GRU with your own weights of the same shape:
    model.gru.load_quant_params("{self.parameters.as_posix()}")
  Convert a model of your own, whatever it is around its nn.GRU:
    model = convert_model(model, QuantConfig.int8_wide())
    calibrate_model(model, batches)
  Choose the width of each operator: quant-gru config --write my.json
  Read what the tables mean: docs/demo.md"""


def _unwritable(path: Path, error: OSError) -> DataError:
    reason = error.strerror or str(error)
    return DataError(
        f"Expected --output to be a folder that can be written, got '{path}' ({reason})"
    )
