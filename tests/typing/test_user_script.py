"""The scripts that type checkers read are a user's: one runs, the other is README's first block."""

from pathlib import Path

from user_script import main


def test_the_script_runs(tmp_path: Path) -> None:
    main(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {
        "gru.json",
        "gru.safetensors",
        "model.onnx",
    }


def test_the_other_script_is_that_of_the_readme() -> None:
    here = Path(__file__).parent
    text = (here.parents[1] / "README.md").read_text(encoding="utf-8")
    block = text.partition("```python\n")[2].partition("```")[0]
    assert block == (here / "readme.py").read_text(encoding="utf-8")
