"""The command line: `quant-gru demo | info | config | check | diff | cache`."""

from quant_gru.cli.app import app, main

__all__ = ["app", "main"]
