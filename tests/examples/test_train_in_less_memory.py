"""The example that trains in less memory."""

import re

import pytest
from example_runs import load

from actnn.planning import parse_bytes


def test_the_table_has_every_way_and_plans_within_their_budgets(capsys):
    pytest.importorskip("sklearn")
    example = load("train_in_less_memory")
    example.main(["--steps", "1", "--batch", "32"])
    text = capsys.readouterr().out
    rows = ["exact", "4 bits", "2 bits adaptive", "fit to 75 %", "fit to 60 %"]
    lines = [line.strip() for line in text.partition("accuracy")[2].splitlines()]
    found = {name: next(line for line in lines if line.startswith(f"{name}  ")) for name in rows}
    sizes = {name: re.findall(r"[\d.]+ (?:B|KiB|MiB)", line) for name, line in found.items()}
    peaks = {name: parse_bytes(peak) for name, (_, peak) in sizes.items()}
    assert peaks["fit to 60 %"] <= peaks["exact"] * 0.6 * 1.01  # three digits
    assert peaks["fit to 75 %"] <= peaks["exact"] * 0.75 * 1.01
    assert peaks["4 bits"] < peaks["exact"]
