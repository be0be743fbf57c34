import torch
from quant_gru import QuantConfig, calibrate_model, convert_model, find_grus


class Tagger(torch.nn.Module):  # your model, with an nn.GRU somewhere inside
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = torch.nn.GRU(40, 64, batch_first=True), torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.gru(x)[0])
        return logits


model = Tagger().eval()  # trained elsewhere; its checkpoint fits as it is
batches = [torch.randn(16, 100, 40) for _ in range(4)]  # some real inputs
quantized = convert_model(model, QuantConfig.int8_wide())  # every nn.GRU becomes a QuantGRU
calibrate_model(quantized, batches)  # scales from data; integers from here on
print((quantized(batches[0]) - model(batches[0])).abs().max())
find_grus(quantized)["gru"].freeze().save(
    "gru_int8.safetensors"
)  # codes, multipliers, tables for hardware
