"""A test in two processes that meet through gloo."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NEEDS_GLOO = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed, gloo"
)
TIMEOUT = 240.0


@contextmanager
def joined(rank: int, folder: str) -> Iterator[None]:
    """The group of both processes, while this one, of number `rank`, is in it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=TIMEOUT / 2),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_two(worker: Callable[..., None], folder: Path, *args: object) -> None:
    """Run `worker(rank, folder, *args)` in two processes, which must end in time."""
    context = mp.spawn(worker, args=(str(folder), *args), nprocs=2, join=False)
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=TIMEOUT)
    try:
        while not context.join(timeout=1.0):
            assert datetime.datetime.now() < deadline, "the two processes hang"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
