"""A plan as C99 source: one file of code and constants, a header, and a self-test."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from quant_gru.config import FIXED_RANGE
from quant_gru.config.files import write_files
from quant_gru.errors import QuantGRUError
from quant_gru.execution.layers import run_codes
from quant_gru.integer.plan import GRUPlan
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.rounding import NUMBERS
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.interchange.c.cell import CellSource, cell_source, is_wide
from quant_gru.interchange.c.text import HERE, SIZES, array, fill, type_of

MOST_COLUMNS = 1 << 15  # sums of products of 32-bit operands stay within their integers
_KEYWORDS = frozenset(
    "auto break case char const continue default do double else enum extern float for goto if "
    "inline int long main register restrict return short signed sizeof static struct switch "
    "typedef union unsigned void volatile while class new this template".split()
)
_HEADERS = frozenset(  # #include <string.h> would find string.h of the GRU
    "assert complex ctype errno fenv inttypes iso646 limits locale math setjmp signal stdarg "
    "stdbool stddef stdint stdio stdlib string tgmath time wchar wctype "
    # what the headers of C libraries and compilers include themselves
    "arm_acle arm_mve arm_mve_types corecrt crtdefs features newlib sal strings vadefs vcruntime "
    "xlocale yvals".split()
)
_TARGETS = frozenset(  # names that CMake keeps for itself
    "all clean default_target depend edit_cache help install list_install_components package "
    "package_source preinstall rebuild_cache test".split()
)
_RULE = "#ifndef QG_RULE\n#define QG_RULE {}\n#endif\n"
# when a quotient cut off towards zero goes up and down
_INPUT_MOVES = {
    "half_even": (
        "rest > 0.5f || (rest == 0.5f && whole % 2 != 0)",
        "rest < -0.5f || (rest == -0.5f && whole % 2 != 0)",
    ),
    "half_away": ("rest >= 0.5f", "rest <= -0.5f"),
    "half_up": ("rest >= 0.5f", "rest < -0.5f"),
    "floor": ("0", "rest < 0.0f"),
}
_WIDE = "#ifndef QG_WIDE_VALUES\n#define QG_WIDE_VALUES 1\n#endif\n"


@dataclass(frozen=True)
class CSource:
    """What `export_c` wrote.

    Attributes:
        directory: Where the files are.
        files: Their names.
        weight_bytes: Flash of weights, biases and multipliers.
        table_bytes: Flash of tables.
        flash_bytes: Both; code is not counted.
        ram_bytes: Size of the state structure, scratch memory included.
        macs: Multiply-accumulates of a step, of all layers and directions.
    """

    directory: Path
    files: tuple[str, ...]
    weight_bytes: int
    table_bytes: int
    flash_bytes: int
    ram_bytes: int
    macs: int


def export_c(
    plan: GRUPlan, directory: str | os.PathLike[str], name: str, steps: int = 8, seed: int = 0
) -> CSource:
    """Write a GRU as C source.

    Args:
        plan: The plan, on the CPU.
        directory: Created if it does not exist; files in it are replaced.
        name: Start of all public names, a C identifier in lower case.
        steps: Steps of the golden vectors in the self-test.
        seed: Of the golden vectors.

    Raises:
        QuantGRUError: An argument is invalid, or the directory cannot be written.
    """
    check(plan, name, steps)
    cells = [cell for layer in plan.cells for cell in layer]
    model = Model(plan, name)
    sources = [
        cell_source(
            cell,
            layer,
            direction,
            model.below(layer, direction),
            name=name,
            input_type=model.input_type if layer == 0 else model.code_type,
            code_type=model.code_type,
        )
        for layer, directions in enumerate(plan.cells)
        for direction, cell in enumerate(directions)
    ]
    flash = sum(sum(each.bytes.values()) for each in sources)
    tables = sum(each.bytes[out] for each in sources for out in FIXED_RANGE)
    macs = sum(cell.weights.W.numel() + cell.weights.R.numel() for cell in cells)
    operands = _operands(sources)
    value_type = "int64_t" if model.wide else "int32_t"
    ram = _ram(model, operands, value_type)
    planes = 2 * -(-max(max(each.planes for each in sources), 1) // 16) * 16
    header, code = model.fill(
        sources, operands, value_type, flash=flash, ram=ram, macs=macs, planes=planes
    )
    fixed_point = resources.files("quant_gru.kernels") / "c99" / "fixed_point.h"
    files = {
        "fixed_point.h": fixed_point.read_text(encoding="utf-8"),
        "gru_arithmetic.h": (HERE / "gru_arithmetic.h").read_text(encoding="utf-8"),
        "gru_helium.h": (HERE / "gru_helium.h").read_text(encoding="utf-8"),
        "gru_products.h": (HERE / "gru_products.h").read_text(encoding="utf-8"),
        f"{name}.h": header,
        f"{name}.c": code,
        f"{name}_selftest.c": model.selftest(steps, seed),
        "CMakeLists.txt": fill("CMakeLists.txt.in", name=name),
    }
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QuantGRUError(
            f"Expected a directory to write to, got {error.strerror} ({str(folder)!r})"
        ) from error
    write_files({folder / file: text for file, text in files.items()})
    return CSource(folder, tuple(files), flash - tables, tables, flash, ram, macs)


class Model:
    """Types and names that all cells share."""

    def __init__(self, plan: GRUPlan, name: str) -> None:
        self.plan, self.name = plan, name
        self.cells = [cell for layer in plan.cells for cell in layer]
        self.H, self.C = self.cells[0].hidden_size, self.cells[0].input_size
        self.D, self.layers = len(plan.cells[0]), len(plan.cells)
        self.rule = NUMBERS[self.cells[0].frozen.rounding]
        self.x: Quantizer = self.cells[0].border
        self.input_type = type_of(self.x.lo, self.x.hi)
        self.code_type = type_of(
            min(cell.h.lo for cell in self.cells), max(cell.h.hi for cell in self.cells)
        )
        self.wide = any(map(is_wide, self.cells))

    def below(self, layer: int, direction: int) -> list[tuple[WeightedSum, Quantizer]]:
        """Return the sums from the layer below, and the quantizers of its codes."""
        if layer == 0:
            return []
        sums = self.plan.between[layer - 1][direction]
        lower = self.plan.cells[layer - 1]
        return [(each, cell.h) for each, cell in zip(sums, lower, strict=True)]

    def fill(
        self,
        sources: list[CellSource],
        operands: dict[str, tuple[str, int]],
        value_type: str,
        **sizes: int,
    ) -> tuple[str, str]:
        """Return the header and the source."""
        both, count = self.D == 2, len(self.cells)
        top = self.plan.cells[-1]
        what = f"{self.layers} layer{'s' * (self.layers > 1)}{', both directions' * both}"
        common: dict[str, object] = {
            "name": self.name,
            "NAME": self.name.upper(),
            "version": _version(),
            "input_size": self.C,
            "hidden_size": self.H,
            "directions": self.D,
        }
        header = fill(
            "model.h.in",
            what=what,
            layers=self.layers,
            input_bits=self.x.bits,
            input_type=self.input_type,
            code_type=self.code_type,
            value_type=value_type,
            cells=count,
            gates=3 * self.H,
            operands="".join(
                f"        {ctype} {field}[{size}];\n" for field, (ctype, size) in operands.items()
            ),
            ram_more=", and the caller's `work`" if both and self.layers > 1 else "",
            declarations=fill("run.h.in" if both else "step.h.in", **common),
            **sizes,
            **common,
        )
        up, down = _INPUT_MOVES[self.plan.cells[0][0].border.rounding]
        code = fill(
            "model.c.in",
            wide=_WIDE if self.wide else "",
            rounding=_RULE.format(self.rule) if self.rule else "",
            rule=self.rule,
            input_rule=self.plan.cells[0][0].border.rounding,
            input_up=up,
            input_down=down,
            value_bits=64 if self.wide else 32,
            cells="\n".join(each.text for each in sources),
            count=count,
            zeros=", ".join(str(cell.h.zero_point) for cell in self.cells),
            functions=self._functions(sources, common),
            input_scale=f"{float.hex(self.x.scale)}f",
            input_lo=self.x.lo,
            input_hi=self.x.hi,
            input_zero=self.x.zero_point,
            input_nan=self.x.inner.zero_point,
            output_scales=", ".join(f"{float.hex(cell.h.scale)}f" for cell in top),
            output_zeros=", ".join(str(cell.h.zero_point) for cell in top),
            **common,
        )
        return header, code

    def _functions(self, sources: list[CellSource], common: dict[str, object]) -> str:
        calls = ""
        if self.D == 1:
            for cell, each in enumerate(sources):
                source = f"state->h[{cell - 1}]" if cell else "x"
                calls += f"    {each.prefix}_step({source}, state->h[{cell}], state);\n"
            return fill("step.c.in", calls=calls, last=len(sources) - 1, **common)
        width, source = 2 * self.H, "x"
        for cell, each in enumerate(sources):
            layer, direction = divmod(cell, 2)
            target = "y" if (self.layers - 1 - layer) % 2 == 0 else "work"
            size = self.C if layer == 0 else width
            t = "steps - 1 - n" if direction else "n"
            calls += (
                f"    for (n = 0; n < steps; ++n) {{\n"
                f"        const size_t t = {t};\n"
                f"        {each.prefix}_step({source} + t * {size}, state->h[{cell}], state);\n"
                f"        QG_COPY({target} + t * {width} + {direction * self.H}, "
                f"state->h[{cell}], sizeof state->h[{cell}]);\n"
                f"    }}\n"
            )
            source = target if direction else source
        return fill("run.c.in", calls=calls, **common)

    def selftest(self, steps: int, seed: int) -> str:
        """Return a program that compares golden vectors."""
        x, y, h = golden_vectors(self.plan, steps, seed)
        name, both = self.name, self.D == 2
        work = both and self.layers > 1
        sizes: dict[str, object] = {
            "name": name,
            "NAME": name.upper(),
            "layers": self.layers,
            "directions": self.D,
            "outputs": y.numel(),
            "input_size": self.C,
            "hidden_size": self.H,
        }
        return fill(
            "selftest.c.in",
            steps=steps,
            x=array(f"{name}_input", "golden_x", x.flatten().tolist()),
            y=array(f"{name}_code", "golden_y", y.flatten().tolist()),
            h=array(f"{name}_code", "golden_h", h.flatten().tolist()),
            work=f"static {name}_code work[{y.numel()}];\n" if work else "",
            work_argument=(", work" if work else ", NULL") if both else "",
            by_steps="" if both else fill("by_steps.c.in", **sizes),
            states=h.numel(),
            total=(1 if both else 2) * y.numel() + h.numel(),
            **sizes,
        )


def golden_vectors(plan: GRUPlan, steps: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random codes and what the plan makes of them, from zero states.

    Returns:
        x (T, C), y (T, D*H) and the last states (layers * D, H), int64.
    """
    first = plan.cells[0]
    quantizer = first[0].x
    generator = torch.Generator("cpu").manual_seed(seed)
    size = (steps, 1, first[0].input_size)
    x = torch.randint(quantizer.lo, quantizer.hi + 1, size, generator=generator, device="cpu")
    states = [
        torch.full((1, cell.hidden_size), cell.h.zero_point, device="cpu")
        for each in plan.cells
        for cell in each
    ]
    runs = list(run_codes(plan, [x] * len(first), states))
    y = torch.cat([run.out.to(torch.int64) for run in runs[-len(first) :]], dim=-1)
    h = torch.stack([run.last.to(torch.int64) for run in runs])
    return x[:, 0], y[:, 0], h[:, 0]


