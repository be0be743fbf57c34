"""Which class goes in front of which module of torch.nn."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from actnn.layers.batch_norms import BatchNorm
from actnn.layers.convolution import Convolution
from actnn.layers.derivatives import RULES, Smooth
from actnn.layers.dropout import SeededDropout
from actnn.layers.gru import RecomputedGRU
from actnn.layers.normalization import Normalization, Recognized, may_be_norm
from actnn.layers.parametrized import ComputedWeight
from actnn.layers.pooling import AveragePool, MaxPool
from actnn.layers.rectifiers import Rectifier
from actnn.saving.module_classes import Swapped, runs

MIXINS: dict[type[nn.Module], type[Swapped]] = {
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.LeakyReLU), Rectifier),
    **dict.fromkeys(RULES, Smooth),
    nn.Dropout: SeededDropout,
    nn.Conv2d: Convolution,
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), Normalization),
    nn.GRU: RecomputedGRU,
    ParametrizationList: ComputedWeight,
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), MaxPool),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), AveragePool),
    **dict.fromkeys(
        (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), AveragePool
    ),
}


def mixin_for(module: nn.Module) -> type[Swapped] | None:
    """Return the class for a module; None if the generic codes fit it."""
    if is_parametrized(module):  # each look at a parameter computes it again
        return None
    for original, mixin in MIXINS.items():
        if runs(module, original):
            return mixin
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(
        module, nn.SyncBatchNorm
    ):
        return BatchNorm
    return Recognized if may_be_norm(module) else None
