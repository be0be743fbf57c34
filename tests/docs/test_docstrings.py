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

import actnn
import quant_gru
from kept import kept
from quant_gru import QuantConfig, QuantGRU, calibrate_model, convert_model, export_onnx


class Model(torch.nn.Module):
    """The model of the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.ModuleDict({"gru": torch.nn.GRU(8, 16, batch_first=True)})
        self.head = torch.nn.ModuleDict({"gru": torch.nn.GRU(16, 4, batch_first=True)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head["gru"](self.encoder["gru"](x)[0])[0]


PUBLIC: dict[str, Any] = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in (quant_gru, actnn)
    for name in package.__all__
}


def examples() -> Iterator[doctest.DocTest]:
    """Yield the example of each public name, and of each public method of ours."""
    found = dict(PUBLIC)
    for name, value in list(found.items()):
        if inspect.isclass(value):
            for key, method in inspect.getmembers(value, callable):
                module = getattr(method, "__module__", None) or ""
                if not key.startswith("_") and module.startswith(("quant_gru", "actnn")):
                    found[f"{name}.{key}"] = method
    seen = set()
    for name, value in found.items():
        text = inspect.getdoc(value) if callable(value) else None
        if text and ">>>" in text and "+SKIP" not in text and text not in seen:
            seen.add(text)
            yield doctest.DocTestParser().get_doctest(text, {}, name, None, 0)


EXAMPLES = {each.name: each for each in examples()}


@kept
def quantized_model() -> tuple[list[torch.Tensor], Model, Model]:
    """Batches, a model, and the model calibrated with them."""
    batches, model = list(torch.randn(3, 4, 9, 8)), Model().eval()
    return batches, model, calibrate_model(convert_model(model, "int8_wide"), batches)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the examples take for granted, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    batches, model, quantized = quantized_model()
    return {
        "torch": torch,
        **{name.rpartition(".")[2]: value for name, value in PUBLIC.items()},
        **{"Model": Model, "batches": batches, "model": model, "quantized": quantized},
        **dict.fromkeys(("gru", "encoder", "decoder"), quantized.encoder["gru"]),
        "x": batches[0],
        "feeds": [{"input": each.numpy()} for each in batches],
        "images": torch.randn(4, 3, 16, 16),
        "network": torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3),
            torch.nn.BatchNorm2d(32),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 32, 3),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * 12 * 12, 4),
        ),
    }


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch's own exporter
def test_examples(name: str, names: dict[str, Any]) -> None:
    example = EXAMPLES[name].examples
    gru = QuantGRU(8, 16)
    package, _, name = name.rpartition(".")
    own = f"{package.partition('.')[0]}."
    # both packages have a report
    names |= {key.removeprefix(own): each for key, each in PUBLIC.items() if key.startswith(own)}
    if name == "from_keras":
        W, R = gru.weight_ih_l0.detach().numpy().T, gru.weight_hh_l0.detach().numpy().T
        layer = SimpleNamespace(get_weights=lambda: [W, R])
        names["model"] = SimpleNamespace(get_layer=lambda _: layer)
    if name == "export_encodings":
        tied = QuantConfig.int8_wide().replace_globals(tie_x_and_h=True)
        again = calibrate_model(convert_model(names["model"], tied), names["batches"])
        names["gru"] = again.encoder["gru"]
    if name in ("from_onnx", "export_encodings", "quantize_onnx"):
        onnx = pytest.importorskip("onnx")
        for file in ("denoiser.onnx", "model.onnx"):
            export_onnx(names["gru"], file, torch.zeros(1, 3, 8), profile="float")
            loaded = onnx.load(file)
            node = next(each for each in loaded.graph.node if each.op_type == "GRU")
            node.name = "/encoder/GRU"
            onnx.save(loaded, file)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    test = doctest.DocTest(example, names, name, None, 0, None)
    done = runner.run(test, out=said.append)
    assert done.attempted
    assert not done.failed, "".join(said)


# Pages show these; the rest is made by functions, or is a base class.
ELSEWHERE = {
    "quant_gru.quantize_keras",
    *(f"actnn.{name}" for name in "Estimate Plan QBNScheme QScheme Record Report".split()),
    "actnn.TensorInfo",
}


def test_all_public_names_have_an_example() -> None:
    expected = {
        name
        for name, value in PUBLIC.items()
        if callable(value) and not (inspect.isclass(value) and issubclass(value, Exception))
    }
    assert expected - ELSEWHERE <= set(EXAMPLES)
