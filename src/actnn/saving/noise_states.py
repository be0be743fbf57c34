"""Seed and step of the noise, on each device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from actnn import codec
from actnn.errors import ActNNError


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return 0


class NoiseStates:
    """One int64 tensor (seed, step) per device. A CUDA graph that was captured advances it, too."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: dict[torch.device, Tensor] = {}
        self._step = 0

    def on(self, device: torch.device) -> Tensor:
        """Return the state on a device."""
        state = self._states.get(device)
        if state is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ActNNError(
                    "Expected a forward pass before one is captured in a CUDA graph, got none: "
                    "the state of the noise must exist outside of the graph"
                )
            with torch.inference_mode(False):
                state = codec.noise_state(self._seed, rank=_rank(), step=self._step, device=device)
            self._states[device] = state
        return state

    def advance(self) -> None:
        """Go to the next step."""
        self._step += 1
        for state in self._states.values():
            state[1].add_(1)

    @contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Draw the noise after a step; afterwards go on as before."""
        known, before = {d: s.clone() for d, s in self._states.items()}, self._step
        self._step = step
        for state in self._states.values():
            state[1].fill_(step)
        try:
            yield
        finally:
            self._step = before
            for device, state in self._states.items():
                if device in known:
                    state.copy_(known[device])
                else:
                    state[1].fill_(before)

    def __getstate__(self) -> dict[str, object]:
        """Return what copies share; the tensors hold the rank and belong to devices."""
        return {"_seed": self._seed, "_step": self._step, "_states": {}}
