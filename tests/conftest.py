"""Shared by all tests."""

from __future__ import annotations

import hypothesis
import pytest
import torch

from quant_gru.config.notes import forget_notes

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    """Tests share the machine's cores, and each starts from the same random state."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    forget_notes()
