import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _where_trainers_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
