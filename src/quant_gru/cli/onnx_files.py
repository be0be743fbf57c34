"""The command `quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quant_gru.cli.frozen_files import Profile
from quant_gru.cli.messages import one_line_messages
from quant_gru.errors import QuantGRUError


def quantize(
    file: Annotated[str, typer.Argument(metavar="FILE", help="An ONNX model with GRU nodes.")],
    feeds: Annotated[
        str,
        typer.Option(
            "--feeds",
            metavar="NPZ",
            help="Real inputs: an array for each, or several feeds along a further first axis.",
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="PATH", help="File.", show_default="a name beside FILE"
        ),
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="int8, int8_wide, w8a16 or int16; or a configuration file.",
        ),
    ] = "int8_wide",
    profile: Annotated[Profile, typer.Option("--profile", help="The profile.")] = Profile.integer,
    test_feeds: Annotated[
        str | None,
        typer.Option(
            "--test-feeds",
            metavar="NPZ",
            help="Inputs for the report alone.",
            show_default="every fifth feed",
        ),
    ] = None,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Leave nodes that cannot be quantized in float."),
    ] = False,
    refine: Annotated[
        bool, typer.Option("--refine", help="Improve scales by the integer run; slower.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite PATH if it exists.")] = False,
) -> None:
    """Put the GRUs of an ONNX model into integers, and report what that costs and gains."""
    with one_line_messages():
        from quant_gru.model_files.quantize_onnx import quantize_onnx

        source = Path(file)
        target = Path(output or source.with_name(f"{source.stem}_{Path(preset).stem}.onnx"))
        if target.exists() and not force:
            raise QuantGRUError(
                f"Expected --output to be new, got '{target}', which exists; --force overwrites"
            )
        result = quantize_onnx(
            file,
            feeds,
            preset,
            profile.value,
            target,
            test_feeds=test_feeds,
            on_error="keep" if keep else "raise",
            refine=refine,
        )
        typer.echo(result.report.to_json() if json else f"{result.report}\n\nWrote {target}")
