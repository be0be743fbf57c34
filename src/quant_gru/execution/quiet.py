"""Whether a call of a quantized GRU is watched: by hooks, tracers, transforms or a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module

from quant_gru.kernels import _native

_of_module = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
_of_all = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
)

# a tracer puts its own in this place
_CALL = module.Module.__call__


def is_nothing_at_work() -> bool:
    """Whether calls of modules are what they were, and no derivative is taken forward."""
    return module.Module.__call__ is _CALL and forward_ad._current_level < 0


def _quiet(*false: str) -> Callable[[dict[str, Any]], bool]:
    return _native.Quiet(
        false,
        _of_module,
        ("_compiled_call_impl", "forward"),
        "use_quantization",
        tuple(getattr(module, name) for name in _of_all),
        vars(torch.compiler),
        (torch._C._len_torch_dispatch_stack,),
        (torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state),
    ).is_


is_quiet = _quiet("training", "calibrating")
"""is_quiet(vars(module)) -> whether a call in eval and quantized mode would run `forward` alone."""

is_quiet_in_training = _quiet("calibrating")
"""The same of a module in training."""
