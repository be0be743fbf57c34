"""`quant-gru check` and `diff` on every kind of file."""

import contextlib
import io
import json
import os
import pickle
import random
from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner, Result

from kept import kept
from quant_gru import QuantConfig, QuantGRU, QuantGRUError
from quant_gru.cli import app, files
from quant_gru.cli.tables import columns, scale_text
from quant_gru.config import OPERATORS, default_config_path


def run(*arguments: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.ModuleDict({"gru": calibrated(3, 4), "plain": torch.nn.GRU(2, 2)})
        self.head = calibrated(4, 5, bidirectional=True)
        self.frozen = calibrated(2, 3, num_layers=2).freeze()


@kept
def calibrated(C: int, H: int, **options: object) -> QuantGRU:
    torch.manual_seed(0)
    gru = QuantGRU(C, H, config=QuantConfig.int8(), **options)
    gru.calibrate(torch.randn(5, 2, C))
    gru.finalize_calibration()
    return gru


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture
def parameters(tmp_path: Path) -> Path:
    calibrated(3, 4).export_quant_params(tmp_path / "parameters.json")
    return tmp_path / "parameters.json"


FOUND = [
    "encoder.gru: QuantGRU of a GRU(3, 4, num_layers=1, bias=True, bidirectional=False), 8 bits",
    "head: QuantGRU of a GRU(4, 5, num_layers=1, bias=True, bidirectional=True), 8 bits",
    "frozen: FrozenQuantGRU of a GRU(2, 3, num_layers=2, bias=True, bidirectional=False), 8 bits",
]


def save_pickled(model: torch.nn.Module, path: Path) -> None:
    torch.save(model.state_dict(), path)


def save_legacy(model: torch.nn.Module, path: Path) -> None:
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)


def save_safetensors(model: torch.nn.Module, path: Path) -> None:
    safetensors.torch.save_file(model.state_dict(), path)


SAVERS = [save_pickled, save_legacy, save_safetensors]


@pytest.mark.parametrize("save", SAVERS)
@pytest.mark.parametrize("pipe", [False, True], ids=["file", "stdin"])
def test_checkpoints(model: Model, tmp_path: Path, save, pipe: bool) -> None:
    path = tmp_path / "any.name"
    save(model, path)
    result = run("check", "-", stdin=path.read_bytes()) if pipe else run("check", path)
    assert result.exit_code == 0, result.stderr
    name = "standard input" if pipe else str(path)
    lines = result.stdout.splitlines()
    assert all(line.startswith(f"{name}: ") for line in lines)
    assert all(any(text in line for line in lines) for text in FOUND)
    assert len(lines) == 3


def test_a_checkpoint_of_a_training(model: Model, tmp_path: Path) -> None:
    state: dict[object, object] = {"model": model.state_dict(), "epoch": 3, 7: {}}
    state["itself"] = state
    torch.save(state, tmp_path / "training.pt")
    result = run("check", tmp_path / "training.pt")
    assert result.exit_code == 0, result.stderr
    assert "model.encoder.gru: QuantGRU" in result.stdout


def test_the_gru_itself_is_saved(tmp_path: Path) -> None:
    torch.save(calibrated(3, 4).state_dict(), tmp_path / "gru.pt")
    result = run("check", tmp_path / "gru.pt")
    assert result.stdout.startswith(f"{tmp_path / 'gru.pt'}: QuantGRU of a GRU(3, 4")


def test_a_document_in_the_metadata(tmp_path: Path, parameters: Path) -> None:
    document = json.loads(parameters.read_text()) | {"batch_first": True}
    path = tmp_path / "frozen.safetensors"
    metadata = {"format": "pt", "quant_gru": json.dumps(document)}
    safetensors.torch.save_file({"W_l0": torch.zeros(3)}, path, metadata)
    result = run("check", path)
    assert result.stdout.startswith(f"{path}: FrozenQuantGRU of a GRU(3, 4")

    document["cells"][0]["operators"]["input.x"]["scale"] = 0.75
    metadata["quant_gru"] = json.dumps(document)
    safetensors.torch.save_file({"W_l0": torch.zeros(3)}, path, metadata)
    assert "power of two" in error_of("check", path)


@pytest.mark.parametrize("size", range(0, 256, 8))
def test_safetensors_of_any_header_size(tmp_path: Path, parameters: Path, size: int) -> None:
    """The first byte of the file, the low one of the size, may be that of a pickle."""
    metadata = {"document": parameters.read_text(), "padding": size * " "}
    safetensors.torch.save_file({"W_l0": torch.zeros(3)}, tmp_path / "a", metadata)
    assert len(files.read(str(tmp_path / "a"))) == 1


