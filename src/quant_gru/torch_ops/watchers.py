"""Detection of compilers, tracers, transforms and modes, which require operators.

Compiled code checks `torch.compiler.is_compiling` first, in the compiled frame.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.nn.utils.rnn import PackedSequence

from quant_gru.errors import QuantGRUError

_peek_functorch = torch._C._functorch.peek_interpreter_stack
_count_modes = torch._C._len_torch_dispatch_stack
_jit_state = torch._C._get_tracing_state
_callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)


def traced(x: object, hx: object = None, module: torch.nn.Module | None = None) -> bool:
    """Return whether a tracer or a transform requires a call to use the operators.

    Args:
        x: The input of the call.
        hx: Its initial states.
        module: The called module, if it has real weights.

    Raises:
        QuantGRUError: torch.jit.trace is running, or the input, the states or a weight has a
            tangent of forward-mode differentiation.
    """
    # a dual level must be active for any tensor to have a tangent
    if forward_ad._current_level >= 0:
        _refuse_tangents(x, hx, *(() if module is None else module.parameters()))
    if _jit_state() is not None:
        raise QuantGRUError(
            "Expected torch.export or torch.compile for a quantized GRU, got torch.jit.trace, "
            "which would record constants"
        )
    return (
        _count_modes() > 0
        or _peek_functorch() is not None
        or (isinstance(x, Tensor) and type(x) is not Tensor)
    )


def refuse_script(module: torch.nn.Module) -> NoReturn:
    """Raise for torch.jit.script, which asks a module for its `__prepare_scriptable__`.

    Raises:
        QuantGRUError: Always.
    """
    raise QuantGRUError(
        f"Expected torch.export or torch.compile for a {type(module).__name__}, got "
        "torch.jit.script, which has no integer GRU; in float mode torch.jit.trace works. For a "
        "file, call quant_gru.export_onnx, or freeze().save for the C++ library"
    )


def skipped_by_dynamo() -> bool:
    """Return whether Dynamo is active but skipped the frame of the caller.

    Dynamo skips frames that involve an RNN unless its `allow_rnn` is set, but continues with the
    frames of the functions that they call.
    """
    return _callback() not in (None, False)


def leaf(module: torch.nn.Module, *args: Any) -> Any:
    """Record a call under `torch.fx.symbolic_trace` as one node, like modules of torch.nn.

    Args:
        module: The called module, below the root of the tracer.
        args: Its arguments, including a `torch.fx.Proxy`; trailing Nones are dropped.
    """
    tracer: Any = next(each.tracer for each in args if isinstance(each, Proxy))
    while args[-1] is None:
        args = args[:-1]
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, {})


def _refuse_tangents(*inputs: object) -> None:
    """Raise for tangents, which would otherwise be dropped silently without a gradient."""
    for each in inputs:
        values = each.data if isinstance(each, PackedSequence) else each
        if isinstance(values, Tensor) and forward_ad.unpack_dual(values).tangent is not None:
            raise QuantGRUError(
                "Expected inputs and weights without tangents, got a dual tensor: the quantized "
                "mode has gradients in reverse mode only"
            )
