"""Files of Keras that name bytes outside of them, or more bytes than they have."""

from __future__ import annotations

import contextlib
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from limits import MIB, memory, refused

from quant_gru import QuantGRU, QuantGRUError

h5py = pytest.importorskip("h5py")

CELL = "layers/gru/cell/vars"
SHAPE = (2, 6)


def kernels(file: Any, *names: str) -> None:
    """Write ordinary arrays of a GRU(2, 2)."""
    for name in names or ("0", "1"):
        file[f"{CELL}/{name}"] = np.ones(SHAPE, np.float32)


# --- bytes of other files


def external_dataset(file: Any, secret: Path) -> None:
    file.create_dataset(f"{CELL}/0", SHAPE, np.float32, external=[(str(secret), 0, 48)])
    kernels(file, "1")


def virtual_dataset(file: Any, secret: Path) -> None:
    other = secret.with_suffix(".h5")
    with h5py.File(other, "w") as source:
        source["data"] = np.ones(SHAPE, np.float32)
    layout = h5py.VirtualLayout(SHAPE, np.float32)
    layout[:] = h5py.VirtualSource(str(other), "data", SHAPE)
    file.create_virtual_dataset(f"{CELL}/0", layout)
    kernels(file, "1")


def external_link_to_an_array(file: Any, secret: Path) -> None:
    file[f"{CELL}/0"] = h5py.ExternalLink(other_file(secret), f"{CELL}/0")
    kernels(file, "1")


def external_link_to_a_group(file: Any, secret: Path) -> None:
    file["layers/gru"] = h5py.ExternalLink(other_file(secret), "layers/gru")


def external_link_to_everything(file: Any, secret: Path) -> None:
    file["layers"] = h5py.ExternalLink(other_file(secret), "layers")


def external_link_to_a_pipe(file: Any, secret: Path) -> None:
    os.mkfifo(secret.with_suffix(".pipe"))
    file["layers"] = h5py.ExternalLink(str(secret.with_suffix(".pipe")), "layers")


def soft_link_to_an_array(file: Any, secret: Path) -> None:
    kernels(file, "1")
    file[f"{CELL}/0"] = h5py.SoftLink(f"/{CELL}/1")


def soft_link_to_a_group(file: Any, secret: Path) -> None:
    file["elsewhere/0"] = file["elsewhere/1"] = np.ones(SHAPE, np.float32)
    file["layers/gru"] = h5py.SoftLink("/elsewhere")


def soft_link_to_nothing(file: Any, secret: Path) -> None:
    kernels(file)
    file["layers/gru/more"] = h5py.SoftLink("/nowhere")


def other_file(secret: Path) -> str:
    other = secret.with_suffix(".other.h5")
    with h5py.File(other, "w") as file:
        kernels(file)
    return str(other)


ELSEWHERE = {
    external_dataset: "stored in another file",
    virtual_dataset: "stored in another file or dataset",
    external_link_to_an_array: "'layers/gru/cell/vars/0' is a link",
    external_link_to_a_group: "'layers/gru' is a link",
    external_link_to_everything: "'layers' is a link",
    external_link_to_a_pipe: "'layers' is a link",
    soft_link_to_an_array: "is a link to another name",
    soft_link_to_a_group: "is a link to another name",
    soft_link_to_nothing: "is a link to another name",
}


@pytest.mark.parametrize("form", [".weights.h5", ".keras"])
@pytest.mark.parametrize(("write", "message"), ELSEWHERE.items())
def test_names_of_other_files_are_refused(write, message, form, tmp_path):
    secret = tmp_path / "secret.bin"
    secret.write_bytes(b"S" * 48)
    path = tmp_path / "m.weights.h5"
    with h5py.File(path, "w") as file:
        write(file, secret)
    if form == ".keras":
        path = packed(path)
    with refused(message):
        QuantGRU.from_keras(path)


def packed(path: Path, method: int = zipfile.ZIP_STORED, config: bytes = b"{}") -> Path:
    with zipfile.ZipFile(path.with_suffix(".keras"), "w", method) as archive:
        archive.writestr("config.json", config)
        archive.write(path, "model.weights.h5")
    return path.with_suffix(".keras")


# --- more bytes than the file has


def without_data(file: Any) -> None:
    file.create_dataset(f"{CELL}/0", (8192, 3 * 8192), np.float32)
    file.create_dataset(f"{CELL}/1", (8192, 3 * 8192), np.float32)


def partly_without_data(file: Any) -> None:
    for name in "01":
        sets = file.create_dataset(f"{CELL}/{name}", (4096, 3 * 4096), np.float32, chunks=(64, 96))
        sets[:64, :96] = 1


def compressed(file: Any) -> None:
    for name in "01":
        sets = file.create_dataset(
            f"{CELL}/{name}", (2048, 3 * 2048), np.float32, compression="gzip", fillvalue=1
        )
        sets[:64] = 1


def a_chunk_that_unpacks_to_more_than_its_size(file: Any) -> None:
    for name in "01":
        sets = file.create_dataset(
            f"{CELL}/{name}", SHAPE, np.float32, chunks=SHAPE, compression="gzip"
        )
        sets.id.write_direct_chunk((0, 0), zlib.compress(bytes(1 << 26)))


