"""The snippets of the CustomGRU document, on the CPU."""

import pytest
import torch
import torch.nn as nn

import quant_gru
from custom_gru import CustomGRU


class GRUNet(nn.Module):
    def __init__(self, input_size, hidden_size, num_classes):
        super().__init__()
        self.gru = CustomGRU(
            input_size=input_size,
            hidden_size=hidden_size,
            batch_first=True,
            use_quantization=False,
        )
        self.fc = nn.Linear(hidden_size, num_classes)

    def forward(self, x):
        out, _ = self.gru(x)
        out = out[:, -1, :]
        return self.fc(out)


def labelled_batches(count, input_size, steps=6):
    """Sequences whose label says which of two features carries the mean."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        y = torch.randint(0, 10, (16,), generator=generator) % 2
        x = 0.1 * torch.randn(16, steps, input_size, generator=generator)
        x[torch.arange(16), :, y] += 1.0
        yield x, y


@pytest.mark.parametrize("quant_type", ["int8", "int16"])
def test_quantized_model(quant_type):
    calibration_data = torch.randn(4, 100, 128)
    gru = CustomGRU(
        input_size=128,
        hidden_size=256,
        batch_first=True,
        use_quantization=True,
        quant_type=quant_type,
        calibration_data=calibration_data,
    )
    x = torch.randn(4, 100, 128)
    output, h_n = gru(x)
    assert output.shape == (4, 100, 256)
    assert h_n.shape == (1, 4, 256)
    assert gru.is_calibrated()
    gru.use_quantization = False
    real = gru(x)[0]
    assert not torch.equal(output, real)
    similarity = torch.cosine_similarity(output.flatten(), real.flatten(), dim=0)
    assert similarity > {"int8": 0.999, "int16": 0.999999}[quant_type]


def test_training_example():
    train_loader = list(labelled_batches(6, input_size=128))
    model = GRUNet(input_size=128, hidden_size=256, num_classes=10)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _epoch in range(10):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            output = model(x)
            loss = criterion(output, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_quantized_inference_loads_a_float_gru_after_construction():
    def train_float_model():
        torch.manual_seed(3)
        model = nn.GRU(128, 256, batch_first=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        return model

    def get_calibration_samples():
        return torch.randn(4, 20, 128)

    test_input = torch.randn(2, 20, 128)

    model = train_float_model()
    calibration_data = get_calibration_samples()
    quant_model = CustomGRU(
        input_size=128,
        hidden_size=256,
        batch_first=True,
        use_quantization=True,
        quant_type="int8",
        calibration_data=calibration_data,
    )
    quant_model.load_state_dict(model.state_dict())
    quant_model.eval()
    with torch.no_grad():
        output, h_n = quant_model(test_input)

    # calibrated with the weights that were loaded, not with those of the construction
    expected = quant_gru.QuantGRU(128, 256, batch_first=True, config=quant_gru.QuantConfig.int8())
    expected.load_state_dict(model.state_dict())
    expected.calibrate(calibration_data)
    expected.finalize_calibration()
    expected.use_quantization = True
    with torch.no_grad():
        assert torch.equal(output, expected(test_input)[0])
        real = model(test_input)[0]
    assert torch.cosine_similarity(output.flatten(), real.flatten(), dim=0) > 0.99
    assert torch.equal(h_n[0], output[:, -1])


def test_faq_gradients_of_the_quantized_model_are_there():
    gru = CustomGRU(
        8,
        16,
        batch_first=True,
        use_quantization=True,
        quant_type="int16",
        calibration_data=torch.randn(4, 5, 8),
    )
    gru.train()
    x = torch.randn(4, 5, 8, requires_grad=True)
    gru(x)[0].square().sum().backward()
    for tensor in (x, *gru.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.abs().sum() > 0


def test_parameters_of_the_document_are_accepted_in_its_order():
    data = torch.randn(3, 4, 8)
    gru = CustomGRU(8, 16, 1, True, True, 0.0, False, True, "int16", data)
    assert gru.use_quantization
    assert gru.quant_type == "int16"
    assert gru.calibration_data is data
    assert gru.config == quant_gru.QuantConfig.int16()
