"""The microcontroller example, on every target whose tools are installed."""

import os
import shutil

import pytest
from example_runs import load

from quant_gru import FrozenQuantGRU


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_from_training_to_the_targets(tmp_path, capsys):
    pytest.importorskip("sklearn")
    example = load("deploy_microcontroller")
    folder = tmp_path / "firmware"
    example.main(["--output", str(folder), "--hidden-size", "6", "--epochs", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("accuracy: float ")
    assert "252 multiply-accumulates a step" in lines[1]
    said = "equal (102 codes); 20 of 20 images have the class of PyTorch"
    for (name, target), line in zip(example.TARGETS.items(), lines[2:], strict=True):
        missing = target.missing()
        assert missing is None or "QUANT_GRU_CI" not in os.environ, missing
        expected = said if missing is None else f"left out, {missing} is not installed"
        assert line == f"{name}: {expected}"
    assert lines[2] == f"this machine: {said}"
    assert FrozenQuantGRU.load(folder / "digits.safetensors").shape.hidden_size == 6
    # a firmware that finds other classes is noticed
    source = folder / "firmware.c"
    source.write_text(source.read_text().replace("== expected[n]", "!= expected[n]"))
    with pytest.raises(SystemExit, match="Expected a program without errors, got: "):
        example.output_of(folder, example.TARGETS["this machine"], "firmware.c")
