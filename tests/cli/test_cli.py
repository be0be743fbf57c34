import ast
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import quant_gru
from quant_gru.cli import app, facts
from quant_gru.cli.app import Preset
from quant_gru.cli.messages import one_line_messages
from quant_gru.config import QuantConfig, default_config_path
from quant_gru.kernels.cpu import executor
from quant_gru.kernels.cuda.machine import SOURCES
from quant_gru.kernels.dispatch import executor_name

COMMANDS = (
    "demo",
    "info",
    "config",
    "check",
    "diff",
    "quantize",
    "export",
    "inspect",
    "verify",
    "report",
    "tune",
    "bench",
    "cache",
)


def run(*arguments: object, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env=env)


def assert_one_line_error(result: Result, *parts: str) -> None:
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: Expected ")
    assert result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


def test_help_names_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert command in result.stdout
    assert "Exit codes: 0 success" in result.stdout
    assert run("-h").stdout == result.stdout
    for command in COMMANDS:
        assert run(command, "-h").stdout == run(command, "--help").stdout


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"quant-gru {quant_gru.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "imported"),
    [
        (["--help"], set()),
        (["--version"], set()),
        (["check", "-o", str(default_config_path())], {"pydantic"}),
        (["cache"], {"pydantic"}),
        (["export", "missing.safetensors", "--to", "c"], {"pydantic"}),
        (["verify", "missing.safetensors", "--against", "c"], {"pydantic"}),
    ],
    ids=["help", "version", "check", "cache", "export", "verify"],
)
def test_imports_of_light_commands(arguments: list[str], imported: set[str]) -> None:
    heavy = "{'torch', 'numpy', 'pydantic', 'rich'}"
    code = f"""
import sys
from quant_gru.cli import app
try:
    app({arguments!r})
finally:
    print(*{heavy} & {{*sys.modules}})
"""
    source = str(Path(quant_gru.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": source},
        check=False,
    )
    assert set(result.stdout.splitlines()[-1].split()) == imported


def test_help_is_not_cut_at_80_columns() -> None:
    shown = run("--help", env={"COLUMNS": "80"}).stdout
    assert not [line for line in shown.splitlines()[1:] if line.endswith("...")]


@pytest.mark.parametrize(
    ("shell", "variables"),
    [
        ("bash", {"COMP_WORDS": "quant-gru config --preset int", "COMP_CWORD": "3"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "quant-gru config --preset int"}),
        (
            "fish",
            {
                "_TYPER_COMPLETE_ARGS": "quant-gru config --preset int",
                "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            },
        ),
    ],
)
def test_completion(shell: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**variables, "_QUANT_GRU_COMPLETE": f"complete_{shell}"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, prog_name="quant-gru")
    for preset in ("int8", "int8_wide", "int16"):
        assert preset in result.stdout
    assert "w8a16" not in result.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_QUANT_GRU_COMPLETE", f"source_{shell}")
    result = CliRunner().invoke(app, prog_name="quant-gru")
    assert result.exit_code == 0
    assert f"_QUANT_GRU_COMPLETE=complete_{shell}" in result.stdout


def test_warnings_are_one_clean_line(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with one_line_messages():
            warnings.warn("slow:\n  no compiler", quant_gru.QuantGRUWarning, stacklevel=1)
        shown = warnings.showwarning
    assert capsys.readouterr().err == "Warning: slow: no compiler\n"
    assert warnings.showwarning is shown


def test_python_m_quant_gru() -> None:
    source = str(Path(__file__).parents[2] / "src")
    result = subprocess.run(
        [sys.executable, "-m", "quant_gru", "config"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": source},
        check=True,
    )
    assert Path(result.stdout.strip()).samefile(default_config_path())


def test_info() -> None:
    result = run("info")
    assert result.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["quant-gru"] == quant_gru.__version__
    assert list(lines) == ["quant-gru", "python", "torch", "threads", "executor", "choices", "gpu"]
    assert lines["torch"] == torch.__version__
    assert lines["executor"] == executor_name()


def test_info_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant_gru.cli.facts.left_out", lambda: ["avx-vnni", "amx-int8"])
    found = json.loads(run("info", "--json").stdout)
    assert found["quant_gru"] == quant_gru.__version__
    assert found["executor"] == executor_name()
    assert found["choices"][-1] == "reference"
    assert found["left_out"] == ["avx-vnni", "amx-int8"]
    assert set(found["gpu"]) == {"name", "architecture", "executor", "reason"}


def test_info_names_instruction_sets_that_the_build_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not {*executor.left_out()} & {*executor.choices()}
    monkeypatch.setattr("quant_gru.cli.facts.left_out", lambda: ["avx-vnni", "amx-int8"])
    assert "\nleft out  avx-vnni, amx-int8 (" in run("info").stdout
    monkeypatch.setattr(executor, "left_out", lambda: ["amx-int7"])
    monkeypatch.setenv("QUANT_GRU_CPU", "amx-int7")
    result = run("info")
    assert result.exit_code == 2
    assert "got 'amx-int7', which the compiler of this build did not know" in result.stderr


def test_the_gpu_in_words() -> None:
    gpu = {"name": "H", "architecture": "sm_90", "executor": "cuda", "reason": None}
    assert facts._gpu_text(gpu) == "H, cuda"
    assert facts._gpu_text(gpu | {"reason": "too old"}) == "H (sm_90), cuda: too old"
    assert facts._gpu_text(gpu | {"name": None, "reason": "no device"}) == "none: no device"


@pytest.mark.parametrize("preset", list(Preset))
def test_presets(preset: Preset, tmp_path: Path) -> None:
    expected = getattr(QuantConfig, preset.value)()
    result = run("config", "--preset", preset.value)
    assert QuantConfig.from_dict(json.loads(result.stdout)) == expected
    target = tmp_path / "my.json"
    assert run("config", "--preset", preset.value, "--write", target).exit_code == 0
    assert QuantConfig.from_json(target) == expected
    assert_one_line_error(run("config", "--preset", preset.value, "--write", target), "exists")
    nowhere = tmp_path / "none" / "a.json"
    assert_one_line_error(run("config", "--preset", preset.value, "--write", nowhere), "none")


def test_an_unknown_preset() -> None:
    result = run("config", "--preset", "int9")
    assert result.exit_code == 2
    assert "'int9'" in result.stderr
    assert "int8_wide" in result.stderr


def test_config_writes_a_copy_once(tmp_path: Path) -> None:
    target = tmp_path / "my.json"
    assert run("config", "--write", target).exit_code == 0
    assert QuantConfig.from_json(target) == QuantConfig.from_json(default_config_path())

    target.write_text("mine")
    assert_one_line_error(run("config", "--write", target), "which exists")
    assert target.read_text() == "mine"
    assert run("config", "--write", target, "--force").exit_code == 0
    assert target.read_text() != "mine"
    assert_one_line_error(run("config", "--write", tmp_path / "none" / "my.json"), "No such file")


def test_check_configuration(tmp_path: Path) -> None:
    path = tmp_path / "mixed.json"
    QuantConfig.w8a16().replace_globals(scale_kind="free").to_json(path)
    result = run("check", path)
    assert result.exit_code == 0
    assert "bit-width configuration, 8 and 16 bits, free scales" in result.stdout


def test_check_says_which_defaults_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "short.json"
    path.write_text(json.dumps({"GRU_config": {"operator_config": {}}}))
    result = run("check", path)
    assert result.exit_code == 0
    assert "defaults" in result.stdout


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("not json", "JSON"),
        ('{"GRU_config": {"operator_config": {"gate.z": {}}}}', "gate.z"),
        ('{"GRU_config": {"operator_config": {"gate.z_out": {"bitwidth": 40}}}}', "40"),
        ('{"something": "else"}', "something"),
        ("[1, 2]", ""),
        ("{}", ""),
    ],
)
def test_check_finds_the_mistake(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    assert_one_line_error(run("check", path), part, "wrong.json")


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="needs /dev/fd")
def test_check_what_comes_through_a_pipe(tmp_path: Path) -> None:
    text = json.dumps(QuantConfig.int8().to_dict()).encode()
    for data, part in ((text, "bit-width configuration, 8 bits"), (b"{}", "no key")):
        reading, writing = os.pipe()
        os.write(writing, data)
        os.close(writing)
        result = run("check", f"/dev/fd/{reading}")
        os.close(reading)
        assert part in result.output


def test_check_missing_file(tmp_path: Path) -> None:
    assert_one_line_error(run("check", tmp_path / "none.json"), "none.json")


def test_demo_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.npz").write_text("hello")
    assert_one_line_error(run("demo", "--data", "text.npz"), "--data", "text.npz")
    assert_one_line_error(run("demo", "--data", "none.npz"), "No such file")
    np.savez(tmp_path / "keys.npz", samples=np.zeros(3, np.int16))
    assert_one_line_error(run("demo", "--data", "keys.npz"), "offsets")
    assert_one_line_error(run("demo", "--output", "text.npz"), "--output", "text.npz")

    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert_one_line_error(run("demo"), "pip install scikit-learn")
    assert not (tmp_path / "demo_output").exists()


@pytest.mark.parametrize("option", ["--epochs", "--hidden-size"])
def test_demo_numbers_out_of_range(option: str) -> None:
    result = run("demo", option, "0")
    assert result.exit_code == 2
    assert option in result.stderr


def test_demo_runs(tmp_path: Path) -> None:
    result = run("demo", "--epochs", 1, "--hidden-size", 8, "--seed", 5, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert "GRU(8, 8), Linear(8, 10), seed 5" in result.stdout
    assert (tmp_path / "classifier_int8.pt").exists()
    assert (tmp_path / "gru_int8.json").exists()


def test_cache_is_shown_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANT_GRU_CACHE", str(tmp_path / "kernels"))
    assert run("cache").stdout == f"{tmp_path / 'kernels'}: 0 files, 0 KiB\n"
    SOURCES.cache.store("a" * 64, b"x" * 2016)
    assert run("cache").stdout.endswith(": 1 file, 2 KiB\n")
    (tmp_path / "kernels" / "notes.txt").write_text("mine")
    result = run("cache", "--clear")
    assert result.exit_code == 0
    assert result.stdout == f"Removed 1 file from {tmp_path / 'kernels'}\n"
    assert [path.name for path in (tmp_path / "kernels").iterdir()] == ["notes.txt"]


def test_the_cache_lies_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUANT_GRU_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run("cache").stdout == f"{tmp_path / 'quant-gru'}: 0 files, 0 KiB\n"


def test_what_the_cache_cannot_do_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANT_GRU_CACHE", str(tmp_path))
    SOURCES.cache.store("a" * 64, b"x")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name, arguments in (("unlink", ["--clear"]), ("iterdir", [])):
        with monkeypatch.context() as patched:
            patched.setattr(Path, name, denied)
            result = run("cache", *arguments)
        assert result.exit_code == 2
        assert str(tmp_path) in result.output
        assert result.output.endswith(": Permission denied\n")
        assert result.output.count("\n") == 1


def test_check_parameter_file(tmp_path: Path) -> None:
    gru = quant_gru_of_size(3, 4)
    path = tmp_path / "parameters.json"
    gru.export_quant_params(path)
    result = run("check", path)
    assert result.exit_code == 0
    assert "parameter file of a GRU(3, 4, num_layers=1, bias=True" in result.stdout

    document = json.loads(path.read_text())
    document["surprise"] = 1
    path.write_text(json.dumps(document))
    assert_one_line_error(run("check", path), "surprise")


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("hidden_size", 10**30, "2147483647"),
        ("input_size", 2**31, "2147483647"),
        ("num_layers", 10**30, "2147483647"),
        ("num_layers", 2**31 - 1, "Expected 2147483647 cells (num_layers=2147483647"),
        ("bidirectional", True, "Expected 2 cells (num_layers=1, bidirectional=True), got 1"),
    ],
)
def test_check_sizes_that_cannot_be(tmp_path: Path, key: str, value: int, part: str) -> None:
    """They are told at once: nothing as large is made of them."""
    path = tmp_path / "parameters.json"
    quant_gru_of_size(3, 4).export_quant_params(path)
    document = json.loads(path.read_text())
    document["gru"][key] = value
    path.write_text(json.dumps(document))
    assert_one_line_error(run("check", path), part, "parameters.json")


def quant_gru_of_size(n_features: int, hidden_size: int) -> quant_gru.QuantGRU:
    torch.manual_seed(0)
    gru = quant_gru.QuantGRU(n_features, hidden_size)
    gru.calibrate(torch.randn(5, 2, n_features))
    gru.finalize_calibration()
    return gru


def test_options_are_named() -> None:
    """Some versions of typer take the name of an option from its metavar."""
    unnamed = []
    for path in Path(quant_gru.cli.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "typer.Option":
                name = node.args[0] if node.args else None
                if not (isinstance(name, ast.Constant) and str(name.value).startswith("--")):
                    unnamed.append(f"{path.name}:{node.lineno}")
    assert not unnamed
