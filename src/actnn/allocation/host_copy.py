"""Values of the device that the host reads later, without waiting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A copy of a small tensor to the host, which is under way.

    Args:
        value: The tensor; it may change after this.
    """

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if value.is_cuda:
            self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._value = value.detach().clone()

    def __getstate__(self) -> dict[str, Any]:
        """Return the values: events belong to a process."""
        return {"_event": None, "_value": self.value.clone()}

    @property
    def ready(self) -> bool:
        """Whether `value` can be read without waiting."""
        return self._event is None or self._event.query()

    @property
    def value(self) -> Tensor:
        """The values, on the host. Waits if they are not ready."""
        if self._event is not None:
            self._event.synchronize()
        return self._value
