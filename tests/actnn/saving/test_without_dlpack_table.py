"""Saving with a version of PyTorch that has no table of DLPack's functions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from saved_tensors import DTYPES, everything_held


@pytest.mark.slow
def test_all_is_as_with_the_table():
    script = Path(__file__).with_name("saved_tensors.py")
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    without, found = json.loads(ran.stdout), json.loads(json.dumps(everything_held()))
    assert len(found) == 12 * len(DTYPES)
    assert without == found
    reasons = {record[0] for *_, records, _ in found for record in records}
    assert {"compressed", "made again in backward", "compared in backward"} <= reasons
