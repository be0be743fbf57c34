"""A test in two processes that meet through gloo."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
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


seconds = [0.0, 0.0]  # processor-seconds of each process


@cache
def _processes() -> list[tuple[ProcessPoolExecutor, int]]:
    """Two processes for all tests of this run, and their numbers: what they import stays."""
    made = [ProcessPoolExecutor(1, mp.get_context("spawn")) for _ in range(2)]
    return [(each, each.submit(os.getpid).result(TIMEOUT)) for each in made]


def _timed(worker: Callable[..., None], *args: object) -> float:
    worker(*args)
    return sum(os.times()[:4])


def run_two(worker: Callable[..., None], folder: Path, *args: object) -> None:
    """Run `worker(rank, folder, *args)` in two processes, which must end in time."""
    processes = _processes()
    calls = [
        process.submit(_timed, worker, rank, str(folder), *args)
        for rank, (process, _) in enumerate(processes)
    ]
    try:
        seconds[:] = [call.result(TIMEOUT) for call in calls]
    except BaseException:
        # one of them may wait for the other for ever
        for _, number in processes:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        _processes.cache_clear()
        raise
