"""Shared by all tests."""

from __future__ import annotations

import copy
import functools
import gc
import os
import sys
from collections import Counter
from pathlib import Path

import hypothesis
import pytest
import torch

import two_processes
from quant_gru.errors import forget_notes

pytest_plugins = ["skips"]

# Collecting makes little garbage: it is looked for once, in pytest_collection_finish.
gc.disable()

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci")


# Files of a minute of one processor or more, longest first: neither core waits for them at the end.
LONGEST = (
    "cpp/test_cpp_processors.py",
    "cpp/test_clang.py",
    "cuda/test_compile.py",
    "cuda/test_real_projection.py",
    "cuda/test_prepared_backward.py",
    "cuda/test_stack.py",
    "cuda/test_host_emulation.py",
    "kernels/test_cpu_rounding.py",
    "kernels/test_cpu_backward.py",
    "kernels/test_cpu_executor.py",
    "gru/test_onnx_steps.py",
    "gru/test_onnx_whole_models.py",
)


def pytest_ignore_collect(collection_path, config):
    """Where only slow tests run, do not import files without them, which takes half a minute."""
    if config.option.markexpr != "slow" or not collection_path.name.startswith("test_"):
        return None
    return None if may_be_slow(collection_path) else True


def may_be_slow(file: Path) -> bool:
    """Whether a file has slow tests: it, `sweeps` or the conftest.py of its folder marks them."""
    text = file.read_text(encoding="utf-8")
    beside = file.with_name("conftest.py")
    if beside.exists() and beside != Path(__file__):
        text += beside.read_text(encoding="utf-8")
    return "mark.slow" in text or "sweeps" in text


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Begin with files without slow tests, which soon say most, and then with the longest ones."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path in slow, places.get(item.path, len(LONGEST))))


def pytest_runtest_logreport(report):
    """Continuous integration prints a failure at once, and all of them at the end."""
    if report.failed and "QUANT_GRU_CI" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    """Tests share the machine's cores, and each starts from the same random state."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    forget_notes()


def processor_seconds() -> float:
    """Those of this process, of processes that it has waited for, and of two that tests share."""
    return sum(os.times()[:4]) + sum(two_processes.seconds)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Give the report of each phase of a test the processor-seconds since the one before."""
    report = yield
    before, now = item.config.stash.get(SECONDS, 0.0), processor_seconds()
    item.config.stash[SECONDS] = now
    report.processor_seconds = now - before
    return report


SECONDS = pytest.StashKey[float]()


def share_torchlib() -> None:
    """Make torch.onnx's table of translations once: it takes a quarter of an export's time."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    made = functools.cache(ONNXRegistry.from_torchlib)

    def from_torchlib(**options):
        registry = copy.copy(made(**options))
        # an export adds translations of its own
        registry.functions = {name: [*each] for name, each in registry.functions.items()}
        return registry

    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)


def pytest_collection_finish(session):
    """What collecting has imported stays: nobody looks through it for garbage again and again."""
    if "onnxscript" in sys.modules:
        share_torchlib()
    gc.collect()
    gc.freeze()
    gc.enable()
    session.config.stash[SECONDS] = processor_seconds()


def pytest_terminal_summary(terminalreporter):
    """Print the processor-seconds of each folder of tests; those of workers add up."""
    seconds = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "processor_seconds"):
                _, *folder = report.nodeid.partition("::")[0].split("/")[:-1]
                seconds["/".join(folder) or "."] += report.processor_seconds
    if sum(seconds.values()) > 10:
        terminalreporter.section("processor-seconds by folder")
        for folder, each in seconds.most_common():
            terminalreporter.write_line(f"{each:8.1f} {folder}")
