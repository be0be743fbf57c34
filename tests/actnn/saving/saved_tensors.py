"""What is held of many kinds of tensors: run as a script, without DLPack's table of functions.

Native code reads shapes and addresses of tensors by the table; older versions of PyTorch have none.
"""

import hashlib
import json

import torch
from torch import nn
from torch.nn import functional as F

DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64


def _views(x):
    y = x * 1
    a, b = y.chunk(2, -1)
    return (
        (a * b).sum() + y.t().sin().sum() + y[::2].cos().sum() + y.unflatten(0, (4, -1)).exp().sum()
    )


def _images(x):
    y = x.view(4, 4, 8, 8).to(memory_format=torch.channels_last) * 1
    y = F.relu(F.avg_pool2d(y.sin(), 2)).permute(0, 3, 1, 2)
    return (y * y).sum()


def _others(x):
    index = torch.arange(64) % 8
    scattered = torch.zeros(8, 16, dtype=x.dtype).index_add(0, index, x * 2)
    return (
        scattered.square().sum() + torch.where(x > 0, x * 3, 0).square().sum() + x.std() + x.amax()
    )


def _attention(x):
    q = (x * 1).view(2, 32, 2, 8).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q * 2, q + 1).square().sum()


def everything_held():
    """Return (dtype, function, bits, records, digest of the gradient) for each way of saving."""
    from actnn.saving import Saving

    found = []
    for dtype in DTYPES:
        for function in (_views, _images, _others, _attention):
            for bits in (2, 8, 32):
                torch.manual_seed(0)
                x = torch.randn(64, 16).to(dtype).requires_grad_()
                saving = Saving(bits=bits, min_bytes=0)
                with saving:
                    loss = function(x)
                (gradient,) = torch.autograd.grad(loss, x)
                records = [
                    [r.reason, list(r.shape), str(r.dtype), r.choice.bits, r.held, r.nbytes]
                    for r in saving.records
                ]
                digest = hashlib.sha256(gradient.double().numpy().tobytes()).hexdigest()
                found.append([str(dtype), function.__name__, bits, records, digest])
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        del torch.Tensor.__dlpack_c_exchange_api__
    assert not hasattr(nn.Parameter, "__dlpack_c_exchange_api__")
    print(json.dumps(everything_held()))
