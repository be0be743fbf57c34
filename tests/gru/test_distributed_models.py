"""calibrate_model in two processes: a GRU counts as reached if any process reached it."""

import json
import warnings

import pytest
import torch
from gru_helpers import C, H, seeded

from quant_gru import QuantGRU, calibrate_model
from two_processes import NEEDS_GLOO, joined, run_two

pytestmark = [NEEDS_GLOO, pytest.mark.slow]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.names = ("all", "one", "none")
        for name in self.names:
            setattr(self, name, QuantGRU(C, H))

    def forward(self, batch):
        x, names = batch
        for name in names:
            getattr(self, name)(x)


def worker(rank, folder):
    with joined(rank, folder):
        torch.manual_seed(0)
        model = Model()
        batch = (seeded(5, 3, C, seed=rank), ("all", "one") if rank else ("all",))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            calibrate_model(model, [batch], lambda model, batch: model(batch))
        found = {
            "told": [str(w.message) for w in caught],
            "on": [getattr(model, name).use_quantization for name in model.names],
            "all": model.all.get_quant_config(),
            "one": model.one.get_quant_config(),
        }
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump(found, file)


def test_reached_in_one_process_is_reached_in_all(tmp_path):
    run_two(worker, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["on"] == [True, True, False]
    (told,) = first["told"]
    assert told.startswith("forward never reached 'none':")
