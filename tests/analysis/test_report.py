"""The page of a quantized model: one file, complete, and with the figures that functions return."""

import html.parser
import json
import math
import re

import pytest
import torch

from quant_gru import (
    CalibrationError,
    ConfigError,
    QuantConfig,
    QuantGRUError,
    calibrate_model,
    convert_model,
    operator_sqnr,
    report,
)
from quant_gru.analysis.shares import shares
from quant_gru.config import OPERATORS, WEIGHTS
from quant_gru.whole_models.convert import find_grus

DATA = torch.randn(30, 4, 5, generator=torch.Generator().manual_seed(1)).cumsum(0) / 4


def quantized(config="int8", **options):
    torch.manual_seed(0)
    model = convert_model(torch.nn.GRU(5, 6, **options), config)
    return calibrate_model(model, [DATA], progress=False)


class Page(html.parser.HTMLParser):
    """Names, links and nesting of a page."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.sources = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if "href" in given else []
        self.sources += [given[key] for key in ("src", "srcset", "xlink:href") if key in given]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    model = quantized(num_layers=2, bidirectional=True)
    return report(model, DATA, path, progress=False), path.read_text(encoding="utf-8"), model


def test_the_page_is_one_file(made):
    _, text, _ = made
    page = Page(text)
    assert not page.sources
    assert all(link.startswith("#") or link == "data:," for link in page.links)
    assert "url(" not in text
    assert "@import" not in text
    assert set(re.findall(r"https?://[^\"' <]+", text)) == {"http://www.w3.org/2000/svg"}


def test_every_link_leads_to_an_operator_once(made):
    found, text, _ = made
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    targets = {link[1:] for link in page.links if link.startswith("#")}
    assert targets <= set(page.ids)
    assert len(found.rows) == 4 * len(OPERATORS)
    for row in found.rows:
        anchor = "".join(c if c.isalnum() else "-" for c in str(row.place))
        assert page.links.count(f"#{anchor}") == 2  # the table and the picture
        assert anchor in page.ids


def test_the_figures_are_those_of_other_functions(made):
    found, _, model = made
    own = operator_sqnr(model, DATA)
    for row in found.rows:
        assert row.sqnr == pytest.approx(own[str(row.place)], abs=1e-5)
        assert row.bits == 8
        assert (row.clipped is None) == (row.place.operator in WEIGHTS)
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    assert [row.share for row in found.rows] == sorted((r.share for r in found.rows), reverse=True)
    with torch.no_grad():
        pairs = list(zip(torch.nn.GRU.forward(model, DATA), model(DATA), strict=True))
    signal = sum(float(a.double().square().sum()) for a, _ in pairs)
    noise = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    assert found.sqnr == pytest.approx(10 * math.log10(signal / noise), abs=1e-5)


def test_shares_add_up_to_the_error():
    model = quantized()
    found = shares(model, find_grus(model), None, [DATA], None, False)
    total = sum(found.noises.values())
    assert abs(10 * math.log10(total / found.noise)) < 1


def test_a_share_is_that_of_the_only_narrow_operator():
    model = quantized("int16")
    model.adjust_quant_config("op.old_contrib", bitwidth=5)
    found = shares(model, find_grus(model), None, [DATA], None, False)
    assert max(found.share, key=found.share.get).operator == "op.old_contrib"
    assert max(found.share.values()) > 0.99
    assert found.noises[max(found.share, key=found.share.get)] == pytest.approx(
        found.noise, rel=0.05
    )


def test_codes_and_clipped_values(tmp_path):
    model = quantized()
    model.adjust_quant_config("input.x", scale=2.0**-8, zero_point=0)
    found = report(model, DATA, tmp_path / "page.html", progress=False)
    row = next(row for row in found.rows if row.place.operator == "input.x")
    real = DATA.double()
    beyond = (real < 2.0**-8 * -129) | (real > 2.0**-8 * 128)
    assert row.clipped == pytest.approx(float(beyond.double().mean()), abs=1e-12)
    codes = len((real / 2.0**-8).round().clamp(-128, 127).unique())
    assert row.codes == f"{codes} of 256"
    assert "clips" in row.remark or row.remark == ""


def test_a_reference_is_what_outputs_are_compared_with(tmp_path):
    model = quantized("int16")
    torch.manual_seed(1)
    other = torch.nn.GRU(5, 6)
    found = report(model, DATA, tmp_path / "page.html", other, progress=False)
    assert found.sqnr < 10 < report(model, DATA, tmp_path / "page.html", progress=False).sqnr
    with pytest.raises(QuantGRUError, match="Expected the reference to give outputs"):
        report(model, DATA, tmp_path / "page.html", torch.nn.GRU(5, 7), progress=False)


def test_a_model_of_cells_and_names_that_need_escaping(tmp_path):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.grus = torch.nn.ModuleDict({"a<b>": torch.nn.GRU(5, 6)})
            self.cell = torch.nn.GRUCell(6, 4)
            self.unused = torch.nn.GRU(3, 3)

        def forward(self, x):
            h = None
            for y in self.grus["a<b>"](x)[0]:
                h = self.cell(y, h)
            return h

    with pytest.warns(UserWarning, match="forward never reached 'unused'"):
        model = calibrate_model(convert_model(Model(), "int8_wide"), [DATA], progress=False)
    found = report(model, DATA, tmp_path / "page.html", progress=False)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "a<b>" not in text
    Page(text)
    assert {row.place.module for row in found.rows} == {"grus.a<b>", "cell"}
    assert not any(row.place.operator.startswith("op.") for row in found.rows)  # fused
    assert text.count("not rounded") == 2 * 3


def test_the_model_does_not_change(tmp_path):
    model = quantized().train()
    model.learn_scales = True
    model.use_quantization = False
    state, document = model._state, model._state.document()
    report(model, DATA, tmp_path / "page.html", progress=False)
    assert model._state is state
    assert model._state.document() == document
    assert model.training
    assert model.learn_scales
    assert not model.use_quantization


def test_sizes_and_configuration_are_on_the_page(made):
    found, text, _ = made
    assert f"{found.sizes.flash:,} B" in text
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text
    assert "GRU_config" in text
    document = json.loads(found.to_json())
    assert document["sizes"]["flash"] == found.sizes.flash
    assert len(document["operators"]) == len(found.rows)
    assert str(found).count("\n") == 1 + len(found.rows)
    assert found._repr_html_().count("<tr>") == 1 + len(found.rows)


def test_errors(tmp_path):
    with pytest.raises(CalibrationError, match="Expected a model with a calibrated QuantGRU"):
        report(torch.nn.GRU(5, 6), DATA, tmp_path / "page.html")
    with pytest.raises(CalibrationError, match="Expected at least one batch"):
        report(quantized(), [], tmp_path / "page.html")
    with pytest.raises(ConfigError, match="Expected a file in a folder that exists"):
        report(quantized(), DATA, tmp_path / "nowhere" / "page.html", progress=False)


def test_wide_and_free_scales(tmp_path):
    config = QuantConfig.uniform(18, is_symmetric=False).replace_globals(scale_kind="free")
    found = report(quantized(config), DATA, tmp_path / "page.html", progress=False)
    assert found.sqnr > 70
