"""What `quant-gru info` prints: versions, threads, executors, GPU."""

from __future__ import annotations

import json
import platform
from typing import Any

import torch

from quant_gru import __version__
from quant_gru.kernel_runtime.cuda.driver import missing
from quant_gru.kernels.cpu.executor import VARIABLE, choices, left_out
from quant_gru.kernels.dispatch import executor_name


def facts() -> dict[str, Any]:
    """Return all facts as JSON-compatible data.

    Raises:
        QuantGRUError: `QUANT_GRU_CPU` has a value that this machine does not support.
    """
    return {
        "quant_gru": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "executor": executor_name(),
        "choices": choices(),
        "left_out": left_out(),
        "gpu": _gpu(),
    }


def as_json() -> str:
    """Return the facts as a JSON object."""
    return json.dumps(facts(), indent=2)


def as_text() -> str:
    """Return the facts as one line each."""
    found = facts()
    lines = {
        "quant-gru": found["quant_gru"],
        "python": f"{found['python']} on {found['platform']}",
        "torch": found["torch"],
        "threads": found["threads"],
        "executor": found["executor"],
        "choices": f"{', '.join(found['choices'])} ({VARIABLE} chooses)",
    }
    if found["left_out"]:
        lines["left out"] = (
            f"{', '.join(found['left_out'])} (unknown to the compiler that built the kernels)"
        )
    lines["gpu"] = _gpu_text(found["gpu"])
    return "\n".join(f"{name:<10}{value}" for name, value in lines.items())


def _gpu() -> dict[str, str | None]:
    """Return name, architecture and executor of the GPU, and why its kernels cannot run, if so."""
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        reason = "PyTorch finds no device" if built else "this PyTorch has no CUDA"
        return {"name": None, "architecture": None, "executor": None, "reason": reason}
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "name": torch.cuda.get_device_name(device),
        "architecture": f"sm_{major}{minor}",
        "executor": executor_name(device),
        "reason": missing(device),
    }


def _gpu_text(gpu: dict[str, str | None]) -> str:
    name, executor, reason = gpu["name"], gpu["executor"], gpu["reason"]
    if name is None:
        return f"none: {reason}"
    if reason is None:
        return f"{name}, {executor}"
    return f"{name} ({gpu['architecture']}), {executor}: {reason}"
