"""Figures of results: what they show, and files of them."""

import math
import sys

import pytest
import torch

from quant_gru import QuantGRUError, allocate_bits, calibrate_model, convert_model
from quant_gru import report as write_report
from quant_gru import sensitivity as measure

DATA = torch.randn(20, 4, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def gru():
    torch.manual_seed(0)
    return torch.nn.GRU(3, 4)


@pytest.fixture(scope="module")
def sensitivity(gru):
    return measure(gru, DATA, widths=(4, 16), progress=False)


@pytest.fixture
def axes_of():
    pytest.importorskip("matplotlib")
    return lambda result, *path: result.plot(*path).axes[0]


def test_the_front_is_drawn_over_the_bytes_of_the_budget(gru, axes_of):
    for kind in ("flash", "packed"):
        found = allocate_bits(gru, DATA, {kind: 5000}, {"weight.*": (3, 8), "*": (8,)})
        axes = axes_of(found)
        predicted, measured, chosen = axes.get_lines()
        sizes = [getattr(point.sizes, kind) for point in found.front]
        assert list(predicted.get_xdata()) == sizes
        assert list(predicted.get_ydata()) == [point.predicted for point in found.front]
        assert list(measured.get_ydata()) == [point.measured for point in found.front]
        assert list(chosen.get_xdata()) == [getattr(found.chosen.sizes, kind)]
        assert [text.get_text() for text in axes.get_legend().get_texts()] == [
            "predicted",
            "measured",
            "chosen",
        ]


def test_sensitivity_is_a_heat_map(sensitivity, axes_of):
    axes = axes_of(sensitivity)
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == list(dict.fromkeys(str(cost.place) for cost in sensitivity.costs))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4 bits", "16 bits"]
    shown = [text.get_text() for text in axes.texts]
    assert shown == [
        f"{cost.sqnr:.1f}" if math.isfinite(cost.sqnr) else "equal" for cost in sensitivity.costs
    ]


def test_shares_are_bars(gru, axes_of, tmp_path):
    quantized = calibrate_model(convert_model(gru, "int8"), [DATA], progress=False)
    found = write_report(quantized, DATA, tmp_path / "page.html", progress=False)
    axes = axes_of(found)
    assert [bar.get_width() for bar in axes.patches] == [100 * row.share for row in found.rows]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        str(row.place) for row in found.rows
    ]


@pytest.mark.parametrize("suffix", ["pdf", "svg", "png"])
def test_a_file_has_the_format_of_its_suffix(sensitivity, axes_of, tmp_path, suffix):
    axes_of(sensitivity, tmp_path / f"figure.{suffix}")
    begin = (tmp_path / f"figure.{suffix}").read_bytes()[:64]
    assert {"pdf": b"%PDF", "svg": b"<?xml", "png": b"\x89PNG"}[suffix] in begin


@pytest.mark.parametrize("name", ["figure.xyz", "folder/figure.png"])
def test_a_file_that_cannot_be_written(sensitivity, axes_of, tmp_path, name):
    with pytest.raises(QuantGRUError, match="Expected a file that can be written, got"):
        axes_of(sensitivity, tmp_path / name)


def test_matplotlib_is_an_extra(sensitivity, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(QuantGRUError, match=r"run pip install quant-gru\[viz\]"):
        sensitivity.plot()
