"""Tiny runs of the examples, and small data for them."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist

EXAMPLES = Path(__file__).parents[2] / "examples"
RATE = 8000


def load(name):
    """An example as a module, with its neighbours importable."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(EXAMPLES))


def write_data(folder):
    """Two tones as spoken digits, and a text that repeats itself."""
    rng = np.random.default_rng(0)
    samples, label, take = [], [], []
    for digit in range(2):
        for t in range(37):
            time = np.arange(int(rng.integers(500, 900))) / RATE
            wave = np.sin(2 * np.pi * (400 + 1500 * digit) * time) + 0.3 * rng.normal(
                size=len(time)
            )
            samples.append((8000 * wave).astype(np.int16))
            label.append(digit)
            take.append(t)
    np.savez(
        folder / "digits.npz",
        samples=np.concatenate(samples),
        offsets=np.cumsum([0, *map(len, samples)]),
        label=np.array(label),
        speaker=np.zeros(len(label), dtype=np.int64),
        take=np.array(take),
        speaker_names=np.array(["ada"]),
        sample_rate=np.array(RATE),
    )
    words = rng.choice(["tick ", "tock ", "ding "], size=600)
    (folder / "text.txt").write_text("".join(words))


def arguments(name, folder):
    """Options of a run of seconds."""
    own = {
        "keyword_spotting": ["--data", str(folder / "digits.npz"), "--hidden-size", "6"],
        "character_model": [
            *("--data", str(folder / "text.txt"), "--hidden-size", "8", "--window", "8")
        ],
        "sequence_regression": ["--length", "12", "--hidden-size", "6"],
    }[name]
    return [*own, "--device", "cpu", "--steps", "6", "--further", "2"]


def torchrun(runs, processes=2):
    """Run examples one after the other under torchrun, which takes seconds to start.

    Args:
        runs: (name, options) of each.
        processes: How many.

    Returns:
        What they print, together.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", __file__]
    done = subprocess.run(
        [*command, json.dumps([[str(EXAMPLES / f"{name}.py"), *more] for name, more in runs])],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def main():
    """The processes of `torchrun`: one rendezvous serves one process group, so all share it."""
    begin, end = dist.init_process_group, dist.destroy_process_group
    dist.init_process_group = lambda backend: dist.is_initialized() or begin(backend)
    dist.destroy_process_group = lambda: None
    sys.path.insert(0, str(EXAMPLES))
    for command in json.loads(sys.argv[1]):
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
    end()
    # threads of torch's that outlive the group may abort a process while its interpreter ends
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
