"""SKILL.md and llms.txt: an assistant that follows them succeeds, and finds what they name."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

import actnn
import quant_gru
from quant_gru.cli import app

ROOT = Path(__file__).parents[2]
SKILL = (ROOT / "SKILL.md").read_text(encoding="utf-8")
LLMS = (ROOT / "llms.txt").read_text(encoding="utf-8")


def test_every_block_runs_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "skill"}
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```$", SKILL, re.M | re.S)
    assert [kind for kind, _ in blocks] == ["sh", "python", "python", "python", "sh"]
    for kind, code in blocks:
        if kind == "python":
            exec(compile(code, "SKILL.md", "exec"), namespace)
            continue
        for line in code.splitlines():
            program, *arguments = shlex.split(line)
            assert program == "quant-gru"
            ran = CliRunner().invoke(app, arguments)
            assert ran.exit_code == 0, f"{line}\n{ran.output}"
            assert "verify" not in arguments or "equal (" in ran.output
    assert namespace["result"]
    assert torch.is_tensor(namespace["test"][0])


@pytest.mark.parametrize("text", [SKILL, LLMS], ids=["SKILL.md", "llms.txt"])
def test_what_they_name_exists(text):
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert len(links) > 5
    for target in links:
        assert (ROOT / target).is_file(), target
    for name in re.findall(r"`([a-z_]+)\(", text):
        methods = (quant_gru.QuantGRU, quant_gru.FrozenQuantGRU)
        owners = (quant_gru, actnn, *methods)
        assert any(hasattr(each, name) for each in owners), name


def test_llms_lists_every_page_of_users():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    named = set(re.findall(r"docs/(\w+\.md)", LLMS))
    assert named <= pages
    assert {"quantgru.md", "calibration.md", "configuration.md", "deployment.md"} <= named


def test_the_front_matter_is_that_of_a_skill():
    _, head, _ = SKILL.split("---\n", 2)
    fields = dict(line.split(": ", 1) for line in head.splitlines())
    assert set(fields) == {"name", "description"}
    assert re.fullmatch(r"[a-z-]{1,64}", fields["name"])
    assert len(fields["description"]) <= 1024


def test_forms_and_citation_can_be_read():
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) == 5
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.stem == "config":
            continue
        assert {"name", "description", "labels", "body"} == set(form)
        ids = [each["id"] for each in form["body"] if each["type"] != "markdown"]
        assert len(set(ids)) == len(ids)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(cited["version"]) == quant_gru.__version__
