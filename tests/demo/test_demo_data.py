import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quant_gru.demo import DataError, SequenceClassifier
from quant_gru.demo.data import Sequences, digits_task
from quant_gru.demo.spoken import load_recordings, spoken_task
from quant_gru.demo.training import predict, train

WriteNpz = Callable[..., Path]


def test_digits_are_split_by_class_and_seed() -> None:
    task = digits_task(0)
    assert (len(task.train), len(task.test)) == (1347, 450)
    assert task.train.features.shape == (1347, 8, 8)
    assert [x.item() for x in task.train.features.aminmax()] == [0, 1]
    assert task.test.labels.bincount().tolist() == pytest.approx([45] * 10, abs=2)
    assert torch.equal(digits_task(0).test.labels, task.test.labels)
    assert not torch.equal(digits_task(1).test.labels, task.test.labels)


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="run: pip install scikit-learn"):
        digits_task(0)


def test_spread_and_batches_keep_the_order() -> None:
    n = torch.arange(10)
    data = Sequences(n[:, None, None].float(), torch.ones(10, dtype=torch.int64), n)
    assert data.spread(4).labels.tolist() == [0, 2, 5, 7]
    assert data.spread(99).labels.tolist() == n.tolist()
    assert [batch.labels.tolist() for batch in data.batches(4)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]


def test_spoken_task(write_npz: WriteNpz) -> None:
    path = write_npz()
    recordings = load_recordings(path)
    task = spoken_task(path)
    assert (len(task.train), len(task.test), task.n_features) == (18, 30, 32)
    assert task.train.labels.tolist() == [0] * 6 + [1] * 6 + [2] * 6

    frames = 1 + (np.diff(recordings.offsets) - 256) // 128
    assert task.test.lengths.tolist() == frames[recordings.take < 5].tolist()
    valid = torch.cat([x[:n] for x, n in zip(task.train.features, task.train.lengths, strict=True)])
    torch.testing.assert_close(valid.mean(0), torch.zeros(32), atol=1e-5, rtol=0)
    torch.testing.assert_close(valid.std(0, correction=0), torch.ones(32), atol=1e-4, rtol=0)
    shortest = int(task.train.lengths.argmin())
    assert (task.train.features[shortest, task.train.lengths[shortest] :] == 0).all()


def test_long_recordings_are_cut(write_npz: WriteNpz) -> None:
    count = 2
    total = count * 30_000
    path = write_npz(
        samples=np.zeros(total, dtype=np.int16),
        offsets=np.array([0, 30_000, total]),
        label=np.array([3, 3]),
        speaker=np.array([0, 1]),
        take=np.array([0, 5]),
    )
    task = spoken_task(path)
    assert task.test.lengths.tolist() == [128]
    assert torch.isfinite(task.test.features).all()


ONE = np.ones(48, dtype=np.uint8)
BAD_KEYS: list[tuple[dict[str, Any], str]] = [
    ({"take": None}, r"with the keys samples, .*, got none named take"),
    ({"samples": np.zeros(9, np.float32)}, r"'samples'.* int16 array, got float32 of shape \(9,\)"),
    ({"samples": np.zeros((9, 2), np.int16)}, r"'samples'.*, got int16 of shape \(9, 2\)"),
    ({"samples": np.zeros(9, np.int16)}, r"'offsets'.* from 0 to the 9 samples, got 0 to \d+"),
    ({"offsets": np.zeros(49)}, r"'offsets'.* integer array, got float64"),
    ({"offsets": np.array([0])}, r"'offsets'.* at least 2 numbers, got 1"),
    ({"label": ONE[:5]}, r"'label'.* 48 numbers, one per recording, got 5"),
    ({"label": ONE * 10}, r"'label'.* in 0\.\.9, got 10 \(recording 0\)"),
    ({"speaker": ONE * 2}, r"'speaker'.* in 0\.\.1, got 2"),
    ({"take": -ONE.astype(np.int64)}, r"'take'.* non-negative, got -1"),
    ({"take": ONE * 5}, r"'take'.*, got no test recording"),
    ({"take": ONE}, r"'take'.*, got no training recording"),
    ({"speaker_names": np.array([1, 2])}, r"'speaker_names'.* a list of names, got int64"),
    ({"speaker_names": np.array(["a", None])}, r"'speaker_names'.* a readable array"),
    ({"sample_rate": np.array([8000, 8000])}, r"'sample_rate'.* one integer, got int64"),
    ({"sample_rate": np.array(80)}, r"sample_rate to be in 4000\.\.192000, got 80 "),
    ({"sample_rate": np.array(32000)}, r"recording \d+ .* at least 1024 samples long .*, got \d+"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_KEYS)
def test_bad_npz(write_npz: WriteNpz, changes: dict[str, Any], message: str) -> None:
    path = write_npz(**changes)
    with pytest.raises(DataError, match=message) as caught:
        spoken_task(path)
    assert "digits.npz" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_empty_recording(write_npz: WriteNpz) -> None:
    offsets = np.load(write_npz())["offsets"]
    offsets[7] = offsets[6]
    with pytest.raises(DataError, match=r"increasing, got .* \(recording 6 is empty\)"):
        load_recordings(write_npz(offsets=offsets))


def test_tested_digit_that_was_never_trained(write_npz: WriteNpz) -> None:
    with np.load(write_npz()) as arrays:
        label, take = arrays["label"], arrays["take"]
    label[(label == 2) & (take >= 5)] = 1
    with pytest.raises(DataError, match="got 2 only in the test set"):
        spoken_task(write_npz(label=label))


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 broken", b"\x93NUMPY\x01\x00"])
def test_file_that_is_no_npz(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "wrong.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"--data to be an npz file, got '.*wrong\.npz'"):
        load_recordings(path)


def test_missing_file_folder_and_single_array(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.npz' \(No such file or directory\)"):
        load_recordings(tmp_path / "none.npz")
    with pytest.raises(DataError, match=r"\(Is a directory\)"):
        load_recordings(tmp_path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"\(a single array\)"):
        load_recordings(tmp_path / "one.npy")


def test_npz_with_a_damaged_member(write_npz: WriteNpz, tmp_path: Path) -> None:
    whole = write_npz()
    damaged = tmp_path / "damaged.npz"
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(damaged, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, data[: len(data) // 2] if name == "label.npy" else data)
    with pytest.raises(DataError, match=r"'label' .* a readable array"):
        load_recordings(damaged)


def test_classifier_reads_the_last_valid_step() -> None:
    torch.manual_seed(0)
    model = SequenceClassifier(n_features=3, hidden_size=5, n_classes=4)
    x = torch.randn(3, 6, 3)
    lengths = torch.tensor([2, 6, 4])
    scores = model(x, lengths)
    assert scores.shape == (3, 4)
    for i, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(scores[i : i + 1], model(x[i : i + 1, :length]))


def test_training_learns_and_is_reproducible(write_npz: WriteNpz) -> None:
    task = spoken_task(write_npz())
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        model = SequenceClassifier(task.n_features, 16, task.n_classes)
        losses: list[float] = []
        train(model, task.train, epochs=15, seed=3, batch_size=8, on_epoch=losses.append)
        states.append(model.state_dict())
    assert not model.training
    assert len(losses) == 15
    assert losses[-1] < losses[0] / 4
    assert (predict(model, task.test) == task.test.labels).double().mean() > 0.9
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
