"""The commands `export`, `inspect` and `verify`."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from quant_gru.cli.messages import one_line_messages


class Form(str, Enum):
    """The forms that a frozen GRU can be written in."""

    onnx = "onnx"
    c = "c"
    encodings = "encodings"
    json = "json"


class Profile(str, Enum):
    """The profiles of ONNX files."""

    integer = "integer"
    qdq = "qdq"
    float = "float"
    node = "node"
    operator = "operator"


Frozen = Annotated[
    str, typer.Argument(metavar="FILE", help="File of a frozen GRU: gru.freeze().save(FILE).")
]


def export(
    file: Frozen,
    to: Annotated[Form, typer.Option("--to", help="The form to write.")],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            metavar="PATH",
            help="File, or directory for C.",
            show_default="a name beside FILE",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite PATH if it exists.")] = False,
    profile: Annotated[
        Profile | None, typer.Option("--profile", help="ONNX: the profile.", show_default="integer")
    ] = None,
    step: Annotated[
        bool | None, typer.Option("--step", help="ONNX: one step, with states in and out.")
    ] = None,
    states: Annotated[
        bool | None, typer.Option("--states", help="ONNX: initial states are an input.")
    ] = None,
    lengths: Annotated[
        bool | None, typer.Option("--lengths", help="ONNX: lengths of rows are an input.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="C: start of all names.", show_default="the name of FILE"
        ),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(
            "--version",
            metavar="VERSION",
            help="Encodings: 0.6.1, 1.0.0 or 2.0.0.",
            show_default="1.0.0",
        ),
    ] = None,
) -> None:
    """Write a frozen GRU as ONNX, C source, AIMET encodings or a parameter file."""
    with one_line_messages():
        from quant_gru.config.files import expect_readable

        expect_readable(file)
        from quant_gru.cli.hand_over import Options, write

        kind = None if profile is None else profile.value
        options = Options(kind, step, states, lengths, name, version)
        for line in write(file, to.value, output, force, options):
            typer.echo(line)


def inspect(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file, as for check.")],
) -> None:
    """Print operators, widths and scales, and the sizes of a frozen GRU."""
    with one_line_messages():
        from quant_gru.cli.files import is_frozen_file, read
        from quant_gru.cli.tables import describe, operator_tables

        for found in read(file):
            typer.echo("\n\n".join([describe(file, found), *operator_tables(found)]))
        if is_frozen_file(file):
            from quant_gru.cli.hand_over import sizes

            typer.echo(f"\n{sizes(file)}")


def verify(
    file: Frozen,
    against: Annotated[
        str,
        typer.Option(
            "--against",
            metavar="PATH",
            help="ONNX file, or directory of C source, which is compiled and run.",
        ),
    ],
    within: Annotated[
        int,
        typer.Option("--within", min=0, metavar="CODES", help="ONNX: largest difference allowed."),
    ] = 0,
) -> None:
    """Compare an ONNX file or C source with a frozen GRU, code by code.

    The exit code is 0 if all codes are equal, and 1 if not.
    """
    with one_line_messages():
        from quant_gru.config.files import expect_readable

        expect_readable(file)
        from quant_gru.cli.hand_over import compare

        lines, equal = compare(file, against, within)
        for line in lines:
            typer.echo(line)
        if not equal:
            raise typer.Exit(1)
