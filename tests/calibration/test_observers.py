"""Observers: what they remember, and that it depends on the values alone."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant_gru.calibration.histogram import (
    MAX_BINS,
    MIN_EXPONENT,
    bin_window,
    central_range,
    histogram_of,
    occupied_bins,
)
from quant_gru.calibration.observers import METHODS, HistogramObserver, make_observer
from quant_gru.errors import CalibrationError

CANONICAL = sorted(set(METHODS.values()))


def finite_floats(bound=None):
    limits = {} if bound is None else {"min_value": -bound, "max_value": bound}
    return st.floats(width=32, allow_nan=False, allow_infinity=False, **limits)


# Magnitudes from denormal to huge, beside ordinary ones: growth by many octaves at once.
samples = st.lists(st.one_of(finite_floats(), finite_floats(8.0)), min_size=1, max_size=60)


def tensor(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def observed(method, *chunks):
    observer = make_observer(method)
    for chunk in chunks:
        observer.update(chunk)
        observer.end_batch()
    return observer


def state(observer):
    h = observer.histogram
    return (h.exponent, h.first, h.counts.tolist(), h.minimum.hex(), h.maximum.hex())


def reference_state(values):
    """The histogram by Python integers and floats alone."""
    low, high = min(0.0, *values), max(0.0, *values)
    exponent = MIN_EXPONENT

    def bin_of(v):
        return math.floor(math.ldexp(v, -exponent))

    while bin_of(high) - bin_of(low) >= MAX_BINS:
        exponent += 1
    counts = [0] * (bin_of(high) - bin_of(low) + 1)
    for v in values:
        counts[bin_of(v) - bin_of(low)] += 1
    return exponent, bin_of(low), counts, min(values) + 0.0, max(values) + 0.0


def test_methods_name_every_observer_and_the_alias():
    assert dict(METHODS) == {
        "histogram": "histogram",
        "sqnr": "histogram",
        "minmax": "minmax",
        "percentile": "percentile",
        "ema": "ema",
    }
    for name, canonical in METHODS.items():
        assert make_observer(name).method == canonical


def test_an_unknown_method_is_an_error_that_suggests_one():
    with pytest.raises(CalibrationError, match=r"got 'histogramm'; did you mean 'histogram'\?"):
        make_observer("histogramm")


@pytest.mark.parametrize("percentile", [50.0, 0.0, -1.0, 100.5, math.nan])
def test_percentile_out_of_range_is_an_error(percentile):
    with pytest.raises(CalibrationError, match=r"percentile_value to be in \(50, 100\]"):
        make_observer("percentile", percentile_value=percentile)


@pytest.mark.parametrize("method", CANONICAL)
def test_fresh_observer_is_empty_and_stays_so_after_empty_tensors(method):
    observer = observed(method, torch.empty(0), torch.empty(3, 0, 2))
    assert observer.is_empty
    assert (observer.minimum, observer.maximum) == (math.inf, -math.inf)
    assert not observer.has_nonfinite


@pytest.mark.parametrize("method", CANONICAL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_extremes_are_exact_for_every_dtype_and_layout(method, dtype):
    values = torch.linspace(-1.75, 3.25, 60, dtype=torch.float64).to(dtype).reshape(3, 4, 5)
    for view in (values, values.permute(2, 0, 1), values[:, 1:3], values[0, 0, 0]):
        observer = observed(method, view)
        assert observer.minimum == float(view.min().to(torch.float32))
        assert observer.maximum == float(view.max().to(torch.float32))


@pytest.mark.parametrize("method", CANONICAL)
def test_integers_are_refused(method):
    with pytest.raises(CalibrationError, match=r"floating point, got torch\.int64"):
        make_observer(method).update(torch.arange(3))


@pytest.mark.parametrize("method", CANONICAL)
def test_nonfinite_values_are_counted_and_kept_out(method):
    observer = observed(method, tensor([1.0, math.nan, -2.0, math.inf]), tensor([-math.inf]))
    assert observer.has_nonfinite
    assert observer.nonfinite == 3
    assert (observer.minimum, observer.maximum) == (-2.0, 1.0)


def test_values_beyond_float32_count_as_infinite():
    observer = observed("minmax", tensor([1.0, 1e300], torch.float64))
    assert (observer.nonfinite, observer.maximum) == (1, 1.0)


@pytest.mark.parametrize("method", CANONICAL)
def test_update_needs_no_grad_and_keeps_no_graph(method):
    observer = observed(method, torch.randn(8, requires_grad=True))
    pickle.dumps(observer)


@pytest.mark.parametrize("method", CANONICAL)
def test_pickle_and_deepcopy_are_independent_equals(method):
    observer = observed(method, torch.linspace(-1, 2, 100))
    for twin in (copy.deepcopy(observer), pickle.loads(pickle.dumps(observer))):
        assert (twin.minimum, twin.maximum) == (observer.minimum, observer.maximum)
        twin.update(tensor([9.0]))
        twin.end_batch()
        assert observer.maximum == 2.0


@pytest.mark.parametrize("method", CANONICAL)
def test_merging_another_method_is_an_error_and_changes_nothing(method):
    other = "minmax" if method != "minmax" else "ema"
    observer = observed(method, tensor([1.0]))
    with pytest.raises(CalibrationError, match=f"method '{method}', got '{other}'"):
        observer.merge(observed(other, tensor([math.nan, 5.0])))
    assert (observer.maximum, observer.nonfinite) == (1.0, 0)


def test_merging_another_percentile_is_an_error():
    with pytest.raises(CalibrationError, match=r"percentile_value 99.99, got 99.0"):
        make_observer("percentile").merge(make_observer("percentile", percentile_value=99.0))


@pytest.mark.parametrize("method", CANONICAL)
def test_merging_an_empty_observer_either_way(method):
    full, empty = observed(method, tensor([-1.0, 2.0])), make_observer(method)
    full.merge(make_observer(method))
    empty.merge(full)
    assert (empty.minimum, empty.maximum) == (full.minimum, full.maximum) == (-1.0, 2.0)


@pytest.mark.parametrize("method", CANONICAL)
def test_all_reduce_without_processes_changes_nothing(method):
    observer = observed(method, tensor([-1.0, 2.0]))
    observer.all_reduce()
    assert (observer.minimum, observer.maximum) == (-1.0, 2.0)


# --- ema


def test_ema_folds_once_per_batch():
    observer = make_observer("ema")
    observer.update(tensor([-1.0]))
    observer.update(tensor([4.0]))
    assert observer.is_empty
    observer.end_batch()
    assert (observer.minimum, observer.maximum) == (-1.0, 4.0)
    observer.update(tensor([-2.0, 2.0]))
    observer.end_batch()
    assert observer.minimum == pytest.approx(0.9 * -1 + 0.1 * -2)
    assert observer.maximum == pytest.approx(0.9 * 4 + 0.1 * 2)
    observer.end_batch()
    assert observer.maximum == pytest.approx(3.8)


def test_ema_averages_merge_into_the_range_that_contains_both():
    a, b = observed("ema", tensor([-1.0, 2.0])), observed("ema", tensor([-3.0, 1.0]))
    a.merge(b)
    assert (a.minimum, a.maximum) == (-3.0, 2.0)


# --- histogram


@settings(deadline=None)
@given(samples)
def test_histogram_equals_its_definition(values):
    histogram = observed("histogram", tensor(values)).histogram
    exponent, first, counts, minimum, maximum = reference_state(values)
    assert (histogram.exponent, histogram.first) == (exponent, first)
    assert histogram.counts.tolist() == counts
    assert (histogram.minimum, histogram.maximum) == (minimum, maximum)
    assert histogram.counts.dtype == torch.int64


@settings(deadline=None)
@given(st.data())
def test_histogram_state_is_independent_of_order_chunks_and_processes(data):
    values = data.draw(samples)
    whole = state(observed("histogram", tensor(values)))
    shuffled = data.draw(st.permutations(values))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=6)))
    chunks = [shuffled[a:b] for a, b in zip([0, *cuts], [*cuts, len(values)], strict=True)]
    processes = [make_observer("histogram") for _ in range(data.draw(st.integers(1, 3)))]
    for chunk in chunks:
        processes[data.draw(st.integers(0, len(processes) - 1))].update(tensor(chunk))
    total = make_observer("histogram")
    for process in data.draw(st.permutations(processes)):
        total.merge(process)
    assert state(total) == whole


@pytest.mark.parametrize(
    "values",
    [
        [0.0, -0.0],
        [-0.0],
        [1e-45, -1e-45],
        [3.4e38, -3.4e38, -1e-45, 1e-45],
        [5000.0, -1e-30],
        [-1.0, 1.0],
        [1e-30, 1e30],
        [-7.0],
        [1024.0],
    ],
    ids=str,
)
def test_histogram_at_the_edges_of_float32(values):
    histogram = observed("histogram", tensor(values)).histogram
    values = tensor(values).tolist()
    assert (histogram.exponent, histogram.first, histogram.counts.tolist()) == (
        reference_state(values)[:3]
    )
    one_by_one = observed("histogram", *(tensor([v]) for v in values))
    assert state(one_by_one) == state(observed("histogram", tensor(values)))


def test_blocks_and_strides_do_not_matter():
    values = torch.randn(700, 801, generator=torch.Generator().manual_seed(1))
    whole = state(observed("histogram", values))
    assert state(observed("histogram", values.t())) == whole
    assert state(observed("histogram", values[:, :300], values[:, 300:])) == whole
    assert state(observed("histogram", values[None, ::2], values[None, 1::2])) == whole
    assert sum(whole[2]) == values.numel()


@given(finite_floats(), finite_floats())
@settings(deadline=None)
def test_bin_window_is_the_finest_that_fits(a, b):
    minimum, maximum = min(a, b), max(a, b)
    exponent, first, last = bin_window(minimum, maximum)
    assert last - first + 1 <= MAX_BINS
    assert first <= 0 <= last
    if exponent > MIN_EXPONENT:
        finer = -(exponent - 1)
        low, high = min(0.0, minimum), max(0.0, maximum)
        span = math.floor(math.ldexp(high, finer)) - math.floor(math.ldexp(low, finer))
        assert span >= MAX_BINS


def test_occupied_bins_end_at_the_extremes():
    histogram = observed("histogram", tensor([5.3, 6.1, 6.7])).histogram
    edges, counts = occupied_bins(histogram)
    assert (edges[0], edges[-1]) == (histogram.minimum, histogram.maximum)
    assert counts[0] == counts[-1] == 1
    assert counts.sum() == 3


# --- percentile


def test_central_range_of_100_percent_is_the_extremes():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    histogram = histogram_of(values, float(values.min()), float(values.max()))
    assert central_range(histogram, 100.0) == (histogram.minimum, histogram.maximum)


@pytest.mark.parametrize("percent", [60.0, 90.0, 99.0, 99.9])
def test_central_range_agrees_with_quantiles(percent):
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(3))
    observer = make_observer("percentile", percentile_value=percent)
    observer.update(values)
    tail = (100 - percent) / 200
    expected = torch.quantile(values, tensor([tail, 1 - tail])).tolist()
    assert observer.central_range() == pytest.approx(expected, abs=2.0**-8)


def test_central_range_interpolates_inside_a_bin():
    # 1024 bins of width 2^-10 over [0, 1], ten values in each.
    values = (torch.arange(10240) + 0.5) / 10240
    observer = make_observer("percentile", percentile_value=100 - 2 * 100 * 5 / 10240)
    observer.update(values)
    low, high = observer.central_range()
    width = 2.0**-11
    assert low == pytest.approx(0.5 / 1024, abs=width / 4)
    assert high == pytest.approx(1 - 0.5 / 1024, abs=width / 4)


@given(samples, st.floats(51.0, 100.0))
@settings(deadline=None)
def test_central_range_is_ordered_and_inside_the_extremes(values, percent):
    observer = make_observer("percentile", percentile_value=percent)
    observer.update(tensor(values))
    low, high = observer.central_range()
    assert observer.minimum <= low <= high <= observer.maximum


def test_histogram_of_nothing_is_an_error():
    with pytest.raises(CalibrationError, match="at least one finite value"):
        _ = HistogramObserver().histogram
