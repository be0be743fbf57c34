"""PyTorch before 2.9 does not compress everywhere: a warning says so, once."""

import warnings

import pytest
import torch
from torch import nn

import actnn
from actnn.saving import context


@pytest.fixture(autouse=True)
def _as_new():
    context.warn_of_older.cache_clear()
    yield
    context.warn_of_older.cache_clear()


@pytest.mark.parametrize("version", ["2.6.0+cu124", "2.8.0"])
def test_older_versions_are_said_once(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.warns(
        actnn.ActNNWarning, match=rf"PyTorch 2.9 or newer, got {version[:5]}"
    ) as said:
        actnn.compress(nn.Linear(2, 2))
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actnn.compress(nn.Linear(2, 2))
        actnn.compressed(bits=4)


@pytest.mark.parametrize("version", ["2.9.0", "2.13.0+cpu", "2.14.0a0+git1234", "3.0.0"])
def test_newer_versions_are_not(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    actnn.compressed(bits=4)
