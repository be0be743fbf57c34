"""The usual quantization-aware GRU, to compare with: a loop over time with fake quantization."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quant_gru.config import ACTIVATIONS


class FakeQuantGRU(nn.GRU):
    """One layer, one direction: float operators, each rounded by `fake_quantize_*`.

    Every operator is a tensor of its own in autograd's graph, at every step. Scales are fixed and
    plausible; only cost is measured here.
    """

    scales = dict.fromkeys(ACTIVATIONS, 2.0**-5) | dict.fromkeys(
        ("gate.z_out", "gate.r_out", "gate.g_out", "output.h"), 2.0**-7
    )

    def fake(self, name: str, value: Tensor) -> Tensor:
        """`value`, rounded and clamped to 8 bits."""
        return torch.fake_quantize_per_tensor_affine(value, self.scales[name], 0, -128, 127)

    def weight(self, value: Tensor) -> Tensor:
        """`value` (3H, ..), rounded to 8 bits with one scale per row."""
        rows = value.flatten(1) if value.dim() > 1 else value[:, None]
        scale = rows.detach().abs().amax(1).clamp(min=1e-8) / 127
        zero = torch.zeros(len(scale), dtype=torch.int32, device=value.device)
        return torch.fake_quantize_per_channel_affine(value, scale, zero, 0, -128, 127)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Output (T, N, H) and last state (1, N, H) of inputs (T, N, C)."""
        W, R, bw, br = (self.weight(parameter) for parameter in self.parameters())
        fake = self.fake
        Wx = fake("matmul.Wx", nn.functional.linear(fake("input.x", input), W, bw))
        h = input.new_zeros(input.shape[1], self.hidden_size)
        outputs = []
        for x_r, x_z, x_g in (step.chunk(3, -1) for step in Wx):
            h_r, h_z, h_g = fake("matmul.Rh", nn.functional.linear(h, R, br)).chunk(3, -1)
            z = fake("gate.z_out", torch.sigmoid(fake("gate.z_pre", x_z + h_z)))
            r = fake("gate.r_out", torch.sigmoid(fake("gate.r_pre", x_r + h_r)))
            g = fake("gate.g_out", torch.tanh(fake("gate.g_pre", x_g + fake("op.rRh", r * h_g))))
            old, new = fake("op.old_contrib", z * h), fake("op.new_contrib", (1 - z) * g)
            h = fake("output.h", old + new)
            outputs.append(h)
        return torch.stack(outputs), h[None]
