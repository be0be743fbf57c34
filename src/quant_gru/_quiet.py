"""Whether a call of a quantized GRU is watched: by hooks, tracers, transforms or a compiler."""

from __future__ import annotations

import torch
from torch.nn.modules import module

from quant_gru.kernels.cpu import _native

_of_module = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
_of_all = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
)

is_quiet = _native.Quiet(
    ("training", "calibrating"),
    _of_module,
    ("_compiled_call_impl", "forward"),
    "use_quantization",
    tuple(getattr(module, name) for name in _of_all),
    vars(torch.compiler),
    (torch._C._len_torch_dispatch_stack,),
    (torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state),
).is_
"""is_quiet(vars(module)) -> whether a call in eval and quantized mode would run `forward` alone."""
