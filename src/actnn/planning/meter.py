"""Memory of a training step, measured the same way on every device."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(ABC):
    """Bytes allocated now and at most, while it is entered."""

    @abstractmethod
    def allocated(self) -> int:
        """Bytes of all tensors that are alive."""

    @abstractmethod
    def peak(self) -> int:
        """Most bytes since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Forget earlier peaks."""

    def __enter__(self) -> Meter:
        self.reset_peak()
        return self

    def __exit__(self, *error: object) -> None:
        return None


class CudaMeter(Meter):
    """What PyTorch's CUDA allocator counts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        """Bytes of all tensors that are alive."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """Most bytes since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Forget earlier peaks."""
        torch.cuda.reset_peak_memory_stats(self._device)


class _Allocations(TorchDispatchMode):
    """Calls back with the results of every operator that runs under it."""

    def __init__(self, meter: HostMeter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._meter.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


class HostMeter(Meter):
    """Storages of tensors on a CPU, from the operators that make them to their release.

    Memory that an operator takes and returns while it runs is not seen. What torch.compile has
    compiled runs uncompiled meanwhile: operators inside would not be seen, either.

    Args:
        known: Tensors that exist already and count: parameters, buffers and inputs.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._alive: dict[int, int] = {}
        self._now = self._peak = 0
        self._mode = _Allocations(self)
        self.add(known)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors, each once, until they are released."""
        for tensor in tensors:
            if tensor.layout != torch.strided or tensor.device.type != "cpu":
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._alive:
                continue
            self._alive[key] = storage.nbytes()
            self._now += storage.nbytes()
            weakref.finalize(storage, self._release, key)
        self._peak = max(self._peak, self._now)

    def _release(self, key: int) -> None:
        self._now -= self._alive.pop(key)

    def allocated(self) -> int:
        """Bytes of all tensors that are alive."""
        return self._now

    def peak(self) -> int:
        """Most bytes since `reset_peak`."""
        return self._peak

    def reset_peak(self) -> None:
        """Forget earlier peaks."""
        self._peak = self._now

    def __enter__(self) -> HostMeter:
        super().__enter__()
        # Without it, Dynamo would give up on what it meets under the mode, for good.
        self._stance = torch.compiler.set_stance("force_eager")
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)
        self._stance.__exit__(*error)


def meter_for(device: torch.device, known: Iterable[Tensor]) -> Meter:
    """The meter of a device; `known` are the tensors that a CPU's meter cannot find itself."""
    return CudaMeter(device) if device.type == "cuda" else HostMeter(known)
