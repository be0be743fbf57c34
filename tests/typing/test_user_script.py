"""The script that the type checker reads also runs."""

from pathlib import Path

from user_script import main


def test_the_script_runs(tmp_path: Path) -> None:
    main(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {
        "gru.json",
        "gru.safetensors",
        "model.onnx",
    }
