"""The commands `report`, `tune` and `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quant_gru.cli.messages import one_line_messages
from quant_gru.errors import QuantGRUError

if TYPE_CHECKING:
    from quant_gru.config import QuantConfig

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="FILE.py:FUNCTION or module:FUNCTION. The function returns a model and batches, and "
        "forward_fn if batches need one.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")]


def report(
    model: Model,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="HTML", help="The page.")
    ] = "report.html",
    preset: Annotated[
        str,
        typer.Option(
            "--preset", metavar="NAME", help="For a float model: a preset or a configuration file."
        ),
    ] = "int8_wide",
    json: Json = False,
    force: Force = False,
) -> None:
    """Write a page that shows where the precision of a quantized model goes."""
    with one_line_messages():
        from quant_gru.analysis.report import report as write
        from quant_gru.calibration.batches import batches_of
        from quant_gru.cli.sources import load
        from quant_gru.modules.gru import QuantGRU
        from quant_gru.whole_models.calibrate import calibrate_model
        from quant_gru.whole_models.convert import convert_model

        _expect_new(output, force)
        found, data, forward_fn = load(model)
        batches = batches_of(data)
        grus = [module for module in found.modules() if isinstance(module, QuantGRU)]
        if not any(gru.is_calibrated() for gru in grus):
            found = calibrate_model(convert_model(found, preset), batches, forward_fn)
        made = write(found, batches, output, forward_fn=forward_fn)
        typer.echo(made.to_json() if json else made)


def tune(
    model: Model,
    flash: Annotated[
        str | None,
        typer.Option(
            "--flash", metavar="BYTES", help='Most bytes in C source, such as 60000 or "60 kB".'
        ),
    ] = None,
    packed: Annotated[
        str | None,
        typer.Option(
            "--packed", metavar="BYTES", help="Most bytes where weights of any width have no gaps."
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option("--state", metavar="BYTES", help="Most bytes of the states of a sequence."),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option("--activations", metavar="BYTES", help="Most bytes of all codes of a step."),
    ] = None,
    bits: Annotated[
        float | None, typer.Option("--bits", metavar="N", help="Most bits of weights on average.")
    ] = None,
    sqnr: Annotated[
        float | None,
        typer.Option("--sqnr", metavar="DB", help="Least signal over noise; fewest bytes."),
    ] = None,
    widths: Annotated[
        str, typer.Option("--widths", metavar="N,N,..", help="Widths to choose from.")
    ] = "4,8,16",
    group: Annotated[
        list[str] | None,
        typer.Option(
            "--group", metavar="NAME,..", help="Operators or patterns of one width; repeatable."
        ),
    ] = None,
    fit_weights: Annotated[
        bool, typer.Option("--fit-weights", help="Fit the codes of weights of up to 8 bits.")
    ] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="JSON",
            help="Write the configuration: of a model of several GRUs one file each, with its name "
            "before the suffix.",
        ),
    ] = None,
    json: Json = False,
    force: Force = False,
) -> None:
    """Choose the widths of a model's GRUs under a budget."""
    with one_line_messages():
        from quant_gru.analysis.allocation import allocate_bits
        from quant_gru.cli.sources import load
        from quant_gru.config import QuantConfig as Config

        limits = {
            "flash": flash,
            "packed": packed,
            "state": state,
            "activations": activations,
            "bits": bits,
            "sqnr": sqnr,
        }
        budget = {
            name: int(value) if isinstance(value, str) and value.isdecimal() else value
            for name, value in limits.items()
            if value is not None
        }
        if not budget:
            raise QuantGRUError(
                f"Expected one of {', '.join(f'--{name}' for name in limits)}, got none"
            )
        try:
            wanted = [int(each) for each in widths.split(",")]
        except ValueError:
            raise QuantGRUError(f"Expected --widths to be like 4,8,16, got {widths!r}") from None
        found, data, forward_fn = load(model)
        groups = [each.split(",") for each in group or ()]
        chosen = allocate_bits(
            found,
            data,
            budget,
            wanted,
            groups=groups,
            forward_fn=forward_fn,
            fit_weights=fit_weights,
        )
        typer.echo(chosen.to_json() if json else chosen)
        if output is None:
            return
        config = chosen.config
        files = {output: config} if isinstance(config, Config) else _files(output, config)
        for path in files:
            _expect_new(path, force)
        for path, each in files.items():
            each.to_json(path)
            typer.echo(f"Wrote {path}", err=json)


def bench(
    input_size: Annotated[
        int, typer.Option("--input-size", min=1, metavar="N", help="Features.")
    ] = 64,
    hidden_size: Annotated[
        int, typer.Option("--hidden-size", min=1, metavar="N", help="Units.")
    ] = 128,
    layers: Annotated[int, typer.Option("--layers", min=1, metavar="N", help="Layers.")] = 1,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, metavar="N", help="Sequences.")
    ] = 1,
    steps: Annotated[
        int, typer.Option("--steps", min=1, metavar="N", help="Steps of a sequence.")
    ] = 100,
    threads: Annotated[
        int,
        typer.Option(
            "--threads", min=1, metavar="N", help="Threads of PyTorch and of the kernels."
        ),
    ] = 1,
    json: Json = False,
) -> None:
    """Time a random GRU on this machine: float, PyTorch's dynamic int8, and integers."""
    with one_line_messages():
        from quant_gru.analysis.bench import bench as measure

        found = measure(
            input_size, hidden_size, layers, batch_size=batch_size, steps=steps, threads=threads
        )
        typer.echo(found.to_json() if json else found)


def _files(output: str, configs: dict[str, QuantConfig]) -> dict[str, QuantConfig]:
    path = Path(output)
    return {
        str(path.with_name(f"{path.stem}.{name}{path.suffix}")): c for name, c in configs.items()
    }


def _expect_new(path: str, force: bool) -> None:
    if Path(path).exists() and not force:
        raise QuantGRUError(
            f"Expected --output to be a new file, got '{path}', which exists; --force overwrites"
        )
