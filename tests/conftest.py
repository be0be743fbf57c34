"""Shared by all tests."""

from __future__ import annotations

from collections import Counter

import hypothesis
import pytest
import torch

from quant_gru.errors import forget_notes

pytest_plugins = ["skips"]

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    """Tests share the machine's cores, and each starts from the same random state."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    forget_notes()


def pytest_terminal_summary(terminalreporter):
    """Print the seconds of each folder of tests; those of workers add up."""
    seconds = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                _, *folder = report.nodeid.partition("::")[0].split("/")[:-1]
                seconds["/".join(folder) or "."] += report.duration
    if sum(seconds.values()) > 10:
        terminalreporter.section("seconds by folder")
        for folder, each in seconds.most_common():
            terminalreporter.write_line(f"{each:8.1f} {folder}")