def _operands(sources: list[CellSource]) -> dict[str, tuple[str, int]]:
    found: dict[str, tuple[str, int]] = {}
    for each in sources:
        for field, (ctype, size) in each.operands.items():
            found[field] = ctype, max(size, found.get(field, ("", 0))[1])
    # loops of whole vectors read zeros beyond the end
    return {field: (ctype, -(-size // 16) * 16) for field, (ctype, size) in sorted(found.items())}


def _ram(model: Model, operands: dict[str, tuple[str, int]], value_type: str) -> int:
    """Return the size of the state structure with natural alignment."""
    union = max(SIZES[ctype] * size for ctype, size in operands.values())
    align = max(4, *(SIZES[ctype] for ctype, _ in operands.values()))
    size = SIZES[model.code_type] * len(model.cells) * model.H
    size = -(-size // align) * align + -(-union // align) * align
    word = SIZES[value_type]
    size = -(-size // word) * word + 6 * model.H * word
    largest = max(align, word, SIZES[model.code_type])
    return -(-size // largest) * largest


def check(plan: GRUPlan, name: str, steps: int) -> None:
    """Raise where C source of a plan, or its name, is not possible.

    Raises:
        QuantGRUError: An argument is invalid.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", name):
        raise QuantGRUError(f"Expected name to be a C identifier in lower case, got {name!r}")
    files = "(quant_)?gru_(arithmetic|helium|products)|(quant_gru_)?fixed_point"
    taken = re.fullmatch(rf"qg(_.*)?|(.*_)?l\d+(_reverse)?|{files}", name)
    if name in _KEYWORDS | _HEADERS | _TARGETS or taken:
        raise QuantGRUError(
            f"Expected a name that is not taken in C, in CMake or by the GRU, got {name!r}"
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 10_000:
        raise QuantGRUError(f"Expected steps to be in 1..10000, got {steps!r}")
    first = plan.cells[0]
    if any(cell.x != first[0].x for cell in first):
        raise QuantGRUError(
            "Expected one quantizer for both directions, got two that differ (operator 'input.x')"
        )
    for cell in (cell for layer in plan.cells for cell in layer):
        K = max(cell.input_size, cell.hidden_size)
        if K > MOST_COLUMNS:
            raise QuantGRUError(f"Expected at most {MOST_COLUMNS} features and units, got {K}")
        if not bool(cell.weights.finite):
            raise QuantGRUError("Expected finite weights to export, got NaN or infinity in one")


def _version() -> str:
    try:
        return version("quant-gru")
    except PackageNotFoundError:
        return "(not installed)"
