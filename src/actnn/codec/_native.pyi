"""The codec on a CPU. Tensors are given by address."""

def encode(
    x: int,
    data: int,
    params: int,
    bits: int,
    ends: int,
    rows: int,
    m: int,
    group: int,
    capacity: int,
    seed: int,
    step: int,
    tensor: int,
    real: int,
    stochastic: bool,
    threads: int,
    /,
) -> None: ...
def decode(
    x: int,
    data: int,
    params: int,
    bits: int,
    ends: int,
    rows: int,
    m: int,
    group: int,
    capacity: int,
    seed: int,
    step: int,
    tensor: int,
    real: int,
    stochastic: bool,
    threads: int,
    /,
) -> None: ...
def use_only_portable(only: bool, /) -> None: ...
