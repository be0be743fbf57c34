"""Two processes with half of the data each end in the quantizers of one with all of it."""

import json

import pytest
import torch

from quant_gru.calibration.observers import METHODS, make_observer
from quant_gru.calibration.search import choose_quantizer
from quant_gru.errors import CalibrationError
from two_processes import NEEDS_GLOO, joined, run_two

CANONICAL = sorted(set(METHODS.values()))
BATCHES = 3

pytestmark = NEEDS_GLOO


def batch(index):
    generator = torch.Generator().manual_seed(index)
    return torch.randn(64, 50, generator=generator) * (1 + index) + 0.25


def quantizers(observer):
    return [
        repr(
            choose_quantizer(
                observer,
                operator="gate.z_pre",
                bits=bits,
                signed=True,
                symmetric=symmetric,
                scale_kind=kind,
            )
        )
        for bits in (4, 8, 16)
        for symmetric in (True, False)
        for kind in ("pot", "free")
    ]


def observe(method, parts):
    observer = make_observer(method)
    for part in parts:
        observer.update(part)
        observer.end_batch()
    return observer


def worker(rank, folder):
    with joined(rank, folder):
        result = {}
        for method in CANONICAL:
            halves = observe(method, [batch(i).chunk(2)[rank] for i in range(BATCHES)])
            before = repr((halves.minimum, halves.maximum))
            halves.all_reduce()
            one_empty = make_observer(method)
            if rank == 1:
                one_empty.update(batch(0))
            one_empty.end_batch()
            one_empty.all_reduce()
            all_empty = make_observer(method)
            all_empty.all_reduce()
            nan_on_one = make_observer(method)
            nan_on_one.update(torch.tensor([1.0, float("nan") if rank == 1 else 2.0]))
            nan_on_one.end_batch()
            nan_on_one.all_reduce()
            result[method] = {
                "before": before,
                "halves": quantizers(halves),
                "one_empty": quantizers(one_empty),
                "all_empty": all_empty.is_empty,
                "nan_on_one": nan_on_one.nonfinite,
            }
        mixed = make_observer(CANONICAL[rank])
        with pytest.raises(CalibrationError, match="observer to merge"):
            mixed.all_reduce()
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump(result, file)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_two(worker, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("method", CANONICAL)
def test_both_ranks_have_the_quantizers_of_one_process(two_ranks, method):
    expected = quantizers(observe(method, [batch(i) for i in range(BATCHES)]))
    assert two_ranks[0][method]["halves"] == expected
    assert two_ranks[1][method]["halves"] == expected


def test_ema_is_the_same_on_every_rank_before_the_final_reduction(two_ranks):
    assert two_ranks[0]["ema"]["before"] == two_ranks[1]["ema"]["before"]


@pytest.mark.parametrize("method", CANONICAL)
def test_a_rank_without_values_takes_part(two_ranks, method):
    expected = quantizers(observe(method, [batch(0)]))
    assert two_ranks[0][method]["one_empty"] == expected
    assert two_ranks[1][method]["one_empty"] == expected
    assert two_ranks[0][method]["all_empty"]


@pytest.mark.parametrize("method", CANONICAL)
def test_every_rank_learns_of_nonfinite_values(two_ranks, method):
    assert [rank[method]["nan_on_one"] for rank in two_ranks] == [1, 1]
