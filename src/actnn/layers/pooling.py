"""Pools keep no input: max pools one byte per output, average pools only shapes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from actnn.saving.active import step_for
from actnn.saving.cuda import executor as cuda
from actnn.saving.module_classes import Swapped
from actnn.saving.step import Step

_FORWARD = {2: torch.ops.aten.max_pool2d_with_indices, 3: torch.ops.aten.max_pool3d_with_indices}
_BACKWARD = {
    2: torch.ops.aten.max_pool2d_with_indices_backward,
    3: torch.ops.aten.max_pool3d_with_indices_backward,
}
_CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def _tuple(value: int | tuple[int, ...], n: int) -> list[int]:
    return [value] * n if isinstance(value, int) else list(value)


class Window:
    """The geometry of a max pool over the last n dimensions of an input."""

    def __init__(self, pool: Any, n: int, shape: torch.Size) -> None:
        self.kernel = _tuple(pool.kernel_size, n)
        self.stride = _tuple(pool.stride, n)
        self.padding = _tuple(pool.padding, n)
        self.dilation = _tuple(pool.dilation, n)
        self.ceil_mode = pool.ceil_mode
        self.sizes = list(shape[-n:])

    @property
    def settings(self) -> tuple[Any, ...]:
        """The arguments of torch's operations."""
        return self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode

    @property
    def _type(self) -> torch.dtype:
        """The type of positions in the input."""
        return torch.int32 if math.prod(self.sizes) < 1 << 31 else torch.int64

    def _starts(self, out: Tensor, dim: int) -> Tensor:
        """Return the first input coordinate of each window, which broadcasts over `out`."""
        n = len(self.kernel)
        size = out.shape[dim - n]
        start = torch.arange(size, device=out.device) * self.stride[dim] - self.padding[dim]
        return start.view(-1, *[1] * (n - 1 - dim))

    def _convert(self, function: str, indices: Tensor, offsets: Tensor) -> bool:
        """Run a kernel; return whether there is one for the layout."""
        n, inner = len(self.kernel), 1
        batched = indices.dim() == n + 2
        last = batched and indices.is_contiguous(memory_format=_CHANNELS_LAST[n])
        if not cuda.windows_available(indices) or not (indices.is_contiguous() or last):
            return False
        if not indices.is_contiguous():
            inner = indices.shape[1]
        sizes = [self.sizes, list(indices.shape[-n:]), *self.settings[:4]]
        neutral = [1, 1, 1, 1, 0, 1]
        triples = [[fill] * (3 - n) + each for fill, each in zip(neutral, sizes, strict=True)]
        cuda.run_windows(function, indices, offsets, inner, triples)
        return True

    def offsets(self, indices: Tensor) -> Tensor:
        """Return the position in the window for positions in the input, uint8."""
        result = torch.empty_like(indices, dtype=torch.uint8)
        if self._convert("window_offsets", indices, result):
            return result
        result.zero_()
        rest, place = indices.to(self._type, copy=True), 1  # all else in place: this may be a peak
        for dim in reversed(range(len(self.kernel))):
            step = rest % self.sizes[dim]
            rest.floor_divide_(self.sizes[dim])
            step.sub_(self._starts(indices, dim)).floor_divide_(self.dilation[dim])
            result.add_(step, alpha=place)
            place *= self.kernel[dim]
        return result

    def indices(self, offsets: Tensor) -> Tensor:
        """Return the positions in the input, int64."""
        result = torch.empty_like(offsets, dtype=torch.int64)
        if self._convert("window_indices", result, offsets):
            return result
        result.zero_()
        rest, place = offsets.to(self._type), 1
        for dim in reversed(range(len(self.kernel))):
            step = rest % self.kernel[dim]
            rest.floor_divide_(self.kernel[dim])
            step.mul_(self.dilation[dim]).add_(self._starts(offsets, dim))
            result.add_(step, alpha=place)
            place *= self.sizes[dim]
        return result


class _MaxPool(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window, step: Step) -> Tensor:
        y, indices = _FORWARD[len(window.kernel)](x, *window.settings)
        ctx.save_for_backward(step.claim(window.offsets(indices), "1-byte window index", x))
        ctx.window = window
        ctx.layout = {"size": x.shape, "stride": x.stride(), "dtype": x.dtype, "device": x.device}
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        window, (offsets,) = ctx.window, ctx.saved_tensors
        x = torch.empty_strided(**ctx.layout)  # only its shape and layout are read
        indices = window.indices(offsets)
        dx = _BACKWARD[len(window.kernel)](dy, x, *window.settings, indices)
        return dx, None, None


class MaxPool(Swapped):
    """nn.MaxPool1d, nn.MaxPool2d or nn.MaxPool3d."""

    kernel_size: int | tuple[int, ...]
    return_indices: bool

    def forward(self, x: Tensor) -> Any:
        """Return the result of the module's own forward."""
        step = step_for(x)
        n = next(
            n
            for n, kind in ((1, nn.MaxPool1d), (2, nn.MaxPool2d), (3, nn.MaxPool3d))
            if isinstance(self, kind)
        )
        if step is None or self.return_indices or math.prod(_tuple(self.kernel_size, n)) > 256:
            return super().forward(x)  # type: ignore[misc]
        if n > 1:
            return _MaxPool.apply(x, Window(self, n, x.shape), step)
        # As torch does: one dimension is two, of which the first has size 1.
        window = Window(self, 1, x.shape)
        window.kernel, window.stride = [1, *window.kernel], [1, *window.stride]
        window.padding, window.dilation = [0, *window.padding], [1, *window.dilation]
        window.sizes = [1, *window.sizes]
        return _MaxPool.apply(x.unsqueeze(-2), window, step).squeeze(-2)


class _ShapeOnly(Function):
    """A linear operation whose gradient depends on the shape of its input, not on its values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Any) -> Tensor:
        ctx.run = run
        ctx.layout = {"size": x.shape, "stride": x.stride(), "dtype": x.dtype, "device": x.device}
        return run(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        x = torch.empty_strided(**ctx.layout).requires_grad_()
        twice = torch.is_grad_enabled()  # linear, so that y need not be differentiable again
        with torch.enable_grad():
            y = ctx.run(x)
        return torch.autograd.grad(y, x, dy, create_graph=twice)[0], None


class AveragePool(Swapped):
    """Average and adaptive average pools of any dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the module's own forward."""
        step = step_for(x)
        run = super().forward  # type: ignore[misc]
        if step is None:
            return run(x)  # type: ignore[no-any-return]
        step.note(x, "only the shape")
        return _ShapeOnly.apply(x, run)  # type: ignore[no-any-return]
