"""A QuantGRU inside of a compressed model: it keeps one byte per unit by itself."""

import torch
from actnn_models import compressed_copy, gradients
from torch import nn

from quant_gru import QuantGRU, calibrate_model


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = QuantGRU(12, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.gru(x)[0])


def test_gradients_stay_those_of_the_integer_gru():
    model, x = Tagger(), torch.randn(20, 3, 12)
    calibrate_model(model, [x])
    model.train()
    exact = gradients(model, x)
    same, rounded = (gradients(compressed_copy(model, bits=bits), x) for bits in (32, 8))
    assert all(torch.equal(a, b) for a, b in zip(exact, same, strict=True))
    for a, b in zip(exact, rounded, strict=True):
        assert (a - b).norm() <= 0.05 * a.norm()