def error_of(*arguments: object, stdin: bytes | None = None) -> str:
    """Return the only line on stderr of a command that fails with exit code 2."""
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: Expected ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize("save", SAVERS)
def test_nothing_quantized(tmp_path: Path, save) -> None:
    save(torch.nn.GRU(3, 4), tmp_path / "float.pt")
    message = error_of("check", tmp_path / "float.pt")
    assert "entry 'quantization'" in message
    assert "float.pt" in message


def test_whole_modules_are_not_read(tmp_path: Path) -> None:
    torch.save(calibrated(3, 4), tmp_path / "module.pt")
    assert "save model.state_dict() instead" in error_of("check", tmp_path / "module.pt")
    (tmp_path / "list.pkl").write_bytes(pickle.dumps([1, 2]))
    assert "list.pkl" in error_of("check", tmp_path / "list.pkl")


def test_an_invalid_entry_is_named(tmp_path: Path) -> None:
    state = {"a.quantization": torch.tensor(list(b'{"format": "other"}'), dtype=torch.uint8)}
    torch.save(state, tmp_path / "a.pt")
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")
    for name in ("a.pt", "a.safetensors"):
        message = error_of("check", tmp_path / name)
        assert "'other'" in message
        assert "('a', file " in message


def test_entries_of_other_meaning_are_passed_over(tmp_path: Path) -> None:
    state = calibrated(3, 4).state_dict()
    state |= {"flight.plan": torch.tensor([1, 2], dtype=torch.uint8), "b.plan": torch.zeros(2)}
    torch.save(state, tmp_path / "a.pt")
    assert run("check", tmp_path / "a.pt").exit_code == 0


@pytest.mark.parametrize("save", [*SAVERS, None])
def test_damaged_files(tmp_path: Path, parameters: Path, save) -> None:
    """Whatever is in a file, the error is one of this library."""
    if save is not None:
        save(calibrated(2, 2), parameters)
    good = parameters.read_bytes()
    chance = random.Random(3)
    path = tmp_path / "damaged"
    for _ in range(100):
        raw = bytearray(good)
        for _ in range(chance.choice([1, 3, 30])):
            raw[chance.randrange(min(len(raw), chance.choice([100, len(raw)])))] = chance.randrange(
                256
            )
        path.write_bytes(raw[: chance.choice([len(raw), chance.randrange(len(raw))])])
        with contextlib.suppress(QuantGRUError):
            files.read(str(path))


def test_several_files_are_all_checked(tmp_path: Path, parameters: Path) -> None:
    (tmp_path / "wrong.json").write_text("{}")
    result = run(
        "check", parameters, tmp_path / "wrong.json", tmp_path / "none", default_config_path()
    )
    assert result.exit_code == 2
    assert [line.partition(": ")[0] for line in result.stdout.splitlines()] == [
        str(parameters),
        str(default_config_path()),
    ]
    assert [line[:16] for line in result.stderr.splitlines()] == ["Error: Expected "] * 2


def test_standard_input(parameters: Path) -> None:
    text = json.dumps(QuantConfig.w8a16().to_dict()).encode()
    result = run("check", "-", parameters, stdin=text)
    assert result.stdout.startswith("standard input: bit-width configuration, 8 and 16 bits")
    assert "standard input" in error_of("check", "-", stdin=b"{}")
    assert "standard input" in error_of("check", "-", stdin=b"")
    assert "once" in error_of("diff", "-", "-", stdin=text)


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="needs /dev/fd")
def test_a_checkpoint_through_a_pipe() -> None:
    stream = io.BytesIO()
    torch.save(calibrated(3, 4).state_dict(), stream)
    reading, writing = os.pipe()
    os.write(writing, stream.getvalue())
    os.close(writing)
    result = run("check", f"/dev/fd/{reading}")
    os.close(reading)
    assert result.exit_code == 0, result.stderr


def test_table_of_a_configuration() -> None:
    result = run("check", "--operators", default_config_path())
    table = [line.split("  ") for line in result.stdout.splitlines() if "  " in line]
    head, *rows = [[cell.strip() for cell in line if cell.strip()] for line in table]
    assert head == ["operator", "bits", "codes", "symmetric", "granularity"]
    assert [row[0] for row in rows] == list(OPERATORS)
    assert ["gate.z_out", "8", "unsigned", "no", "-"] in rows
    assert ["weight.W", "8", "signed", "yes", "channel"] in rows


