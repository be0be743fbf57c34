"""The blocks for trainers in docs/actnn.md run as they are written."""

import re
from pathlib import Path

import pytest
from trainer_packages import package

PAGE = Path(__file__).parents[3] / "docs" / "actnn.md"
PACKAGES = ["transformers", "peft", "lightning", "accelerate"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.filterwarnings("error::actnn.ActNNWarning")
def test_blocks_of_the_page_run():
    for name in PACKAGES:
        package(name)
    section = PAGE.read_text(encoding="utf-8").split("\n## Trainers\n")[1]
    section = section.split("\n## Bits that adapt\n")[0]  # Long sequences, too
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    assert len(blocks) == len(PACKAGES) + 1
    namespace = {"__name__": "page"}
    states = package("accelerate").state.AcceleratorState
    for block in blocks:
        states._reset_state(reset_partial_state=True)  # each block is a program of its own
        exec(compile(block, str(PAGE), "exec"), namespace)
    assert namespace["model"].actnn.records
    assert namespace["base"].actnn.records
    assert namespace["task"].net.actnn.records
    assert namespace["net"].actnn.records
    held = [r for r in namespace["saving"].records if r.op == "checkpoint"]
    assert [(r.reason, r.choice.bits) for r in held] == [("compressed", 8)] * 2


def test_a_package_that_is_missing_is_named():
    with pytest.raises(pytest.skip.Exception, match="needs a_package_that_nobody_has"):
        package("a_package_that_nobody_has")
