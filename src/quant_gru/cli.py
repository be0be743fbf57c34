"""The command line: `quant-gru demo | info | config | check | cache`.

Heavy imports run only inside commands, so that `--help` answers at once.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quant_gru._errors import QuantGRUError

if TYPE_CHECKING:
    from quant_gru.config import QuantConfig

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Quantize torch.nn.GRU to integers: see what it costs, write and check its files.",
)


def main() -> None:
    """Entry point of `quant-gru` and `python -m quant_gru`."""
    app(prog_name="quant-gru")


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Report an error in the user's input as one line, with exit code 2."""
    from kernel_runtime.errors import KernelError

    try:
        yield
    except (QuantGRUError, KernelError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Spoken-digits npz, as examples/pack_spoken_digits.py writes it.",
            show_default="scikit-learn's handwritten digits",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the checkpoint and the parameter file.")
    ] = Path("demo_output"),
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Passes over the training data.",
            show_default="30 for handwritten, 15 for spoken digits",
        ),
    ] = None,
    hidden_size: Annotated[
        int, typer.Option(min=1, max=4096, metavar="N", help="Units of the GRU.")
    ] = 64,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, metavar="N", help="Same seed, same numbers.")
    ] = 0,
) -> None:
    """Train a GRU on real data, quantize it five ways, and compare."""
    with _one_line_errors():
        from rich.console import Console

        from quant_gru.demo.run import DemoOptions, run_demo

        options = DemoOptions(data, output, epochs, hidden_size, seed)
        run_demo(options, Console(highlight=False))


@app.command()
def info() -> None:
    """Print versions, threads, the executors in use and the GPU."""
    import torch

    from quant_gru import __version__
    from quant_gru.kernels.cpu.executor import VARIABLE, choices
    from quant_gru.kernels.dispatch import executor_name

    with _one_line_errors():
        for name, value in {
            "quant-gru": __version__,
            "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "executor": executor_name(),
            "choices": f"{', '.join(choices())} ({VARIABLE} chooses)",
            "gpu": _gpu(),
        }.items():
            typer.echo(f"{name:<10}{value}")


@app.command()
def config(
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a copy to start from.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE if it exists.")] = False,
) -> None:
    """Print the path of the default bit-width configuration, or write a copy of it."""
    with _one_line_errors():
        from quant_gru.config import default_config_path

        source = default_config_path()
        if write is None:
            typer.echo(source)
            return
        _copy(source, write, force)
        typer.echo(f"Wrote {write}. Change it, then: quant-gru check {write}")


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="Bit-width configuration or parameter file.")],
) -> None:
    """Validate a bit-width configuration or a parameter file, and describe it."""
    with _one_line_errors():
        typer.echo(_describe(file))


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all compiled kernels.")] = False,
) -> None:
    """Show or clear the compiled CUDA kernels in the disk cache."""
    with _one_line_errors():
        from quant_gru.kernels.cuda.machine import SOURCES

        kept = SOURCES.cache
        if clear:
            typer.echo(f"Removed {_files(kept.clear())} from {kept.folder()}")
            return
        sizes = kept.sizes()
        typer.echo(f"{kept.folder()}: {_files(len(sizes))}, {sum(sizes) / 1024:.0f} KiB")


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def _gpu() -> str:
    """Return the GPU and its executor, or the reason for having none."""
    import torch

    from quant_gru.kernels.cuda.machine import missing
    from quant_gru.kernels.dispatch import executor_name

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        return f"none: {'PyTorch finds no device' if built else 'this PyTorch has no CUDA'}"
    device = torch.device("cuda", torch.cuda.current_device())
    name, reason = torch.cuda.get_device_name(device), missing(device)
    if reason is None:
        return f"{name}, {executor_name(device)}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{name} (sm_{major}{minor}), {executor_name(device)}: {reason}"


def _copy(source: Path, target: Path, force: bool) -> None:
    if target.exists() and not force:
        raise QuantGRUError(
            f"Expected --write to be a new file, got '{target}', which exists; --force overwrites"
        )
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        reason = error.strerror or error
        raise QuantGRUError(
            f"Expected --write to be a file that can be written, got '{target}' ({reason})"
        ) from error


def _describe(file: Path) -> str:
    from quant_gru.config import QuantConfig
    from quant_gru.config.files import read_json

    data = read_json(file)  # read once: a pipe cannot be read again
    if isinstance(data, dict) and "format" in data:
        return _describe_parameters(file, data)
    if isinstance(data, dict) and "GRU_config" not in data:
        shown = ", ".join(sorted(data)[:5]) or "no key"
        raise QuantGRUError(
            "Expected a bit-width configuration (key GRU_config) or a parameter file (key format), "
            f"got {shown} (file {str(file)!r})"
        )
    found = QuantConfig._from_document(data, file, verbose=True)
    return f"{file}: bit-width configuration, {_summary(found)}"


def _describe_parameters(file: Path, data: dict[str, Any]) -> str:
    from quant_gru.parameters import document

    found = document.from_document(data, f"file {str(file)!r}")
    shape = found.shape
    sizes = f"GRU({shape.input_size}, {shape.hidden_size}, num_layers={shape.num_layers}"
    options = f", bias={shape.bias}, bidirectional={shape.bidirectional})"
    return f"{file}: parameter file of a {sizes}{options}, {_summary(found.config)}"


def _summary(config: QuantConfig) -> str:
    widths = sorted({op.bitwidth for op in config.operators.values() if op.bitwidth})
    return (
        f"{' and '.join(map(str, widths))} bits, {config.scale_kind} scales, "
        f"{config.activation} activations"
    )