def test_table_of_parameters(tmp_path: Path) -> None:
    gru = calibrated(3, 4, num_layers=2, bidirectional=True)
    gru.adjust_quant_config("W", scale=0.25)
    gru.adjust_quant_config("old_contrib", fused=True)
    gru.export_quant_params(tmp_path / "a.json")
    text = run("check", "-o", tmp_path / "a.json").stdout
    for place in ("layer 0\n", "layer 0, reverse\n", "layer 1\n", "layer 1, reverse\n"):
        assert f"\n{place}operator" in text
    for row in (
        "weight.W        8      signed    0           2^-2",
        "weight.R        8      signed    0           per channel, from the weights",
        "gate.z_out      8      unsigned  0           2^-8",
        "op.old_contrib  fused  -         -           -",
    ):
        assert row in text, text


def test_columns_and_scales() -> None:
    assert columns([("a", "bbb"), ("cc", 1)]) == "a   bbb\ncc  1"
    assert scale_text(0.3) == "0.3"
    assert scale_text(4.0) == "2^2"


def test_diff_of_configurations(tmp_path: Path) -> None:
    config = QuantConfig.int8()
    config.to_json(tmp_path / "a.json")
    changed = config.replace("z_out", bitwidth=10, description="more").replace("rRh", bitwidth=None)
    changed.replace_globals(scale_kind="free").to_json(tmp_path / "b.json")
    result = run("diff", tmp_path / "a.json", tmp_path / "b.json")
    assert result.exit_code == 1
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows == [
        ["where", str(tmp_path / "a.json"), str(tmp_path / "b.json")],
        ["scale_kind", "pot", "free"],
        ["gate.z_out", "bitwidth", "8", "10"],
        ["op.rRh", "bitwidth", "8", "null"],
    ]
    config.replace("z_out", comment="the same").to_json(tmp_path / "c.json")
    result = run("diff", tmp_path / "a.json", tmp_path / "c.json")
    assert result.exit_code == 0
    assert "the same quantization" in result.stdout


def test_diff_of_parameters(tmp_path: Path, parameters: Path) -> None:
    gru = calibrated(3, 4)
    gru.adjust_quant_config("z_out", bitwidth=9)
    gru.export_quant_params(tmp_path / "b.json")
    result = run("diff", parameters, tmp_path / "b.json")
    assert result.exit_code == 1
    assert "layer 0, gate.z_out bitwidth" in result.stdout
    assert "layer 0, table gate.z_out coefficients" in result.stdout
    assert "gate.r_out" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) < 400

    calibrated(3, 8).export_quant_params(tmp_path / "c.json")
    assert "hidden_size" in run("diff", parameters, tmp_path / "c.json").stdout
    assert run("diff", parameters, "-", stdin=parameters.read_bytes()).exit_code == 0
    # only the widths are compared with a configuration
    gru._state.config.to_json(tmp_path / "config.json")
    assert run("diff", tmp_path / "b.json", tmp_path / "config.json").exit_code == 0
    # the one GRU of a checkpoint needs no name
    torch.save({"net": calibrated(3, 4).state_dict()}, tmp_path / "a.pt")
    assert run("diff", parameters, tmp_path / "a.pt").exit_code == 0
    assert "none.json" in error_of("diff", parameters, tmp_path / "none.json")


def test_diff_of_checkpoints(model: Model, tmp_path: Path) -> None:
    save_pickled(model, tmp_path / "a.pt")
    save_safetensors(model, tmp_path / "b.safetensors")
    assert run("diff", tmp_path / "a.pt", tmp_path / "b.safetensors").exit_code == 0
    state = {key: value for key, value in model.state_dict().items() if "frozen" not in key}
    other = Model()
    other.head.adjust_quant_config("x", bitwidth=7)
    state["head.quantization"] = other.state_dict()["head.quantization"]
    torch.save(state, tmp_path / "c.pt")
    text = run("diff", tmp_path / "a.pt", tmp_path / "c.pt").stdout
    assert "head: layer 0 reverse, input.x bitwidth" in text
    row = next(line for line in text.splitlines() if line.startswith("frozen"))
    assert row.split() == ["frozen", "FrozenQuantGRU", "-"]
    assert "encoder" not in text
