"""What a user writes, for the type checker: `mypy --strict` passes, and running it works."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

import actnn
from quant_gru import (
    FrozenQuantGRU,
    QuantConfig,
    QuantGRU,
    calibrate_model,
    compare,
    convert_model,
    export_onnx,
    find_grus,
    freeze_model,
    operator_sqnr,
)


class Denoiser(torch.nn.Module):
    """A GRU and a mask."""

    def __init__(self, bands: int, units: int) -> None:
        super().__init__()
        self.gru = torch.nn.GRU(bands, units, batch_first=True)
        self.mask = torch.nn.Linear(units, bands)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.gru(x)
        return x * torch.sigmoid(self.mask(y))


def quantized(model: Denoiser, batches: list[Tensor]) -> Denoiser:
    """Return the model in integers; converting keeps its type."""
    config = QuantConfig.int8_wide().replace("gate.z_pre", bitwidth=16)
    return calibrate_model(convert_model(model, config), batches)


def main(folder: Path) -> None:
    """Quantize, look, and hand over."""
    batches = [torch.randn(2, 12, 6) for _ in range(3)]
    model = Denoiser(6, 8)
    small = quantized(model, batches)
    gru: QuantGRU = find_grus(small)["gru"]
    gru.export_quant_params(folder / "gru.json")
    bits: int | None = gru.config["gate.z_pre"].bitwidth
    scale = gru.get_quant_config("gate.z_pre")["scale"]
    lowest: float = min(operator_sqnr(small, batches).values())
    rows = compare(model, small, batches).rows
    found: list[float] = [row.sqnr.get("output", 0.0) for row in rows]
    frozen: FrozenQuantGRU = gru.freeze()
    frozen.save(folder / "gru.safetensors")
    stream = frozen.stream(1)
    step: Tensor = stream(batches[0][:1, 0])
    export_onnx(freeze_model(small), folder / "model.onnx", batches[0])
    actnn.compress(model, bits=8)
    print(bits, scale, lowest, found, step.shape)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
