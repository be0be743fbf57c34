"""Print what calibrated GRUs take in each form, and their shares of the float parameters.

    python benchmarks/bytes.py [--sizes 40,64 129,128]
    python benchmarks/bytes.py --tables    # tables of a file: as they are, and as segments

The bytes of scales and tables follow from the data, and change a little with them. C is flash for
constants; ONNX is the file of the profile integer. With --tables, segments are those of
`integer/segments.py`, in columns of a file or in 10 bytes each. A GRU's equal tables count once.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import torch
from onnx_steps import Steps, given
from torch import nn

from quant_gru import QuantConfig, QuantGRU, calibrate_model, convert_model, export_onnx
from quant_gru.integer.plan import CellPlan
from quant_gru.integer.segments import Segments, segments_of
from quant_gru.parameters.columns import column
from quant_gru.parameters.document import bytes_of_table


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


def bytes_of_segments(segments: Segments) -> int:
    """Return what segments would take in the columns of a file."""
    numbers = [segments.first, segments.u, segments.e, segments.s, segments.g]
    numbers += [segments.lo, segments.hi]
    rows = (segments.codes, segments.rests, segments.c1, segments.c2)
    return sum(len(column(each)) for each in (numbers, *rows))


def bytes_of_tables(cell: CellPlan) -> tuple[int, int, int]:
    """Return what the tables of a cell take in a file, as segments there, and those in C."""
    found = {}
    for name, table in cell.frozen.tables.items():
        pre = cell.frozen.quantizers[name.replace("_out", "_pre")]
        segments = segments_of(table, pre.lo, pre.hi)
        size = bytes_of_table(table)
        parts = size, bytes_of_segments(segments) if segments else size
        key = table.bounds.numpy().tobytes() + table.coefficients.numpy().tobytes()
        found[key, table.lo, table.hi] = (*parts, 10 * len(segments.codes) if segments else 0)
    stored, as_segments, in_c = map(sum, zip(*found.values(), strict=True))
    return stored, as_segments, in_c


def print_tables() -> None:
    """Print the bytes of files and of their tables, of one GRU and of a model of 14."""
    print("| GRUs | widths | float | files | state_dict | tables | as segments | segments in C |")
    print("|---|---|---|---|---|---|---|---|")
    for name in ("int8", "int8_wide", "w8a16", "int16"):
        torch.manual_seed(0)
        one, x = QuantGRU(40, 64, config=getattr(QuantConfig, name)()), torch.randn(50, 8, 40)
        one.calibrate(x)
        one.finalize_calibration()
        steps: nn.Module = convert_model(Steps().eval(), name)
        calibrate_model(steps, [given(50, 8)], lambda model, batch: model(*batch))
        for label, model in (("GRU(40, 64)", one), ("14 of H 4 to 16", steps)):
            print(f"| {label} | {name} | {' | '.join(map(str, totals(model)))} |", flush=True)


def totals(model: nn.Module) -> list[int]:
    """Return bytes of all GRUs: float, files, state_dict, and those of `bytes_of_tables`."""
    found = []
    for gru in model.modules():
        if isinstance(gru, QuantGRU):
            frozen = gru.freeze()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "gru.safetensors")
                frozen.save(path)
                size = path.stat().st_size
            state = sum(each.nbytes for each in frozen.state_dict().values())
            whole = sum(each.nbytes for each in gru.parameters())
            found.append((whole, size, state, *bytes_of_tables(frozen._plan().cells[0][0])))
    return [sum(each) for each in zip(*found, strict=True)]


def main() -> None:
    """Print a row for each size and configuration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["40,64"], help="C,H of each GRU")
    parser.add_argument("--tables", action="store_true", help="print the bytes of tables")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.tables:
        print_tables()
        return
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
