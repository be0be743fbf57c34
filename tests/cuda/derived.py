"""What kernels derive from the codes of a plan, defined in PyTorch, and as they leave it."""

import torch

from quant_gru.integer.weights import power_of_two
from quant_gru.kernels.cuda.plan.structure import form_of, planes_of
from quant_gru.kernels.cuda.plan.tensors import numbers_of

MAGIC = 12582912.0  # Magic<float>::number() in gates/arithmetic.cuh


def byte_offset(q):
    """What is subtracted from codes to fit signed 8 or 16 bits."""
    return 0 if q.signed else 1 << (7 if q.bits <= 8 else 15)


def ours(plan, machine, sizes=()):
    """The arrays of a plan by name, which kernels write where native code asks for them first."""
    numbers = numbers_of(plan)
    native, H3, (features, units) = numbers.arrays.native, 3 * numbers.H, (numbers.C, numbers.H)
    kinds = {}

    def add(name, address, dtype, *shape):
        kinds[name] = address, dtype, shape

    for which, K in enumerate((features, units)):
        if not numbers.form.narrow:
            # updates in training do not write them, so they are only where they are needed
            add(f"transposed {which}", native.transposed(which), torch.int32, K, H3)
            continue
        add(f"multipliers {which}", native.multipliers(which), torch.float64, H3)
        add(f"exact {which}", native.exact(which), torch.int32, 2)
        weights, folded = native.gemm(which)
        columns = H3 if planes_of(numbers.bits[which]) == 1 else 2 * H3 + 1
        padded = -(-K // 16) * 16
        add(f"gemm {which}", weights, torch.int8, -(-columns // 16) * 16, padded)
        add(f"folded {which}", folded, torch.int64, H3)
    if numbers.form.narrow:
        folded, m = native.byte_weights()
        add("folded bytes", folded, torch.int32, H3)
        add("m float", m, torch.float32, H3)
        shape = -(-units // 64), -(-features // 128), 3, 64, 128
        add("tiles", native.tiles(), torch.int8, *shape)
        for size in sizes:
            made = native.fragments(*size)
            bytes_ = numbers.form.weight_bytes * 3 * size[0] * size[1]
            add(f"fragments {size}", made[0], torch.int32, bytes_ // 4)
            for name, address in zip(("bias", "m"), made[1:], strict=True):
                add(f"{name} {size}", address, torch.float64, 3, size[1])
    numbers.arrays.fill(machine)
    found = {}
    for name, (address, dtype, shape) in kinds.items():
        count = torch.Size(shape).numel()
        found[name] = numbers.arrays.tensor(address, dtype)[:count].view(shape).clone()
    return found


def exact_of(plan, machine):
    """The flags of W x and of R h, as kernels leave them."""
    found = ours(plan, machine)
    return [found[f"exact {which}"].tolist() for which in range(2)]


def expected(plan, sizes=()):
    """The arrays of `ours` by the definition."""
    form, w, found = form_of(plan), plan.weights, {}
    for which, each in enumerate((w.W, w.R)):
        if not form.narrow:
            found[f"transposed {which}"] = each.t().to(torch.int32)
        else:
            found[f"multipliers {which}"] = multipliers(plan, which)
            found[f"exact {which}"] = exact_float(plan, which)
            found[f"gemm {which}"], found[f"folded {which}"] = gemm(plan, which)
    if form.narrow:
        found["folded bytes"] = found["folded 0"].to(torch.int32)
        found["m float"] = found["multipliers 0"].to(torch.float32)
        found["tiles"] = tiles(plan)
        for size in sizes:
            names = (f"{name} {size}" for name in ("fragments", "bias", "m"))
            found |= dict(zip(names, fragments(plan, *size), strict=True))
    return found


def multipliers(plan, which):
    each = (plan.weights.Wx, plan.weights.Rh)[which]
    return each.multipliers[0].to(torch.float64) * power_of_two(-each.shift)


def operand_of(plan, which):
    """Codes, bias, quantizer and width of W or R."""
    w = plan.weights
    codes, bias, q = ((w.W, w.Bw, plan.x), (w.R, w.Br, plan.h))[which]
    return codes.to(torch.int64), bias.to(torch.int64), q, (w.bits_W, w.bits_R)[which]


def gemm(plan, which):
    codes, bias, q, bits = operand_of(plan, which)
    sums = codes.sum(dim=1)
    folded = bias + (byte_offset(q) - q.zero_point) * sums
    if planes_of(q.bits) == 2:
        folded = folded + 128 * sums
    rows = [codes]
    if planes_of(bits) == 2:
        rows = [codes >> 8, (codes & 255) - 128, torch.ones_like(codes[:1])]
    planes = torch.cat(rows)
    columns, padded = -(-planes.shape[0] // 16) * 16, -(-codes.shape[1] // 16) * 16
    weights = planes.new_zeros((columns, padded), dtype=torch.int8)
    weights[: planes.shape[0], : codes.shape[1]] = planes.to(torch.int8)
    return weights, folded


def tiles(plan):
    H, C = plan.hidden_size, plan.input_size
    codes = plan.weights.W.to(torch.int8).view(3, H, C)
    count, panels = -(-H // 64), -(-C // 128)
    wide = codes.new_zeros((3, count * 64, panels * 128))
    wide[:, :H, :C] = codes
    rows = wide.view(3, count, 64, panels, 8, 16).permute(1, 3, 0, 2, 4, 5)
    row, place = torch.arange(64, device=codes.device), torch.arange(8, device=codes.device)
    at = (row[:, None, None] % 8 ^ place[:, None]).expand(rows.shape)
    return rows.gather(4, at).view(count, panels, 3, 64, 128)


def added(plan):
    q = plan.frozen.quantizers["matmul.Wx"]
    lo = q.lo - q.zero_point
    even = abs(lo + 127 if lo % 2 else lo + 128)
    return 2 * abs(lo) + 1 if form_of(plan).rounding else even


def exact_float(plan, which):
    codes, bias, q, _ = operand_of(plan, which)
    form, m, sizes = form_of(plan), multipliers(plan, which), codes.abs()
    reach = sizes.sum(dim=1) * q.max_abs + bias.abs()
    if which == 1 and form.in_int32:
        units = m * 2.0**32
        whole = units == units.round()
        fits = [
            (reach < 1 << 31) & (units < 2.0**31) & whole,
            (reach_of_halves(plan) < 1 << 31) & (units < 2.0**30) & whole,
        ]
    else:
        normal = (m == 0) | ((m > 1e-20) & (m < 1e20))
        fits = [(reach < 1 << 24) & normal] * 2
        if which == 0 and planes_of(q.bits) == 2:
            units = m * 2.0**31
            is_long = codes.shape[1] > 512
            held = gemm(plan, 0)[1].abs() < 1 << 30 if is_long else reach < 1 << 31
            held = held & (reach.to(torch.float64) * m < 2.0**30) & normal
            fits = [held, held & (units == units.round()) & (m <= 2)]
        elif which == 0:
            power, below = torch.frexp(m)[0] == 0.5, m.clamp(max=1)
            most = reach * m.clamp(min=1) + added(plan) / below
            fits = [fits[0] & (reach * m < MAGIC), fits[0] & power & (most <= 1 << 24)]
    return torch.stack([each.all() for each in fits]).to(torch.int32)


def reach_of_halves(plan):
    codes, bias, q, _ = operand_of(plan, 1)
    sizes, middle = codes.abs(), -(-plan.hidden_size // 128) * 64
    halves = torch.maximum(sizes[:, :middle].sum(dim=1), sizes[:, middle:].sum(dim=1))
    folded = bias + (byte_offset(q) - q.zero_point) * codes.sum(dim=1)
    return halves * ((1 << 15) + 128) + sizes.sum(dim=1) * 128 + folded.abs()


def fragments(plan, features, units):
    """R as the A operand of the MMA instruction, with its bias and multipliers."""
    codes, bias_of, q, _ = operand_of(plan, 1)
    H = plan.hidden_size
    R = codes.reshape(3, H, H)
    padded = R.new_zeros((3, units, features))
    padded[:, :H, :H] = R
    planes = [padded]
    if form_of(plan).weight_bytes == 2:
        planes = [(padded & 255) - ((padded & 128) << 1), padded >> 8]
    bytes_ = torch.stack(planes).to(torch.int8)
    # unit = 16 group + 8 row8 + lane8, feature = 64 block + 16 quad + 8 j + 4 half + i
    split = bytes_.reshape(len(planes), 3, units // 16, 2, 8, features // 64, 4, 2, 2, 4)
    ordered = split.permute(0, 2, 5, 7, 1, 8, 3, 4, 6, 9).contiguous()
    folded = bias_of.reshape(3, H) + (byte_offset(q) - q.zero_point) * R.sum(dim=2)
    bias = folded.new_zeros((3, units), dtype=torch.float64)
    m = torch.zeros_like(bias)
    bias[:, :H] = folded.to(torch.float64)
    m[:, :H] = multipliers(plan, 1).reshape(3, H)
    return ordered.flatten().view(torch.int32), bias, m
