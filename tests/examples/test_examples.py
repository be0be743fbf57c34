"""Each example runs, alone and in two processes, and finds the same figures both times."""

import json
import math

import pytest
import torch
import torch.distributed as dist
from example_runs import arguments, load, torchrun, write_data

from quant_gru import QuantConfig

pytestmark = pytest.mark.slow

NAMES = ["keyword_spotting", "character_model", "sequence_regression"]
ROWS = ["float", "float, longer", "8/8 after", "8/8 trained", "4/8 after", "4/8 trained"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def alone(data):
    """What one process finds, by example."""
    found = {}
    for name in NAMES:
        (found[name],) = load(name).main([*arguments(name, data), "--bits", "8/8", "4/8"])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_model_is_trained_and_judged(name, alone):
    found = alone[name]
    assert list(found) == ROWS
    for row in found.values():
        assert all(math.isfinite(value) for value in row["figures"].values())
    assert [len(row["curve"]) for row in found.values()] == [6, 2, 0, 2, 0, 2]


@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed, gloo"
)
def test_two_processes_find_what_one_finds(alone, data, tmp_path):
    printed = torchrun(
        [
            (name, [*arguments(name, data), "--bits", "8/8", "--json", str(tmp_path / name)])
            for name in NAMES
        ]
    )
    assert printed.count("8/8 trained") == len(NAMES)  # one process speaks for all
    for name in NAMES:
        document = json.loads((tmp_path / name).read_text())
        assert document["seeds"] == [0]
        (together,) = document["results"]
        assert list(together) == ROWS[:4]
        for row in ROWS[:4]:
            for measure, value in together[row]["figures"].items():
                expected = alone[name][row]["figures"][measure]
                assert value == pytest.approx(expected, rel=2e-2), (name, row, measure)


class TestCommon:
    def test_training_wins_back_what_coarse_weights_lose(self):
        example, common = load("sequence_regression"), load("common")
        options = common.parser("", 120).parse_args(["--bits", "3/8", "--further", "60"])
        task = example.Tanks(torch.device("cpu"), hidden_size=8, length=15)
        results = [common.compare(task, options, common.Processes(), seed=0)]
        error = {name: row["figures"]["squared error"] for name, row in results[0].items()}
        assert error["float, longer"] < error["3/8 trained"] < error["3/8 after"]
        assert common.recovered(results, "3/8", "squared error") > 0.3
        curve = results[0]["float"]["curve"]
        assert curve[-1] < 0.7 * curve[0]

    def test_seeds_decide(self):
        example, common = load("sequence_regression"), load("common")
        options = common.parser("", 3).parse_args(["--bits", "--further", "1"])
        task = example.Tanks(torch.device("cpu"), hidden_size=4, length=5)
        once, again, other = (
            common.compare(task, options, common.Processes(), seed) for seed in (0, 0, 1)
        )
        assert once == again
        assert once != other

    def test_configurations(self, tmp_path):
        common = load("common")
        QuantConfig.w8a16().to_json(tmp_path / "mine.json")
        options = ["--bits", "4/8", "--config", str(tmp_path / "mine.json")]
        found = common.configurations(common.parser("", 1).parse_args(options))
        assert list(found) == ["4/8", "mine"]
        assert found["mine"] == QuantConfig.w8a16()
        assert found["4/8"]["weight.R"].bitwidth == 4
        assert found["4/8"]["output.h"].bitwidth == 8
        with pytest.raises(SystemExit, match="Expected --bits to be like 4/8, got '4'"):
            common.configurations(common.parser("", 1).parse_args(["--bits", "4"]))

    @pytest.mark.parametrize("device", ["cuda", "cuda:0", "quux", ""])
    def test_a_device_that_is_not_there(self, device, capsys, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(SystemExit) as ended:
            load("sequence_regression").main(["--device", device])
        assert ended.value.code == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("Expected ")
        assert "--device" in printed.err
        assert (printed.err.count("\n"), printed.out) == (1, "")

    def test_every_sample_is_seen_before_one_is_seen_again(self):
        common = load("common")
        drawn = common.batches(10, 4, seed=3)
        first = torch.cat([next(drawn), next(drawn)])
        assert len(set(first.tolist())) == 8
        assert set(next(drawn).tolist()) <= set(range(10))

    def test_shares_of_all_processes_are_the_whole(self):
        common = load("common")
        index = torch.arange(7)
        parts = [common.Processes(rank, 3).share(index) for rank in range(3)]
        assert sorted(torch.cat(parts).tolist()) == index.tolist()

    def test_processes_that_do_not_divide_the_batch(self):
        example, common = load("sequence_regression"), load("common")
        task = example.Tanks(torch.device("cpu"), hidden_size=4, length=5)
        options = common.parser("", 1).parse_args([])
        with pytest.raises(SystemExit, match=r"to be a divisor of 64 .* got 3"):
            common.run(task, options, common.Processes(0, 3))


def test_a_text_that_is_too_short(tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(SystemExit, match="to be a text of 1280 characters at least, got 9"):
        load("character_model").CharacterModel(
            tmp_path / "short.txt", torch.device("cpu"), hidden_size=4, window=64
        )


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"], ids=["missing", "not a text"])
@pytest.mark.parametrize(
    ("name", "model"),
    [("character_model", "CharacterModel"), ("keyword_spotting", "KeywordSpotting")],
)
def test_data_that_cannot_be_read(tmp_path, name, model, content):
    path = tmp_path / "data"
    if content is not None:
        path.write_bytes(content)
    extra = {"window": 64} if name == "character_model" else {}
    with pytest.raises(SystemExit, match=r"Expected .*data"):
        getattr(load(name), model)(path, torch.device("cpu"), hidden_size=4, **extra)


def test_tanks_fill_and_spill():
    voltage, level = load("sequence_regression").tanks(8, 300, seed=0)
    assert voltage.shape == level.shape == (8, 300, 1)
    assert 0 <= voltage.min() <= voltage.max() <= 3
    assert level.min() >= 0
    assert level[:, 0].max() < 1
    assert level.max() > 4
