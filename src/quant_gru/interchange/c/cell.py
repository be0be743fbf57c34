"""The C source of one layer and direction."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from quant_gru.integer.plan import CellPlan
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.segments import Segments, segments_of
from quant_gru.integer.tables import Table
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.interchange.c.numbers import (
    BYTES,
    Rows,
    Sum,
    entries_of,
    in_words,
    nibble_biases,
    paired,
    rows_of,
    sum_of,
    sums_of,
    tiled,
    tiled_biases,
    tiled_digits,
    tiled_nibbles,
    words_of,
)
from quant_gru.interchange.c.text import SIZES, array, fill, struct, type_of

# loop -> types of weights, biases and the operand
_LOOPS = {
    "1": ("qg_weights1", "int32_t", "int16_t"),
    "2": ("qg_weights2", "int32_t", "int16_t"),
    "4": ("qg_weights4", "int32_t", "int16_t"),
    "8": ("qg_weights8", "int32_t", "int16_t"),
    "16": ("int16_t", "int64_t", "int16_t"),
    "32": ("int32_t", "int64_t", "int32_t"),
    "wide": ("int32_t", "int64_t", "int64_t"),
}
_TABLES = {"z": ("gate.z_pre", "gate.z_out"), "r": ("gate.r_pre", "gate.r_out")}
_TABLES["g"] = ("gate.g_pre", "gate.g_out")
_SUMS = {
    "gate.z_pre": "z_pre",
    "gate.r_pre": "r_pre",
    "gate.g_pre": "g_pre",
    "op.rRh": "rRh",
    "op.old_contrib": "old",
    "op.new_contrib": "new",
    "output.h": "h",
    "zoneout": "kept",
}


class Data:
    """Constant arrays and structures as C text."""

    def __init__(self) -> None:
        self.text: list[str] = []

    def array(self, ctype: str, name: str, values: list[int]) -> str:
        """Add an array and return its name."""
        self.text.append(array(ctype, name, values))
        return name

    def struct(self, ctype: str, name: str, **fields: int | str) -> None:
        """Add a structure."""
        self.text.append(struct(ctype, name, **fields))


@dataclass(frozen=True)
class CellSource:
    """A cell as C source.

    Attributes:
        prefix: Start of all its names.
        text: Its constants and functions.
        operands: Field of the operand union -> its type and elements.
        bytes: What its arrays take, see `cell_bytes`.
        planes: Elements of the largest operand beside 8-bit weights, 0 without such weights.
    """

    prefix: str
    text: str
    operands: dict[str, tuple[str, int]]
    bytes: dict[str, int]
    planes: int


def is_wide(cell: CellPlan) -> bool:
    """Return whether a code without its zero point may exceed 32 bits."""
    q = cell.frozen.quantizers.values()
    largest = max(abs(cell.frozen.one), cell.frozen.one_minus_z)
    return max(each.bits for each in q) > 30 or largest >= 1 << 30


def cell_source(
    cell: CellPlan,
    layer: int,
    direction: int,
    below: list[tuple[WeightedSum, Quantizer]],
    **names: str,
) -> CellSource:
    """Return the source of a cell.

    Args:
        cell: Its plan.
        layer: Which layer.
        direction: Which direction.
        below: The sums that convert the codes of each direction of the layer below, and the
            quantizers of these codes; empty in the first layer.
        names: `name` of the model, `input_type` and `code_type`.
    """
    # the name of the model, because a source may be included beside that of another one
    p = f"{names['name']}_l{layer}{'_reverse' if direction else ''}"
    data = Data()
    q, H, C = cell.frozen.quantizers, cell.hidden_size, cell.input_size
    zero = {operator: each.zero_point for operator, each in q.items()}
    rows, tables = _parts(cell)
    Wx, Rh = rows.values()
    _add_rows(data, Wx, f"{p}_W", f"{p}_Wx")
    _add_rows(data, Rh, f"{p}_R", f"{p}_Rh")
    sums = sums_of(cell)
    for operator, each in sums.items():
        _add_sum(data, each, f"{p}_{_SUMS[operator]}")
    for gate, (pre, out) in _TABLES.items():
        _add_table(data, cell.frozen.tables[out], tables[out], q[pre], f"{p}_{gate}")
    fields = {_field(Wx): C, _field(Rh): H}
    if _field(Wx) == _field(Rh):
        fields = {_field(Wx): max(C, H)}
    planes = max((size for size, rows in ((C, Wx), (H, Rh)) if rows.loop in BYTES), default=0)
    helium = _vectors(p, cell, sums, names["code_type"], data)
    result = f"qg_apply(&{p}_kept, h[i], 1, now, 1)" if "zoneout" in sums else "now"
    text = fill(
        "cell.c.in",
        layer=layer,
        direction=("forward", "reverse")[direction],
        p=p,
        input_size=C,
        hidden_size=H,
        operand_type=_LOOPS[Wx.loop][2],
        operand_field=_field(Wx),
        operand_type_R=_LOOPS[Rh.loop][2],
        operand_field_R=_field(Rh),
        fill_states=_fill_states(Rh, H, names["code_type"]),
        fill_input=_fill_input(data, p, Wx, below, H, names["input_type"]),
        loop_W=Wx.loop,
        loop_R=Rh.loop,
        planes_W="QG_PLANES(state), " if Wx.loop in BYTES else "",
        planes_R="QG_PLANES(state), " if Rh.loop in BYTES else "",
        zero_h=_constant(zero["output.h"]),
        zero_Rh=_constant(zero["matmul.Rh"]),
        **_products(p, sums, cell.frozen.one),
        result=result,
        vectors=helium,
        constants="\n".join(data.text),  # last: the calls above add to them
        **names,
    )
    operands = {field: (_TYPE_OF[field], size) for field, size in fields.items()}
    return CellSource(p, text, operands, _bytes_of(rows, tables), planes)


_TYPE_OF = {"w16": "int16_t", "w32": "int32_t", "w64": "int64_t"}


def _vectors(p: str, cell: CellPlan, sums: dict[str, Sum], code_type: str, data: Data) -> str:
    """Return the gates of four units at once for Helium; '' where they need more than 32 bits."""
    products = {"op.rRh", "op.old_contrib", "op.new_contrib"}
    narrow = all(s.bits == 32 or (n in products and s.bits == 33) for n, s in sums.items())
    loads = {"int8_t": "vldrbq_s32", "int16_t": "vldrhq_s32", "int32_t": "vldrwq_s32"}
    tables = [f"{p}_{gate}_x4" for gate in _TABLES]
    ready = all(any(name in text for text in data.text) for name in tables)
    fits = narrow and ready and code_type in loads and not is_wide(cell)
    count = cell.hidden_size // 4 * 4 if fits else 0
    data.text.append(
        f"#if defined(QG_HELIUM)\n#define {p}_VECTORS {count}\n#else\n#define {p}_VECTORS 0\n"
        "#endif\n"
    )
    if not count:
        return ""
    q = cell.frozen.quantizers
    terms = {
        name: f"qg_product_x4(&{p}_{name}, {a}, {b})"
        if operator in sums
        else f"vmulq_s32({a}, {b})"
        for name, operator, a, b in (
            ("rRh", "op.rRh", "r", "Rh_g"),
            ("old", "op.old_contrib", "z", "before"),
            ("new", "op.new_contrib", "rest", "g"),
        )
    }
    kept = f"qg_apply_x4(&{p}_kept, h_code, now)" if "zoneout" in sums else "now"
    return fill(
        "vectors.c.in",
        p=p,
        hidden_size=cell.hidden_size,
        load_h=loads[code_type],
        store_h=loads[code_type].replace("ld", "st"),
        zero_h=q["output.h"].zero_point,
        zero_Rh=q["matmul.Rh"].zero_point,
        one=cell.frozen.one,
        result=kept,
        **terms,
    )


def _field(rows: Rows) -> str:
    return {"int16_t": "w16", "int32_t": "w32", "int64_t": "w64"}[_LOOPS[rows.loop][2]]


def _constant(value: int) -> str:
    """Return a constant in the type of values; negative ones in parentheses."""
    return f"(qg_value)({value}{'LL' if abs(value) >= 1 << 31 else ''})"


def _products(p: str, sums: dict[str, Sum], one: int) -> dict[str, str]:
    """Return the line of each product that has its own code, and the terms that follow."""
    found: dict[str, str] = {}
    for name, operator, factors in (
        ("rRh", "op.rRh", "r, Rh_g"),
        ("old", "op.old_contrib", "z, before"),
        ("new", "op.new_contrib", f"{_constant(one)} - z, g"),
    ):
        own, variable = operator in sums, {"new": "fresh"}.get(name, name)
        line = f"        const qg_value {variable} = qg_apply(&{p}_{name}, {factors}, 0, 0);\n"
        found[name] = line if own else ""
        found[f"{name}_term"] = f"{variable}, 1" if own else factors
    return found


def _fill_input(
    data: Data,
    p: str,
    Wx: Rows,
    below: list[tuple[WeightedSum, Quantizer]],
    H: int,
    input_type: str,
) -> str:
    """Return the loops that write the operand of the input product."""
    ctype, offset = _LOOPS[Wx.loop][2], _constant(Wx.offset)
    if not below and ctype == input_type and not Wx.offset:
        return f"    QG_COPY(operand, x, sizeof *x * {Wx.weights.shape[1]});"
    if not below:
        return (
            f"    for (i = 0; i < {Wx.weights.shape[1]}; ++i) "
            f"operand[i] = ({ctype})((qg_value)x[i] - {offset});"
        )
    lines = []
    for direction, (weighted_sum, h) in enumerate(below):
        name, at = f"{p}_from_{('forward', 'reverse')[direction]}", direction * H
        _add_sum(data, sum_of(weighted_sum, [h.max_abs], [h.zero_point]), name)
        value = f"qg_apply(&{name}, (qg_value)x[{at} + i], 1, 0, 0) - {offset}"
        lines.append(
            f"    for (i = 0; i < {H}; ++i)\n        operand[{at} + i] = ({ctype})({value});"
        )
    return "\n".join(lines)


def _fill_states(Rh: Rows, H: int, code_type: str) -> str:
    """Return the loop that writes the operand of the recurrent product."""
    ctype = _LOOPS[Rh.loop][2]
    if ctype == code_type and not Rh.offset:
        return f"QG_COPY(states, h, sizeof *h * {H});"
    value = f"({ctype})((qg_value)h[i] - {_constant(Rh.offset)})"
    return f"for (i = 0; i < {H}; ++i) states[i] = {value};"


def _add_sum(data: Data, s: Sum, name: str) -> None:
    data.struct("qg_sum", name, **asdict(s))


def cell_bytes(cell: CellPlan) -> dict[str, int]:
    """Return the bytes of the arrays of a cell, as `CSource` counts them.

    Args:
        cell: Its plan.

    Returns:
        'weight.W' and 'weight.R', with the biases and multipliers of their rows; 'gate.z_out',
        'gate.r_out' and 'gate.g_out', the tables.
    """
    return _bytes_of(*_parts(cell))


def matrix_bytes(cell: CellPlan) -> dict[str, int]:
    """Return 'weight.W' and 'weight.R' of `cell_bytes`.

    Args:
        cell: The plan of the cell.
    """
    return _bytes_of(_rows(cell), {})


def _parts(cell: CellPlan) -> tuple[dict[str, Rows], dict[str, _TableForm]]:
    """Return the matrix products and the tables of a cell, by the operator of their codes."""
    frozen, pairs = cell.frozen, _TABLES.values()
    forms = {out: _form(frozen.tables[out], frozen.quantizers[pre]) for pre, out in pairs}
    return _rows(cell), forms


def _rows(cell: CellPlan) -> dict[str, Rows]:
    w = cell.weights
    return {
        "weight.W": rows_of(w.W, w.Bw, cell.shift_Bw, w.Wx, cell.x, w.bits_W),
        "weight.R": rows_of(w.R, w.Br, cell.shift_Br, w.Rh, cell.h, w.bits_R),
    }


def _bytes_of(rows: dict[str, Rows], tables: dict[str, _TableForm]) -> dict[str, int]:
    found = {name: _rows_bytes(each) for name, each in rows.items()}
    return found | {name: each.bytes for name, each in tables.items()}


def _rows_bytes(rows: Rows) -> int:
    """Return the bytes of the arrays that `_add_rows` makes."""
    weight_type, bias_type, _ = _LOOPS[rows.loop]
    count, columns = rows.weights.shape
    if rows.loop == "8":
        size = count * columns
    elif rows.loop in BYTES:
        size = 4 * words_of(count, columns, int(rows.loop))
    else:
        size = SIZES[weight_type] * count * columns
    size += SIZES[bias_type] * count
    size += 0 if _is_one_multiplier(rows) else SIZES["int32_t"] * count
    return size + (SIZES["int16_t"] * count if rows.bits > 64 else 0)


def _is_one_multiplier(rows: Rows) -> bool:
    return rows.bits < 128 and len(set(rows.Ms)) == 1


def _add_rows(data: Data, rows: Rows, weights: str, name: str) -> None:
    weight_type, bias_type, _ = _LOOPS[rows.loop]
    if rows.loop == "8":
        _add_bytes(data, rows, weights, name)
    elif rows.loop in BYTES:
        _add_words(data, rows, weights, name)
    else:
        data.array(weight_type, weights, rows.weights.flatten().tolist())
        data.array(bias_type, f"{name}_bias", rows.bias)
    same = _is_one_multiplier(rows)
    Ms = "NULL" if same else data.array("int32_t", f"{name}_M", rows.Ms)
    ks = "NULL"
    if rows.bits > 64:
        ks = data.array("int16_t", f"{name}_k", rows.ks)
    data.struct(
        "qg_rows",
        name,
        bits=rows.bits,
        k=rows.k,
        M=rows.Ms[0] if same else 0,
        bias_shift=rows.bias_shift,
        Ms=Ms,
        ks=ks,
        zero=rows.zero,
        lo=rows.lo,
        hi=rows.hi,
        bytes=rows.bytes,
        pairs=rows.pairs,
    )


def _add_bytes(data: Data, rows: Rows, weights: str, name: str) -> None:
    """Add 8-bit weights in the layout of each kind of processor, and biases."""
    data.text.append(
        f"#if defined(QG_DUAL)\n{array('uint32_t', weights, paired(rows.weights))}"
        "#elif defined(QG_HELIUM)\n"
        f"{array('int8_t', weights, tiled(rows.weights))}"
        "#else\n"
        f"{array('int8_t', weights, rows.weights.flatten().tolist())}#endif\n"
    )
    _add_biases(data, rows, name, tiled_biases(rows))


def _add_words(data: Data, rows: Rows, weights: str, name: str) -> None:
    """Add weights of up to 4 bits in the layout of each kind of processor, and biases."""
    bits = int(rows.loop)
    words = array("uint32_t", weights, in_words(rows.weights, bits))
    tiles = tiled_nibbles(rows.weights) if bits == 4 else tiled_digits(rows.weights, bits)
    helium = array("int8_t", weights, tiles)
    data.text.append(f"#if defined(QG_HELIUM)\n{helium}#else\n{words}#endif\n")
    _add_biases(data, rows, name, nibble_biases(rows) if bits == 4 else tiled_biases(rows))


def _add_biases(data: Data, rows: Rows, name: str, of_helium: list[int]) -> None:
    name = f"{name}_bias"
    biases = array("int32_t", name, rows.bias)
    helium = array("int32_t", name, of_helium)
    data.text.append(f"#if defined(QG_HELIUM)\n{helium}#else\n{biases}#endif\n")


# entries up to which a table has them as they are, and codes of a block beyond
_MOST_DIRECT = 1024
_BLOCKS = (64, 32, 16, 8, 4)
_INDEX = "vreinterpretq_u32_s32({index})"
_GATHERS = {
    "int8_t": "vldrbq_gather_offset_s32({entries}, " + _INDEX + ")",
    "uint8_t": "vreinterpretq_s32_u32(vldrbq_gather_offset_u32({entries}, " + _INDEX + "))",
    "int16_t": "vldrhq_gather_shifted_offset_s32({entries}, " + _INDEX + ")",
    "uint16_t": "vreinterpretq_s32_u32(vldrhq_gather_shifted_offset_u32({entries}, "
    + _INDEX
    + "))",
}


def _add_x4(data: Data, name: str, body: str) -> None:
    """Add the function of a table for four codes."""
    data.text.append(
        "#if defined(QG_HELIUM)\n"
        f"QG_INLINE int32x4_t {name}_x4(int32x4_t code) {{\n    return {body};\n}}\n#endif\n"
    )


@dataclass(frozen=True)
class _TableForm:
    """How a table is written.

    Attributes:
        arrays: Part -> C type and values.
        codes: The input codes that have an entry each; empty if there are segments.
        shift: log2 of the codes of a block, if entries are in blocks.
        least: The smallest entry, if entries are in blocks.
        segments: The parabolas, if they fit 32 bits; otherwise segments are as in the plan.
    """

    arrays: dict[str, tuple[str, list[int]]]
    codes: range = range(0)
    shift: int = 0
    least: int = 0
    segments: Segments | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(SIZES[ctype] * len(values) for ctype, values in self.arrays.values())


def _form(table: Table, pre: Quantizer) -> _TableForm:
    """Return the form of a table for the codes of its input."""
    entries = entries_of(table, pre)
    if entries is not None:
        first, values = entries
        codes = range(first, first + len(values))
        direct = _TableForm({"entries": (type_of(min(values), max(values)), values)}, codes)
        blocks = _in_blocks(values, codes) if len(values) > _MOST_DIRECT else None
        return direct if blocks is None or blocks.bytes >= direct.bytes else blocks
    short = segments_of(table, pre.lo, pre.hi)
    if short is not None and 0 <= short.codes.min() <= short.codes.max() < 1 << 16:
        starts = np.stack((short.codes, short.rests, short.c2 & 0xFFFF), 1)
        arrays = {
            "slopes": ("int32_t", short.c1.tolist()),
            "starts": ("uint16_t", starts.flatten().tolist()),
        }
        return _TableForm(arrays, segments=short)
    arrays = {"coefficients": ("int64_t", table.coefficients.flatten().tolist())}
    if table.segment_shift is None:
        bounds = table.bounds.tolist()
        arrays = {"bounds": ("uint32_t", [b - bounds[0] for b in bounds]), **arrays}
    return _TableForm(arrays)


def _in_blocks(values: list[int], codes: range) -> _TableForm | None:
    """Return entries as the starts of blocks and 4 bits each; None if they differ by more."""
    least = min(values)
    padded = np.array(values + values[-1:] * (-len(values) % _BLOCKS[0])) - least
    for size in _BLOCKS:
        blocks = padded[: -(-len(values) // size) * size].reshape(-1, size)
        starts = blocks.min(1, keepdims=True)
        rests = (blocks - starts).flatten()
        if rests.max() < 16 and starts.max() < 1 << 16:
            pairs = rests[::2] | rests[1::2] << 4
            arrays = {
                "starts": ("uint16_t", starts.flatten().tolist()),
                "rests": ("uint8_t", pairs[: -(-len(values) // 2)].tolist()),
            }
            return _TableForm(arrays, codes, size.bit_length() - 1, least)
    return None


def table_bytes(table: Table, pre: Quantizer) -> int:
    """Return the bytes of a table in C source.

    Args:
        table: The table.
        pre: The quantizer of its input.
    """
    return _form(table, pre).bytes


def _add_table(data: Data, table: Table, form: _TableForm, pre: Quantizer, name: str) -> None:
    """Add a table and its function `name`, from codes to codes without zero point."""
    arrays = {
        part: data.array(ctype, f"{name}_{part}", values)
        for part, (ctype, values) in form.arrays.items()
    }
    if form.codes:
        first, last = form.codes[0], form.codes[-1]
        is_whole = first <= pre.lo and pre.hi <= last
        code = "code" if is_whole else f"qg_clamp32((int32_t)code, {first}, {last})"
        if "rests" in arrays:
            fields = {"first": first, "u": form.shift, "lo": form.least}
            data.struct("qg_block_table", f"{name}_table", **fields, **arrays)
            body = f"qg_look_up_block(&{name}_table, {code})"
            x4 = f"qg_look_up_block_x4(&{name}_table, code)"
        else:
            body = f"(qg_value){name}_entries[{code} - ({first})]"
            x4 = _GATHERS.get(form.arrays["entries"][0], "").format(
                entries=f"{name}_entries", index=f"vsubq_n_s32(code, {first})"
            )
        if is_whole and x4:
            _add_x4(data, name, x4)
    elif form.segments is not None:
        fields = {k: getattr(form.segments, k) for k in ("first", "u", "e", "s", "g", "lo", "hi")}
        data.struct("qg_short_table", f"{name}_table", **fields, **arrays)
        body = f"qg_look_up_short(&{name}_table, code)"
        _add_x4(data, name, f"qg_look_up_short_x4(&{name}_table, code)")
    else:
        data.struct(
            "qg_table",
            f"{name}_table",
            first=int(table.bounds[0]),
            last=table.last,
            segments=len(table.bounds),
            degree=table.coefficients.shape[1] - 1,
            shift=table.shift,
            segment_shift=-1 if table.segment_shift is None else table.segment_shift,
            lo=table.lo - table.zero_point,
            hi=table.hi - table.zero_point,
            bounds=arrays.get("bounds", "NULL"),
            coefficients=arrays["coefficients"],
        )
        body = f"qg_look_up(&{name}_table, code)"
    data.text.append(f"QG_INLINE qg_value {name}(qg_value code) {{\n    return {body};\n}}\n")
