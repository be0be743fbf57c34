"""What `export`, `inspect` and `verify` do with the file of a frozen GRU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from quant_gru.cli.tables import columns
from quant_gru.config.files import name_of
from quant_gru.errors import QuantGRUError
from quant_gru.interchange.aimet.encodings import parameter_file
from quant_gru.interchange.c.verify import verify_c
from quant_gru.modules.frozen import FrozenQuantGRU
from quant_gru.whole_models.onnx import export_onnx, export_step_onnx
from quant_gru.whole_models.onnx_verify import random_example, verified_file

SUFFIXES = {"onnx": ".onnx", "c": "_c", "encodings": ".encodings", "json": ".json"}


@dataclass(frozen=True)
class Options:
    """Options of `export`; None where one was not given.

    Attributes:
        profile: Of ONNX: 'integer', 'operator', 'qdq', 'float' or 'node'.
        step: Of ONNX: whether to write one step.
        states: Of ONNX: whether initial states are an input.
        lengths: Of ONNX: whether lengths of rows are an input.
        name: Of C: the start of all public names.
        version: Of encodings: the version of the format.
    """

    profile: str | None = None
    step: bool | None = None
    states: bool | None = None
    lengths: bool | None = None
    name: str | None = None
    version: str | None = None

    def check(self, to: str) -> None:
        """Raise for an option that does not belong to the form `to`.

        Raises:
            QuantGRUError: There is one.
        """
        homes = {"name": "c", "version": "encodings"}
        for option, value in vars(self).items():
            home = homes.get(option, "onnx")
            if value is not None and home != to:
                raise QuantGRUError(
                    f"Expected --{option} only with --to {home}, got it with --to {to}"
                )
        if self.step and (self.states or self.lengths):
            raise QuantGRUError(
                "Expected --step without --states and --lengths, got both: a step always has its "
                "states as inputs, and no lengths"
            )


def write(file: str, to: str, output: str | None, force: bool, options: Options) -> list[str]:
    """Write a frozen GRU in another form, and return lines about it.

    Args:
        file: File of a frozen GRU.
        to: 'onnx', 'c', 'encodings' or 'json'.
        output: Where to write; None for a name beside `file`.
        force: Whether to replace what is there.
        options: Options of the form.
    """
    options.check(to)
    gru = FrozenQuantGRU.load(file)
    source = Path(file)
    target = str(source.with_name(source.stem + SUFFIXES[to])) if output is None else output
    written = [Path(name_of(target))]
    if to == "encodings":
        written.append(parameter_file(target, ""))
    found = next((str(path) for path in written if path.exists()), None)
    if found is not None and not force:
        raise QuantGRUError(
            f"Expected --output to be new, got '{found}', which exists; --force overwrites"
        )
    if to == "onnx":
        return [f"Wrote {target}", *_onnx(gru, target, options)]
    if to == "c":
        return _c(gru, target, options.name or _identifier(source.stem))
    if to == "encodings":
        gru.export_encodings(target, options.version or "1.0.0")
    else:
        gru.export_quant_params(target)
    return [f"Wrote {target}"]


def _onnx(gru: FrozenQuantGRU, target: str, options: Options) -> list[str]:
    profile = options.profile or "integer"
    if options.step:
        report = export_step_onnx(gru, target, profile)
    else:
        example = random_example(gru._source(), bool(options.states), bool(options.lengths))
        report = export_onnx(gru, target, example, profile)
    return [f"{name}: {each}" for name, each in report.items()]


def _c(gru: FrozenQuantGRU, target: str, name: str) -> list[str]:
    report = gru.export_c(target, name)
    return [
        f"Wrote {target}: {', '.join(report.files)}",
        f"flash: {report.flash_bytes} bytes of constants, besides code",
        f"RAM: {report.ram_bytes} bytes",
        f"multiply-accumulates a step: {report.macs}",
    ]


def _identifier(stem: str) -> str:
    """Return a name for C from the name of a file."""
    name = re.sub(r"[^a-z0-9]+", "_", stem.lower()).strip("_")[:40]
    return name if name[:1].isalpha() else f"gru_{name}".rstrip("_")


def sizes(file: str) -> str:
    """Return a table of the parts of a frozen GRU's file, as `save` writes it."""
    gru = FrozenQuantGRU.load(file)
    rows: list[tuple[object, ...]] = [("part", "shape", "type", "bytes")]
    parts = gru._parts()
    rows += [(each.name, each.shape, each.dtype, each.bytes) for each in parts]
    total = sum(each.bytes for each in parts)
    macs = sum(each.numel() for each in gru.state_dict().values() if each.dim() == 2)
    biases = 6 * gru.shape.hidden_size * gru.shape.num_layers * gru.shape.directions
    floats = 4 * (macs + biases * gru.shape.bias)
    return (
        f"{columns(rows)}\n\n{total} bytes, {100 * total / floats:.1f} % of the float GRU's "
        f"{floats}; {macs} multiply-accumulates a step"
    )


def compare(file: str, against: str, within: int) -> tuple[list[str], bool]:
    """Compare an ONNX file, or a directory of C source, with the plan of a frozen GRU.

    Args:
        file: File of the frozen GRU.
        against: The ONNX file or the directory.
        within: By how many codes an output of an ONNX file may differ.

    Returns:
        Lines about the outputs, and whether all are close enough.
    """
    gru = FrozenQuantGRU.load(file)
    if Path(name_of(against)).is_dir():
        wrong, compared = verify_c(gru._plan(), against)
        said = f"{wrong} of {compared} codes differ" if wrong else f"equal ({compared} codes)"
        return [said], wrong == 0
    report = verified_file(against, gru._source())
    lines = [f"{name}: {each}" for name, each in report.items()]
    return lines, all(each.largest <= within for each in report.values())
