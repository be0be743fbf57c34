"""Every kernel compiles without a GPU, and compiled kernels are kept safely on disk."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from projection_blocks import (
    COLUMNS,
    LARGE_TILE,
    MEDIUM_TILE,
    SMALL_TILE,
    STATIONARY,
    TALL,
    alone,
    medium,
    small,
    two_planes,
)
from recurrence_layouts import StateOutputs, layout

from quant_gru.kernel_runtime.cuda import compiler
from quant_gru.kernels._native import (
    PLAIN,
    BackGridShape,
    BackShape,
    DerivativesShape,
    Epilogue,
    Form,
    Gates,
    Warpgroups,
    real_macros,
)
from quant_gru.kernels.cuda.machine import SOURCES
from quant_gru.kernels.cuda.recurrence import planner

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiler.missing() is not None, reason="needs NVRTC"),
]

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100")
BYTES = Form(True, "float", False, 1, 1, False, 1, (0, 0, 0), 3072, (True, True, True), powers=True)
IN_HALVES = Form(True, "double", False, 1, 2, True, 2, (2, 2, 2), 18432, (True,) * 3)
FIELDS = "narrow real words weight_bytes state_bytes wide_input out_bytes tables table_bytes fused"
FIELDS += " zoneout own saturated powers"


def changed(form, **changes):
    """A form with other properties."""
    return Form(**{name: getattr(form, name) for name in FIELDS.split()} | changes)


FORMS = {
    "w8a8": BYTES,
    "w8a8-fused": Form(True, "float", False, 1, 1, False, 1, (0, 0, 0), 3072, (False,) * 3),
    "w8a16": IN_HALVES,
    "w8a16-float": changed(IN_HALVES, own=Gates("float", (3, 3, 0), 73728), powers=True),
    "w8a16-lines": changed(IN_HALVES, own=Gates("double", (3, 3, 2), 73728)),
    "w8a16-words": Form(True, "double", True, 1, 2, True, 4, (1, 0, 2), 9216, (False,) * 3),
    "w16a16": Form(True, "double", False, 2, 2, True, 2, (2, 2, 2), 18432, (True,) * 3),
    "w16a8": Form(True, "double", False, 2, 1, False, 1, (0, 0, 0), 3072, (True,) * 3),
    "zoneout": changed(BYTES, zoneout=True),
    "w16a16-zoneout": Form(
        True, "double", True, 2, 2, True, 2, (2, 2, 2), 18432, (False,) * 3, zoneout=True
    ),
}
# blocks, split, spread, rows
SHAPES = [(1, 1, 1, 8), (1, 1, 2, 2), (4, 1, 2, 8), (4, 2, 1, 4), (16, 2, 1, 2), (4, 2, 1, 16)]


def machine_code(name, macros, arch):
    return compiler.machine_code(SOURCES, name, macros, arch)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(SOURCES.cache.variable, str(tmp_path / "cache"))


def variants(arch):
    yield "probe", {}
    yield "projection/int_mm", PLAIN
    for tile, planes in (
        (SMALL_TILE, 1),
        (MEDIUM_TILE, 1),
        (LARGE_TILE, 1),
        (SMALL_TILE, 2),
        (MEDIUM_TILE, 2),
    ):
        yield "projection/codes_tiled", tile.macros(Epilogue(planes))
    for end in (Epilogue(1), Epilogue(2), Epilogue(2, 3, True), Epilogue(2, 3, True, True)):
        yield "projection/codes_weight_stationary", STATIONARY[end.planes].macros(end)
    for planes in (1, 2):
        yield "projection/reals_few_rows", {**PLAIN, "WIDE": planes - 1}
    for i, block in enumerate((small(), medium(), TALL, alone(5, 1), alone(13, 1))):
        end = Epilogue(1, 1 - i % 2)
        yield (
            "projection/reals_tiled",
            real_macros(block, end, 1 << i % 4, (128, 129)[i % 2], i > 1, i < 2),
        )
    if arch == "sm_90a":
        for i, columns in enumerate(COLUMNS):
            features = (64, 129, 256, 255, 384)[i]
            padded = -(-features // 16) * 16
            block = Warpgroups(columns, 1, 256, padded)
            end = Epilogue(1, i % 3, i == 4)
            yield (
                "projection/reals_wgmma",
                real_macros(block, end, 1 << i % 4, features, i > 1, i > 2),
            )
            if columns % 4:
                continue
            block = Warpgroups(columns // 2, 1, 256, padded, 2)
            end = Epilogue(2, i % 4, i % 2 == 0, i > 1)
            yield (
                "projection/reals_wgmma",
                real_macros(block, end, 8 >> i % 4, features, i > 1, i % 2 == 1),
            )
    for i, block in enumerate((two_planes(), alone(7, 2))):
        for end in (Epilogue(2, i), Epilogue(2, 2 + i, i == 1)):
            yield (
                "projection/reals_tiled",
                real_macros(block, end, 2 << 2 * i, (256, 63)[i], i == 0, False),
            )
    for name in (
        "quantize_dequantize",
        "clamp_mask",
        "requantize_training",
        "quantize_input",
        "requantize_layers",
    ):
        yield f"boundary/{name}", PLAIN
    for name in ("row_scales", "correct_bias", "requantize", "derive"):
        yield f"weights/{name}", PLAIN
    yield "boundary/random_events", {}
    yield "weights/contents", {}
    for rule, form in ((0, BYTES), (3, FORMS["zoneout"])):
        yield "recurrence/wide_integers", {"QG_WORDS": 1, "QG_RULE": rule, **form.products}
    yield "recurrence/per_step", {"REAL": "double", "QG_WORDS": 0, **FORMS["zoneout"].products}
    for real in ("float", "double"):
        yield (
            "recurrence/per_step",
            {"REAL": real, "QG_WORDS": int(real == "double"), **BYTES.products},
        )
    yield from backward_variants(arch)
    yield from ruled_variants(arch)
    for index, (name, form) in enumerate(FORMS.items()):
        for place, (blocks, split, spread, rows) in enumerate(SHAPES):
            # every form in one shape, every shape in one form; two strips for bytes of weights
            wanted = index == 0 or place == (index - 1) % (len(SHAPES) - 1)
            if rows == 16 and name == "w8a16-float":
                wanted = True
            if wanted and (blocks == 1 or arch != "sm_80"):
                shape = planner.make_shape(96 if blocks < 16 else 256, blocks, split, spread, rows)
                macros = shape.macros(form, 96, 1 + place % 2)
                outputs = StateOutputs(values=place % 3 != 1, codes=place % 3 != 0)
                kernel, _ = layout(shape, form, 96, 8, 2, outputs=outputs)
                # each in one of both ways
                yield "recurrence/persistent", macros if place % 2 else dict(kernel.macros)

    saturated = changed(BYTES, saturated=True)
    for blocks, units, held in ((1, 64, True), (1, 96, False), (2, 256, True), (4, 256, False)):
        if blocks == 1 or arch != "sm_80":
            shape = planner.make_shape(units, blocks, 1, 1, 2 * blocks)
            assert shape.macros(saturated, units, 1)["SATURATED"] == 1
            outputs = StateOutputs(values=True, codes=held)
            kernel, _ = layout(shape, saturated, units, 8, 2, held=held, outputs=outputs)
            yield "recurrence/persistent", dict(kernel.macros)
    if arch != "sm_80":
        for name, shape in (("w8a8", (2, 2, 1, 8)), ("w8a16-float", (2, 2, 1, 16))):
            yield (
                "recurrence/persistent",
                planner.make_shape(128, *shape).macros(FORMS[name], 128, 1),
            )
            made = planner.make_shape(256, *shape)
            outputs = StateOutputs(values=True, codes=False)
            kernel, _ = layout(made, FORMS[name], 256, 64, 1, outputs=outputs, chunk=8)
            yield "recurrence/persistent", dict(kernel.macros)
    if arch == "sm_90a":
        # weights that leave few registers
        tight = planner.make_shape(1024, 16, 2, 1, 16).macros(FORMS["w8a16-float"], 1024, 1)
        assert tight["TIGHT"] == 1
        yield "recurrence/persistent", tight


def ruled_variants(arch):
    """Each rule in the kernels that round, in half of their variants."""
    for rule in (1, 2, 3):
        rules = {"QG_RULE": rule, "QG_INPUT_RULE": rule}
        form = changed(BYTES, saturated=rule != 2, rounding=rule, rounding_input=rule)
        kernel, _ = layout(planner.make_shape(64, 1, 1, 1, 4), form, 64, 8, 2)
        yield "recurrence/persistent", dict(kernel.macros)
        wide = FORMS["w8a16-float" if rule == 1 and arch != "sm_80" else "w8a16"]
        form = changed(wide, rounding=rule, rounding_input=rule)
        yield "recurrence/persistent", planner.make_shape(96, 1, 1, 1, 4).macros(form, 96, 1)
        if rule == 1:
            macros = real_macros(two_planes(), Epilogue(2, 3, True), 4, 129, False, True)
            yield "projection/reals_tiled", {**macros, **rules}
        for name in ("clamp_mask", "requantize_training", "quantize_input"):
            yield f"boundary/{name}", {**PLAIN, **rules}


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
        if in_bytes and index % 2 == 0:
            every = index == 0 and arch == "sm_90a"
            for unit_warps, groups in ((2, 4), (4, 3), (1, 6))[: 3 if every else 1]:
                shape = DerivativesShape(unit_warps, groups, (64, 128), form.table_bytes)
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
            yield "backward/recurrence_grid", {**PLAIN, **BackGridShape(*shape).macros(index < 2)}


def jobs_of(arch):
    """The variants that are compiled for an architecture: each for one of those that have it.

    Only ptx_*.cuh ask for the architecture, and most kernels include them.
    """
    having = []
    for each in ARCHITECTURES:
        for job in variants(each):
            for known, architectures in having:
                if known == job:
                    architectures.append(each)
                    break
            else:
                having.append((job, [each]))
    turns, jobs = Counter(), []
    for job, architectures in having:
        # of those that the same architectures have, each gets as many
        turn = turns[tuple(architectures)]
        turns[tuple(architectures)] += 1
        if architectures[turn % len(architectures)] == arch:
            jobs.append(job)
    return jobs


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles(arch):
    jobs = jobs_of(arch)
    with ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(lambda job: machine_code(*job, arch), jobs))
    assert all(code.startswith(b"\x7fELF") for code in codes)
