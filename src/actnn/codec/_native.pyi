"""The codec on a CPU, and calls of it for tensors of one size."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

class Call:
    """Encodes or decodes tensors of one size on a CPU; `cpu.call_of` makes it."""

    def __init__(
        self,
        encodes: bool,
        real: int,
        bits: int,
        group: int,
        stochastic: bool,
        rows: int,
        m: int,
        lowest: float,
        highest: float,
        threads: Callable[[], int],
        type: type,
        /,
    ) -> None: ...
    def __call__(
        self,
        x: Tensor | int,
        data: Tensor | int,
        params: Tensor | int,
        state: Tensor | None,
        bits: Tensor | None,
        ends: Tensor | None,
        capacity: int,
        tensor: int,
        /,
    ) -> None: ...

class Coder:
    """Encodes and decodes tensors of one size and layout; `executors.coder_of` makes it."""

    def __init__(
        self,
        device: int,
        make_codes: Callable[[], Tensor],
        make_tensor: Callable[[], Tensor],
        codes_bytes: int,
        encode: Callable[..., None],
        decode: Callable[..., None],
        encode_slowly: Callable[..., Any],
        decode_slowly: Callable[..., Any],
        type: type,
        /,
    ) -> None: ...
    def encode(self, x: Tensor, state: Tensor, tensor: int, /) -> Any: ...
    def decode(self, codes: Any, /) -> Tensor: ...

def use_only_portable(only: bool, /) -> None: ...
