"""What the planner of the recurrence chooses: shapes that fit, on chips of all kinds."""

import pytest
from test_compile import BYTES, FORMS, IN_HALVES, changed

from quant_gru import QuantGRUError
from quant_gru.kernels._native import Gates
from quant_gru.kernels.cuda.recurrence import planner


@pytest.mark.parametrize(
    "wanted", ["4", "3,1,1,8", "4,1,1,8", "1,2,2,8", "1,1,1,16", "1,1,2,1", "a,b,c,d"]
)
def test_the_shape_override_is_checked(monkeypatch, wanted):
    monkeypatch.setenv(planner.VARIABLE, wanted)
    with pytest.raises(QuantGRUError, match=planner.VARIABLE):
        planner.choose(BYTES, 64, 8, 1, {1: 132})


RESIDENT = {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}


@pytest.mark.parametrize("processors", [20, 58, 84, 128, 170])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_chips_without_clusters_have_99_kilobytes_for_a_block(form, processors):
    if form.own is not None:
        pytest.skip("not for forms that have tables of their own")
    for H in range(1, 257, 5):
        for N in (1, 8, 64, 256, 512, 1024):
            for directions in (1, 2):
                shape = planner.choose(form, H, N, directions, {1: processors})
                assert shape is None or shape.shared_bytes(form) <= 99 << 10


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("H", [1, 16, 64, 100, 128, 256, 300, 512, 1024, 2048])
def test_the_planner_finds_a_shape_that_fits(form, H):
    for clusters in (RESIDENT, {1: 108}):
        for N in (1, 8, 500):
            shape = planner.choose(form, H, N, 2, clusters)
            if shape is None:
                assert H > (181 if form.weight_bytes == 2 else 256)
                continue
            assert shape.fits(form)
            assert shape.blocks in clusters
            assert min(shape.features, shape.units) >= H
            # tables of their own are read where a block may have more than 100 KB alone
            roomy = shape.blocks > 1 or form.own is not None
            assert shape.shared_bytes(form) < (227 << 10 if roomy else 99 << 10)
    assert (planner.choose(form, H, 8, 1, RESIDENT) is None) == (
        H > (512 if form.weight_bytes == 2 else 1024)
    )


def test_blocks_of_few_threads_share_a_multiprocessor():
    light, heavy = (planner.make_shape(H, 16, 2, 1, 8) for H in (512, 1024))
    assert light.resident(BYTES, RESIDENT) == (7, 14)
    assert heavy.resident(BYTES, RESIDENT) == (7, 7)
    assert light.waves(BYTES, 7, RESIDENT) == heavy.waves(BYTES, 7, RESIDENT) == 1
    assert 1 < light.waves(BYTES, 8, RESIDENT) < light.waves(BYTES, 15, RESIDENT)
    assert heavy.waves(BYTES, 8, RESIDENT) == 2


def test_blocks_with_tables_share_where_fewer_steps_are_ahead():
    form = changed(IN_HALVES, own=Gates("float", (3, 3, 3), 98328))
    light, heavy = (planner.make_shape(512, blocks, 1, 1, 4) for blocks in (8, 4))
    assert (light.ring(form), heavy.ring(form)) == (2, 4)
    assert 2 * (light.shared_bytes(form) + 1024) <= 228 << 10
    assert light.resident(form, RESIDENT) == (15, 30)
    assert heavy.resident(form, RESIDENT) == (30, 30)
    assert light.ring(BYTES) == 4


def test_large_strips_go_in_one_piece():
    wide = FORMS["w8a16-float"]
    for form, H, shape, expected in (
        (BYTES, 512, (8, 2, 1, 8), True),
        (BYTES, 512, (8, 1, 1, 4), False),
        (BYTES, 1024, (16, 2, 1, 16), False),
        (wide, 1024, (16, 2, 1, 16), True),
        (wide, 500, (8, 1, 1, 1), True),
        (wide, 400, (8, 1, 1, 1), False),
        (wide, 64, (1, 1, 1, 8), False),
        (FORMS["w16a16"], 512, (8, 1, 1, 1), False),
    ):
        assert planner.make_shape(H, *shape).bulk(form) == expected


def test_a_strip_costs_less_beside_another():
    one, two = (planner.make_shape(1024, 16, 2, 1, rows) for rows in (8, 16))
    for form in (BYTES, FORMS["w8a16-float"]):
        times = [shape.step_time(form) for shape in (one, two)]
        assert times[0] <= times[1] < 2 * times[0]
