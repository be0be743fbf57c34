"""Examples in docstrings of public names run, with warnings as errors."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import quant_gru
from quant_gru import QuantGRU, calibrate_model, convert_model, export_onnx


class Model(torch.nn.Module):
    """The model of the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.ModuleDict({"gru": torch.nn.GRU(8, 16, batch_first=True)})
        self.head = torch.nn.ModuleDict({"gru": torch.nn.GRU(16, 4, batch_first=True)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head["gru"](self.encoder["gru"](x)[0])[0]


def examples() -> Iterator[doctest.DocTest]:
    """Yield the example of each public name, and of each public method of ours."""
    found: dict[str, Any] = {name: getattr(quant_gru, name) for name in quant_gru.__all__}
    for name, value in list(found.items()):
        if inspect.isclass(value):
            for key, method in inspect.getmembers(value, callable):
                module = getattr(method, "__module__", None) or ""
                if not key.startswith("_") and module.startswith("quant_gru"):
                    found[f"{name}.{key}"] = method
    seen = set()
    for name, value in found.items():
        text = inspect.getdoc(value) if callable(value) else None
        if text and ">>>" in text and text not in seen:
            seen.add(text)
            yield doctest.DocTestParser().get_doctest(text, {}, name, None, 0)


EXAMPLES = {each.name: each for each in examples()}


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the examples take for granted, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    batches = list(torch.randn(3, 4, 9, 8))
    model = Model().eval()
    quantized = calibrate_model(convert_model(model, "int8_wide"), batches)
    return {
        "torch": torch,
        **{name: getattr(quant_gru, name) for name in quant_gru.__all__},
        **{"Model": Model, "batches": batches, "model": model, "quantized": quantized},
        **dict.fromkeys(("gru", "encoder", "decoder"), quantized.encoder["gru"]),
        "x": batches[0],
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str, names: dict[str, Any]) -> None:
    gru = QuantGRU(8, 16)
    if name == "QuantGRU.from_keras":
        W, R = gru.weight_ih_l0.detach().numpy().T, gru.weight_hh_l0.detach().numpy().T
        layer = SimpleNamespace(get_weights=lambda: [W, R])
        names["model"] = SimpleNamespace(get_layer=lambda _: layer)
    if name in ("QuantGRU.from_onnx", "QuantGRU.export_encodings"):
        onnx = pytest.importorskip("onnx")
        for file in ("denoiser.onnx", "model.onnx"):
            export_onnx(names["gru"], torch.zeros(1, 3, 8), file, profile="float")
            loaded = onnx.load(file)
            node = next(each for each in loaded.graph.node if each.op_type == "GRU")
            node.name = "/encoder/GRU"
            onnx.save(loaded, file)
    said: list[str] = []
    runner = doctest.DocTestRunner()
    runner.run(doctest.DocTest(EXAMPLES[name].examples, names, name, None, 0, None), said.append)
    assert not said, "\n".join(said)


def test_most_public_names_have_an_example() -> None:
    assert {"QuantGRU", "calibrate_model", "convert_model", "freeze_model"} < set(EXAMPLES)
