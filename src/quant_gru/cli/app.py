"""The commands. Heavy imports run only inside them, so that `--help` answers at once."""

from __future__ import annotations

import shutil
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quant_gru import __version__
from quant_gru.cli.analysis import bench, report, tune
from quant_gru.cli.frozen_files import export, inspect, verify
from quant_gru.cli.messages import WRONG, one_line_messages
from quant_gru.cli.messages import report as report_error
from quant_gru.cli.onnx_files import quantize
from quant_gru.errors import QuantGRUError

if TYPE_CHECKING:
    from quant_gru.cli.files import Found

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would take longer to import than all the rest
    help="Quantize torch.nn.GRU to integers: see what it costs, write and check its files.",
    epilog="Exit codes: 0 success, 1 `diff` or `verify` found differences, 2 wrong arguments or "
    "files.",
)


class Preset(str, Enum):
    """The presets of QuantConfig."""

    int8 = "int8"
    int8_wide = "int8_wide"
    w8a16 = "w8a16"
    int16 = "int16"


def main() -> None:
    """Entry point of `quant-gru` and `python -m quant_gru`."""
    app(prog_name="quant-gru")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quant-gru {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Take the options of all commands."""


@app.command()
def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Spoken-digits npz, as examples/pack_spoken_digits.py writes it.",
            show_default="scikit-learn's handwritten digits",
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output", metavar="DIR", help="Folder for the checkpoint and the parameter file."
        ),
    ] = Path("demo_output"),
    epochs: Annotated[
        int | None,
        typer.Option(
            "--epochs",
            min=1,
            metavar="N",
            help="Passes over the training data.",
            show_default="30 for handwritten, 15 for spoken digits",
        ),
    ] = None,
    hidden_size: Annotated[
        int, typer.Option("--hidden-size", min=1, max=4096, metavar="N", help="Units of the GRU.")
    ] = 64,
    seed: Annotated[
        int,
        typer.Option("--seed", min=0, max=2**32 - 1, metavar="N", help="Same seed, same numbers."),
    ] = 0,
) -> None:
    """Train a GRU on real data, quantize it five ways, and compare."""
    with one_line_messages():
        from rich.console import Console

        from quant_gru.demo.run import DemoOptions, run_demo

        options = DemoOptions(data, output, epochs, hidden_size, seed)
        run_demo(options, Console(highlight=False))


@app.command()
def info(
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Print versions, threads, the executors in use and the GPU."""
    with one_line_messages():
        from quant_gru.cli.facts import as_json, as_text

        typer.echo(as_json() if json else as_text())


@app.command()
def config(
    write: Annotated[
        str | None,
        typer.Option("--write", metavar="FILE", help="Write the configuration to a file."),
    ] = None,
    preset: Annotated[
        Preset | None,
        typer.Option(
            "--preset",
            help="Take a preset; without --write, print it.",
            show_default="the default file",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE if it exists.")] = False,
) -> None:
    """Print or write a bit-width configuration.

    Without options, print the path of the default configuration.
    """
    with one_line_messages():
        from quant_gru.config import QuantConfig, default_config_path
        from quant_gru.config.fields import to_text

        chosen = None if preset is None else getattr(QuantConfig, preset.value)()
        if write is None:
            text = default_config_path() if chosen is None else to_text(chosen.to_dict()).rstrip()
            typer.echo(text)
            return
        if Path(write).exists() and not force:
            raise QuantGRUError(
                f"Expected --write to be a new file, got '{write}', which exists; "
                "--force overwrites"
            )
        if chosen is None:
            _copy(default_config_path(), write)
        else:
            chosen.to_json(write)
        typer.echo(f"Wrote {write}. Change it, then: quant-gru check {write}")


@app.command()
def check(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Bit-width configuration, parameter file, checkpoint of torch.save, or "
            "safetensors; - is standard input.",
        ),
    ],
    operators: Annotated[
        bool, typer.Option("--operators", "-o", help="Print a table of the operators.")
    ] = False,
) -> None:
    """Validate the quantization in files, and describe it."""
    with one_line_messages():
        results = [_checked(file, operators) for file in files]
        if not all(results):
            raise typer.Exit(WRONG)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A file, as for check.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
) -> None:
    """Compare the quantization in two files.

    The exit code is 0 if it is the same, and 1 if not.
    """
    with one_line_messages():
        from quant_gru.cli.differences import differences
        from quant_gru.cli.files import STDIN, read

        if first == second == STDIN:
            raise QuantGRUError("Expected - (standard input) once, got it as both files")
        found = differences(read(first), read(second), (first, second))
        if found:
            typer.echo(found)
            raise typer.Exit(1)
        typer.echo(f"{first} and {second} have the same quantization.")


app.command(short_help="Put the GRUs of an ONNX model into integers.")(quantize)
app.command(short_help="Write a page that shows where precision goes.")(report)
app.command()(tune)
app.command(short_help="Time a GRU here: float, dynamic int8, and integers.")(bench)
app.command(short_help="Write a frozen GRU as ONNX, C source, encodings or JSON.")(export)
app.command(short_help="Print operators, widths, scales and bytes of a file.")(inspect)
app.command(short_help="Compare ONNX or C source with a frozen GRU, by codes.")(verify)


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all compiled kernels.")] = False,
) -> None:
    """Show or clear the compiled CUDA kernels in the disk cache."""
    with one_line_messages():
        from quant_gru.kernels.cuda.kernel_cache import CACHE

        if clear:
            typer.echo(f"Removed {_files(CACHE.clear())} from {CACHE.folder()}")
            return
        sizes = CACHE.sizes()
        typer.echo(f"{CACHE.folder()}: {_files(len(sizes))}, {sum(sizes) / 1024:.0f} KiB")


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def _copy(source: Path, target: str) -> None:
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        reason = error.strerror or error
        raise QuantGRUError(
            f"Expected --write to be a file that can be written, got '{target}' ({reason})"
        ) from error


def _checked(file: str, operators: bool) -> bool:
    """Describe a file; return False after an error in it."""
    from quant_gru.cli.files import read

    try:
        for found in read(file, verbose=True):
            _print(file, found, operators)
    except QuantGRUError as error:
        report_error(error)
        return False
    return True


def _print(file: str, found: Found, operators: bool) -> None:
    from quant_gru.cli.tables import describe, operator_tables

    typer.echo(describe(file, found))
    for table in operator_tables(found) if operators else ():
        typer.echo(f"\n{table}")
