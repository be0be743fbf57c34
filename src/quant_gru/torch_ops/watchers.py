"""Who watches a call: compilers, tracers, transforms and modes, which see operators alone.

Who compiles asks `torch.compiler.is_compiling` first, in the frame that is compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.nn.utils.rnn import PackedSequence

from quant_gru._errors import QuantGRUError

_peek_functorch = torch._C._functorch.peek_interpreter_stack
_count_modes = torch._C._len_torch_dispatch_stack
_jit_state = torch._C._get_tracing_state
_callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)


def traced(x: object, hx: object = None, module: torch.nn.Module | None = None) -> bool:
    """Whether a call is to go through the operators: a tracer or a transform is watching.

    Args:
        x: The input of the call.
        hx: Its initial states.
        module: What is called, where it has real weights.

    Raises:
        QuantGRUError: torch.jit.trace is running, or input, states or a weight have a tangent of
            forward-mode differentiation.
    """
    # tells whether a dual level is entered: no tensor has a tangent otherwise
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


def skipped_by_dynamo() -> bool:
    """Whether Dynamo looks at frames, and has left that of the caller alone.

    It does so with frames that have to do with an RNN, unless its `allow_rnn` is set, and goes on
    with the frames of functions that they call.
    """
    return _callback() not in (None, False)


def leaf(module: torch.nn.Module, *args: Any) -> Any:
    """A call under `torch.fx.symbolic_trace`, recorded whole, as those of modules of torch.nn are.

    Args:
        module: What is called, a module below the root of the tracer.
        args: Its arguments, with a `torch.fx.Proxy` among them; None at the end is left out.
    """
    tracer: Any = next(each.tracer for each in args if isinstance(each, Proxy))
    while args[-1] is None:
        args = args[:-1]
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, {})


def _refuse_tangents(*inputs: object) -> None:
    """Without an error a tangent would vanish where no gradient is asked for."""
    for each in inputs:
        values = each.data if isinstance(each, PackedSequence) else each
        if isinstance(values, Tensor) and forward_ad.unpack_dual(values).tangent is not None:
            raise QuantGRUError(
                "Expected inputs and weights without tangents, got a dual tensor: the quantized "
                "mode has gradients in reverse mode only"
            )