def a_name_that_is_a_list(file: Any) -> None:
    kernels(file)
    group = file.create_group("layers/gru/vars")
    group.attrs.create("name", ["x" * (1 << 10)] * 100, (100,), h5py.string_dtype())


def texts_in_place_of_numbers(file: Any) -> None:
    for name in "01":
        file.create_dataset(f"{CELL}/{name}", SHAPE, h5py.string_dtype())


LARGE = {
    without_data: "of 805306368 bytes, of which the file stores 0",
    partly_without_data: "of 201326592 bytes, of which the file stores 24576",
    compressed: "is packed, which Keras does not do; unpack it with h5repack",
    a_chunk_that_unpacks_to_more_than_its_size: "is packed",
    texts_in_place_of_numbers: "of dtype object",
}


@pytest.mark.parametrize(("write", "message"), LARGE.items())
def test_little_files_cannot_ask_for_much(write, message, tmp_path):
    path = tmp_path / "m.weights.h5"
    with h5py.File(path, "w") as file:
        write(file)
    assert path.stat().st_size < 1 << 20
    with refused(message):
        QuantGRU.from_keras(path)


def test_arrays_of_text_are_no_names(tmp_path):
    with h5py.File(tmp_path / "m.weights.h5", "w") as file:
        a_name_that_is_a_list(file)
    assert QuantGRU.from_keras(tmp_path / "m.weights.h5", "gru").hidden_size == 2


@pytest.mark.parametrize("bad", [without_data, compressed, virtual_dataset])
def test_other_layers_are_not_read(bad, tmp_path):
    path = tmp_path / "m.weights.h5"
    with h5py.File(path, "w") as file:
        bad(file, *([tmp_path / "secret"] if bad is virtual_dataset else []))
        file.move("layers/gru", "layers/other")
        kernels(file)
    assert QuantGRU.from_keras(path, "gru").hidden_size == 2
    with refused("of which the file stores 0|is packed|in another file"):
        QuantGRU.from_keras(path, "other")
    with refused("Expected layer to name one of 'gru', 'other'"):
        QuantGRU.from_keras(path)


def test_groups_in_a_circle(tmp_path):
    path = tmp_path / "m.weights.h5"
    with h5py.File(path, "w") as file:
        kernels(file)
        file["layers/gru/cell/again"] = file["layers"]
        file["layers/root"] = file["/"]
    assert QuantGRU.from_keras(path).hidden_size == 2


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (zipfile.ZIP_DEFLATED, "packed into"),
        (zipfile.ZIP_BZIP2, "another method than deflate"),
        (zipfile.ZIP_LZMA, "another method than deflate"),
    ],
)
@pytest.mark.parametrize("where", ["weights", "config"])
def test_archives_that_unpack_to_much_more(method, message, where, tmp_path):
    path = tmp_path / "m.weights.h5"
    path.write_bytes(bytes(1 << (25 if where == "weights" else 10)))
    made = packed(path, method, b"null" + b" " * (1 << 25 if where == "config" else 2))
    assert made.stat().st_size < 1 << 20
    with refused(message, most=16 * MIB):
        QuantGRU.from_keras(made)


@pytest.mark.parametrize("config", [b"[" * 100_000, b"[1e999, NaN]", b'"text"', b"[[[]]]", b"\xff"])
def test_odd_configurations(config, tmp_path):
    path = tmp_path / "m.weights.h5"
    with h5py.File(path, "w") as file:
        kernels(file)
    made = packed(path, config=config)
    if config[:1] in b'["' and len(config) < 100:
        assert QuantGRU.from_keras(made).hidden_size == 2
    else:
        with refused("Expected a file of Keras"):
            QuantGRU.from_keras(made)


def test_numbers_that_float32_cannot_hold(tmp_path):
    with h5py.File(tmp_path / "m.weights.h5", "w") as file:
        file[f"{CELL}/0"] = np.full(SHAPE, 1e300)
        kernels(file, "1")
    with refused("kernel to be numbers that float32 can hold, got 1e\\+300"):
        QuantGRU.from_keras(tmp_path / "m.weights.h5")


def test_many_groups(tmp_path):
    with h5py.File(tmp_path / "m.weights.h5", "w") as file:
        kernels(file)
        for index in range(500):
            file.create_group(f"layers/{index}/vars")
    with refused("got 'none'"):
        QuantGRU.from_keras(tmp_path / "m.weights.h5", "none")


@pytest.mark.parametrize("form", ["m.h5", "m.keras"])
def test_damaged_files(form, tmp_path):
    path = tmp_path / "m.weights.h5"
    with h5py.File(path, "w") as file:
        kernels(file, "0", "1", "2")
        file.attrs["model_config"] = '{"class_name": "GRU", "config": {"name": "gru"}}'
    raw = (packed(path) if form == "m.keras" else path).read_bytes()
    generator = np.random.default_rng(0)
    bad = tmp_path / form
    for count in (1, 3, 8) * 30:
        cut = generator.integers(1, len(raw)) if generator.random() < 0.5 else len(raw)
        data = bytearray(raw[:cut])
        for at in generator.integers(0, len(data), count):
            data[at] = generator.integers(0, 256)
        bad.write_bytes(bytes(data))
        with memory(64 * MIB), contextlib.suppress(QuantGRUError):
            QuantGRU.from_keras(bad)
