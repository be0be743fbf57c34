"""Print what calibrated GRUs take in each form, and their shares of the float parameters.

    python benchmarks/bytes.py [--sizes 40,64 129,128]

The bytes of scales and tables follow from the data, and change a little with them. C is flash for
constants; ONNX is the file of the profile integer.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import torch

from quant_gru import QuantConfig, QuantGRU, export_onnx


def configs() -> dict[str, QuantConfig]:
    """Return the presets, and int8 with fewer bits for W and R."""
    found = {name: getattr(QuantConfig, name)() for name in ("int8", "int8_wide", "w8a16", "int16")}
    for bits in (4, 2):
        config = QuantConfig.int8()
        for name in ("weight.W", "weight.R"):
            config = config.replace(name, bitwidth=bits)
        found[f"int8, {bits}-bit weights"] = config
    return found


def sizes(config: QuantConfig, C: int, H: int) -> tuple[int, list[int]]:
    """Return the bytes of the float parameters, and those of file, state_dict, C and ONNX."""
    torch.manual_seed(0)
    gru = QuantGRU(C, H, config=config)
    x = torch.randn(50, 8, C)
    gru.calibrate(x)
    gru.finalize_calibration()
    frozen = gru.freeze()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        frozen.save(path / "gru.safetensors")
        export_onnx(frozen, path / "gru.onnx", x[:5], verify=False)
        found = [
            (path / "gru.safetensors").stat().st_size,
            sum(each.nbytes for each in frozen.state_dict().values()),
            frozen.export_c(path / "c", "net").flash_bytes,
            (path / "gru.onnx").stat().st_size,
        ]
    return sum(each.nbytes for each in gru.parameters()), found


def main() -> None:
    """Print a row for each size and configuration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["40,64"], help="C,H of each GRU")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| C, H | widths | file | state_dict | C | ONNX integer |")
    print("|---|---|---|---|---|---|")
    for size in options.sizes:
        C, H = map(int, size.split(","))
        for name, config in configs().items():
            whole, found = sizes(config, C, H)
            cells = [f"{n} ({n / whole:.2f})" for n in found]
            print(f"| {C}, {H} | {name} | {' | '.join(cells)} |", flush=True)
        print(f"| {C}, {H} | float | {whole} | {whole} | | |")


if __name__ == "__main__":
    main()
