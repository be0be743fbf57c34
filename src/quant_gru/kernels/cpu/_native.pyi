"""The native kernels; see executor.py for what the numbers mean."""

from typing import Any

class Plan:
    """The numbers of one layer and direction, laid out for the kernels."""

    def __init__(self, numbers: dict[str, Any]) -> None: ...
    @property
    def narrow(self) -> bool: ...
    @property
    def float32(self) -> bool: ...

def variants(only_runnable: bool = True) -> list[str]: ...
def quantize(
    variant: str,
    scale: float,
    zero_point: int,
    lo: int,
    hi: int,
    container: str,
    count: int,
    x: int,
    codes: int,
) -> bool: ...
def dequantize(
    variant: str,
    scale: float,
    zero_point: int,
    lo: int,
    hi: int,
    container: str,
    count: int,
    codes: int,
    x: int,
) -> None: ...
def run(
    plan: Plan,
    variant: str,
    x: int,
    h0: int,
    out: int,
    last: int,
    T: int,
    N: int,
    lengths: int,
    reverse: bool,
    threads: int,
) -> None: ...
