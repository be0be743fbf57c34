"""Every kernel compiles without a GPU, and compiled kernels are kept safely on disk."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kernel_runtime.cuda import compiler, disk_cache
from kernel_runtime.cuda.launch import PLAIN
from quant_gru import QuantGRUError
from quant_gru.kernels.cuda.backward.derivatives_planner import SlopesShape
from quant_gru.kernels.cuda.backward.grid_planner import GridShape
from quant_gru.kernels.cuda.backward.planner import BackShape
from quant_gru.kernels.cuda.plan.structure import Form, Gates
from quant_gru.kernels.cuda.projection.from_codes import (
    LARGE,
    MEDIUM,
    SMALL,
    STAYING,
    End,
)
from quant_gru.kernels.cuda.projection.from_reals import (
    ALONE,
    COLUMNS,
    TALL,
    TWO_PLANES,
    Groups,
    macros_of,
)
from quant_gru.kernels.cuda.projection.from_reals import MEDIUM as REAL_MEDIUM
from quant_gru.kernels.cuda.projection.from_reals import SMALL as REAL_SMALL
from quant_gru.kernels.cuda.recurrence import planner

pytestmark = pytest.mark.skipif(not compiler.available(), reason="needs NVRTC")

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100")
BYTES = Form(True, "float", False, 1, 1, False, 1, (0, 0, 0), 3072, (True, True, True), powers=True)
IN_HALVES = Form(True, "double", False, 1, 2, True, 2, (2, 2, 2), 18432, (True,) * 3)
FORMS = {
    "w8a8": BYTES,
    "w8a8-fused": Form(True, "float", False, 1, 1, False, 1, (0, 0, 0), 3072, (False,) * 3),
    "w8a16": IN_HALVES,
    "w8a16-float": replace(IN_HALVES, own=Gates("float", (3, 3, 0), 73728), powers=True),
    "w8a16-lines": replace(IN_HALVES, own=Gates("double", (3, 3, 2), 73728)),
    "w8a16-words": Form(True, "double", True, 1, 2, True, 4, (1, 0, 2), 9216, (False,) * 3),
    "w16a16": Form(True, "double", False, 2, 2, True, 2, (2, 2, 2), 18432, (True,) * 3),
    "w16a8": Form(True, "double", False, 2, 1, False, 1, (0, 0, 0), 3072, (True,) * 3),
    "zoneout": replace(BYTES, zoneout=True),
    "w16a16-zoneout": Form(
        True, "double", True, 2, 2, True, 2, (2, 2, 2), 18432, (False,) * 3, zoneout=True
    ),
}
# blocks, split, spread, rows
SHAPES = [(1, 1, 1, 8), (1, 1, 2, 2), (4, 1, 2, 8), (4, 2, 1, 4), (16, 2, 1, 2), (4, 2, 1, 16)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "cache"))


def variants(arch):
    yield "probe", {}
    yield "projection/int_mm", PLAIN
    for tile, planes in ((SMALL, 1), (MEDIUM, 1), (LARGE, 1), (SMALL, 2), (MEDIUM, 2)):
        yield "projection/codes_tiled", tile.macros(End(planes))
    for end in (End(1), End(2), End(2, 3, True), End(2, 3, True, True)):
        yield "projection/codes_weight_stationary", STAYING[end.planes].macros(end)
    for planes in (1, 2):
        yield "projection/reals_few_rows", {**PLAIN, "WIDE": planes - 1}
    for i, block in enumerate((REAL_SMALL, REAL_MEDIUM, TALL, ALONE[1][0], ALONE[1][-1])):
        end = End(1, 1 - i % 2)
        yield (
            "projection/reals_tiled",
            macros_of(block, end, 1 << i % 4, (128, 129)[i % 2], i > 1, i < 2),
        )
    if arch == "sm_90a":
        for i, columns in enumerate(COLUMNS):
            features = (64, 129, 256, 255, 384)[i]
            block = Groups(columns, 1, 256, -(-features // 16) * 16)
            end = End(1, i % 3, i == 4)
            yield (
                "projection/reals_wgmma",
                macros_of(block, end, 1 << i % 4, features, i > 1, i > 2),
            )
            if columns % 2:
                continue
            block = replace(block, columns=columns // 2, planes=2)
            end = End(2, i % 4, i % 2 == 0, i > 1)
            yield (
                "projection/reals_wgmma",
                macros_of(block, end, 8 >> i % 4, features, i > 1, i % 2 == 1),
            )
    for i, block in enumerate((TWO_PLANES, ALONE[2][-1])):
        for end in (End(2, i), End(2, 2 + i, i == 1)):
            yield (
                "projection/reals_tiled",
                macros_of(block, end, 2 << 2 * i, (256, 63)[i], i == 0, False),
            )
    for name in (
        "quantize_dequantize",
        "clamp_mask",
        "requantize_training",
        "quantize_input",
        "requantize_layers",
    ):
        yield f"boundary/{name}", PLAIN
    for name in ("row_scales", "requantize"):
        yield f"weights/{name}", PLAIN
    yield "boundary/random_events", {}
    yield "recurrence/wide_integers", {"QG_WORDS": 1, **BYTES.products}
    yield "recurrence/wide_integers", {"QG_WORDS": 1, **FORMS["zoneout"].products}
    yield "recurrence/per_step", {"REAL": "double", "QG_WORDS": 0, **FORMS["zoneout"].products}
    for real in ("float", "double"):
        yield (
            "recurrence/per_step",
            {"REAL": real, "QG_WORDS": int(real == "double"), **BYTES.products},
        )
    yield from backward_variants(arch)
    for index, (name, form) in enumerate(FORMS.items()):
        for place, (blocks, split, spread, rows) in enumerate(SHAPES):
            # every form in one shape, every shape in one form; two strips for bytes of weights
            wanted = index == 0 or place == (index - 1) % (len(SHAPES) - 1)
            if rows == 16 and name == "w8a16-float":
                wanted = True
            if wanted and (blocks == 1 or arch != "sm_80"):
                shape = planner.make_shape(96 if blocks < 16 else 256, blocks, split, spread, rows)
                macros = shape.macros(form, 96, 1 + place % 2)
                ends = planner.Ends(values=place % 3 != 1, codes=place % 3 != 0)
                kernel, _ = planner.layout(shape, form, 96, 8, 2, ends=ends)
                # where only instructions of an architecture are new, each in one of both ways
                both = arch == "sm_90a"
                if both or (index + place) % 2:
                    yield "recurrence/persistent", macros
                if both or (index + place) % 2 == 0:
                    yield "recurrence/persistent", dict(kernel.macros)

    saturated = replace(BYTES, saturated=True)
    for blocks, units in ((1, 64), (1, 96), (2, 256), (4, 256)):
        if blocks == 1 or arch != "sm_80":
            shape = planner.make_shape(units, blocks, 1, 1, 2 * blocks)
            assert shape.macros(saturated, units, 1)["SATURATED"] == 1
            for held in (False, True):
                ends = planner.Ends(values=True, codes=held)
                kernel, _ = planner.layout(shape, saturated, units, 8, 2, held=held, ends=ends)
                yield "recurrence/persistent", dict(kernel.macros)
    if arch != "sm_80":
        for name, shape in (("w8a8", (2, 2, 1, 8)), ("w8a16-float", (2, 2, 1, 16))):
            yield (
                "recurrence/persistent",
                planner.make_shape(128, *shape).macros(FORMS[name], 128, 1),
            )
            made = planner.make_shape(256, *shape)
            ends = planner.Ends(values=True, codes=False)
            kernel, _ = planner.layout(made, FORMS[name], 256, 64, 1, ends=ends, stretch=8)
            yield "recurrence/persistent", dict(kernel.macros)
    if arch == "sm_90a":
        # weights that leave few registers
        tight = planner.make_shape(1024, 16, 2, 1, 16).macros(FORMS["w8a16-float"], 1024, 1)
        assert tight["TIGHT"] == 1
        yield "recurrence/persistent", tight


def backward_variants(arch):
    for operand in range(3):
        common = {**PLAIN, "OPERAND": operand, "HALF": int(operand == 0), "DIRS": 1 + operand % 2}
        yield "backward/operands", common
        yield "backward/projection_gradients", {**common, "WIDE": 1 + operand % 2}
        yield "backward/recurrence_step", common
    for index, form in enumerate(FORMS.values()):
        macros = {
            **common,
            "HALF": index % 2,
            "REAL": form.real,
            "QG_WORDS": int(form.words),
            **dict(zip(("TZ", "TR", "TG"), form.tables, strict=True)),
            **form.products,
        }
        in_bytes = max(form.weight_bytes, form.state_bytes) == 1
        yield "backward/local_derivatives", {**macros, "BYTES": int(in_bytes)}
        if in_bytes:
            every = index == 0 and arch == "sm_90a"
            for unit_warps, groups in ((2, 4), (4, 3), (1, 6))[: 3 if every else 1]:
                shape = SlopesShape(unit_warps, groups, (64, 128), form.table_bytes)
                yield "backward/local_derivatives_bytes", {**macros, **shape.macros}
            if index == 0:
                # wide gates between bytes
                in_double = {"REAL": "double", "TZ": 2, "TR": 1}
                yield "backward/local_derivatives_bytes", {**macros, **in_double, **shape.macros}
    # units of a block, blocks, tiles, split, rows, parts of gradients and of weights
    for shape in ((64, 1, 1, 2, 8, 1, 1), (24, 4, 3, 1, 8, 1, 1), (32, 8, 2, 1, 4, 3, 2)):
        if shape[1] == 1 or arch != "sm_80":
            found = BackShape(*shape)
            yield "backward/recurrence", {**PLAIN, **found.macros(shape[5] == 1, 0, 2)}
    # units, blocks, tiles, columns, warps, parked, chunk, ahead
    for index, shape in enumerate(
        ((1024, 1, 2, 2, 8, 4, 2, 2), (1024, 2, 4, 2, 8, 3, 2, 2), (800, 1, 1, 1, 8, 1, 4, 2))
    ):
        if shape[1] == 1 or arch != "sm_80":
            yield "backward/recurrence_grid", {**PLAIN, **GridShape(*shape).macros(index < 2)}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles(arch):
    jobs = list(variants(arch))
    with ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(lambda job: compiler.machine_code(*job, arch), jobs))
    assert all(code.startswith(b"\x7fELF") for code in codes)


def test_an_error_carries_the_compilers_log():
    with pytest.raises(QuantGRUError, match=r"(?s)NVRTC .* broken.cu .*undefined_name"):
        compiler.compile_source("broken", "int x = undefined_name;", ("-arch=sm_90",))


def test_the_second_time_comes_from_disk(monkeypatch):
    first = compiler.machine_code("probe", {}, "sm_90a")
    monkeypatch.setattr(compiler, "compile_source", lambda *_: pytest.fail("compiled again"))
    assert compiler.machine_code("probe", {}, "sm_90a") == first


@pytest.mark.parametrize("damage", [b"", b"short", None, "content", "other"])
def test_a_damaged_entry_is_compiled_again(damage):
    code = compiler.machine_code("probe", {}, "sm_90a")
    (path,) = disk_cache.entries()
    whole = path.read_bytes()
    if damage == "other":  # one of another kernel, whole
        compiler.machine_code("probe", {}, "sm_80")
        (other,) = (each for each in disk_cache.entries() if each != path)
        path.write_bytes(other.read_bytes())
    elif damage is None:
        path.write_bytes(whole[:-1])
    elif damage == "content":
        path.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    else:
        path.write_bytes(damage)
    assert compiler.machine_code("probe", {}, "sm_90a") == code
    assert path.read_bytes() == whole


def test_the_key_has_everything_that_decides(monkeypatch, tmp_path):
    for macros, arch in (({}, "sm_90a"), ({"A": 1}, "sm_90a"), ({"A": 2}, "sm_90a"), ({}, "sm_80")):
        compiler.machine_code("probe", macros, arch)
    assert len(list(disk_cache.entries())) == 4
    (tmp_path / "probe.cu").write_text((compiler._HERE / "probe.cu").read_text() + "\n")
    headers, options = compiler._headers(), compiler._options()
    others = {
        "version": lambda: "99.9",
        "_HERE": tmp_path,
        "_headers": lambda: {**headers, "ptx.cuh": headers["ptx.cuh"] + "\n"},
        "_options": lambda: (*options, "-DANYTHING"),
    }
    for count, (name, other) in enumerate(others.items(), 5):
        with monkeypatch.context() as patched:
            patched.setattr(compiler, name, other)
            compiler.machine_code("probe", {}, "sm_90a")
        assert len(list(disk_cache.entries())) == count, name
    compiler.machine_code("probe", {}, "sm_90a")
    assert len(list(disk_cache.entries())) == 8
    assert disk_cache.key(["ab", "c"]) != disk_cache.key(["a", "bc"])


def test_processes_may_write_at_once():
    program = (
        "from quant_gru.kernels.cuda import compiler;"
        "print(len(compiler.machine_code('probe', {}, 'sm_90a')))"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    sizes = {process.communicate()[0] for process in running}
    assert len(sizes) == 1
    (path,) = disk_cache.entries()
    assert disk_cache.load(path.stem) is not None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "file" / "cache"))
    assert compiler.machine_code("probe", {}, "sm_90a").startswith(b"\x7fELF")
    assert not list(disk_cache.entries())


def test_where_the_cache_lies(monkeypatch, tmp_path):
    assert disk_cache.folder() == tmp_path / "cache"
    monkeypatch.delenv(disk_cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk_cache.folder() == tmp_path / "quant-gru"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert disk_cache.folder().parts[-2:] == (".cache", "quant-gru")


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(disk_cache.VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(disk_cache.Path, "home", home)
    disk_cache.store("name", b"code")
    assert disk_cache.load("name") is None
    with pytest.raises(
        QuantGRUError, match=f"Expected {disk_cache.VARIABLE}, XDG_CACHE_HOME or HOME"
    ):
        disk_cache.clear()


def test_without_nvrtc_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    compiler.version.cache_clear()
    assert not compiler.available()
    with pytest.raises(QuantGRUError, match=r'pip install "cuda-bindings==\d+\.\*"'):
        compiler.version()


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
        pytest.skip("tables of other chips")
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
    assert (
        planner.rounds(light, BYTES, 7, RESIDENT) == planner.rounds(heavy, BYTES, 7, RESIDENT) == 1
    )
    assert (
        1 < planner.rounds(light, BYTES, 8, RESIDENT) < planner.rounds(light, BYTES, 15, RESIDENT)
    )
    assert planner.rounds(heavy, BYTES, 8, RESIDENT) == 2


def test_blocks_with_tables_share_where_fewer_steps_are_ahead():
    form = replace(IN_HALVES, own=Gates("float", (3, 3, 3), 98328))
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
        times = [planner.step_time(shape, form) for shape in (one, two)]
        assert times[0] <= times[1] < 2 * times[0]
