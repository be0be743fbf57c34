import doctest
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from config_examples import COMPLETE, CONCISE, MIXED

import quant_gru
from quant_gru.config import OPERATORS, QuantConfig, operators, schema, settings
from quant_gru.config.operators import OLDER_NAMES
from quant_gru.config.schema import file_json_schema

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FILES = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets_run(snippet, tmp_path, monkeypatch):
    if "QuantGRU" in snippet and not hasattr(quant_gru, "QuantGRU"):
        pytest.skip("there is no QuantGRU")
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "configuration.md", "exec"), {})


@pytest.mark.parametrize("data", FILES, ids=range(len(FILES)))
def test_files_are_valid(data):
    QuantConfig.from_dict(data)
    jsonschema.validate(data, file_json_schema())


def test_page_is_complete():
    for example in (COMPLETE, CONCISE, MIXED):
        assert example in FILES
    for name in (*OPERATORS, *OLDER_NAMES, *QuantConfig.model_fields):
        assert f"`{name}`" in PAGE or f".{name}`" in PAGE, name


@pytest.mark.parametrize("title", re.findall(r"\]\(#([\w-]+)\)", PAGE))
def test_links_lead_somewhere(title):
    headings = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    assert title in {heading.lower().replace(" ", "-") for heading in headings}


def test_error_examples_are_real():
    data = {
        "GRU_config": {
            "default_config": {"segments": 16},
            "operator_config": {
                "gate.z_out": {"bitwidth": 64},
                "input.x": {"is_symetric": True},
                "weight.W": {"is_symmetric": False},
            },
        }
    }
    with pytest.raises(ValueError, match="Expected") as caught:
        QuantConfig.from_dict(data)
    for line in str(caught.value).splitlines():
        assert line.removesuffix(")") in PAGE


@pytest.mark.parametrize(
    "module", [operators, settings, schema], ids=lambda module: module.__name__
)
def test_docstring_examples_run(module):
    names = vars(module)
    finder = doctest.DocTestFinder(exclude_empty=True)
    failures = [
        doctest.DocTestRunner().run(test).failed for test in finder.find(module, globs=names)
    ]
    assert sum(failures) == 0


def test_schema_is_printed():
    ran = subprocess.run(
        [sys.executable, "-m", "quant_gru.config"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(schema.__file__).parents[2])},
    )
    assert "RuntimeWarning" not in ran.stderr
    assert json.loads(ran.stdout) == file_json_schema()
