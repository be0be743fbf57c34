import pytest
import torch

from quant_gru.execution.sequence_layout import packing_on


@pytest.fixture(params=["table", "attributes"])
def looks(request, monkeypatch):
    """Native code looks at tensors through torch's table of functions, or without it."""
    if request.param == "attributes":
        monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__", raising=False)
    packing_on.cache_clear()
    yield
    packing_on.cache_clear()
