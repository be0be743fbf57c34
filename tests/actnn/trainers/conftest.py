import pytest
import torch


@pytest.fixture(autouse=True)
def _where_trainers_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch):
    count = min(torch.cuda.device_count(), 1)  # with several, Trainer uses DataParallel
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
