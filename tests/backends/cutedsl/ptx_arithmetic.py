"""What PTX instructions compute, on arrays of bits."""

from __future__ import annotations

import numpy as np

_UNSIGNED = {"16": np.uint16, "32": np.uint32, "64": np.uint64}
_SIGNED = {"16": np.int16, "32": np.int32, "64": np.int64}
_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "equ": np.equal, "neu": np.not_equal, "lo": np.less, "hi": np.greater, "ls": np.less_equal, "hs": np.greater_equal,
}  # fmt: skip


def source_types(parts: list[str], count: int) -> list[str]:
    """The type of each source operand."""
    kind = parts[-1]
    match parts[0]:
        case "selp":
            return [kind, kind, "pred"]
        case "shl" | "shr":
            return [kind, "u32"]
        case "mad" if "wide" in parts:
            return [kind, kind, "b64"]
    return [kind] * count


def _as_float(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32, copy=False).view(np.float32)


def widened(bits: np.ndarray, kind: str) -> np.ndarray:
    """16-bit floats as fp32."""
    if kind in ("bf16", "bf16x2"):
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def narrowed(values: np.ndarray, kind: str) -> np.ndarray:
    """fp32 rounded to nearest even, as 16 bits."""
    if kind.startswith("f16"):
        return values.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.where(np.isnan(values), 0x7FFF, rounded >> np.uint32(16)).astype(np.uint16)


def _rounded(exact: np.ndarray, parts: list[str]) -> np.ndarray:
    nearest = exact.astype(np.float32)
    if "rm" not in parts:
        return nearest
    return np.where(nearest.astype(np.float64) > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def result(parts: list[str], values: list[np.ndarray]) -> np.ndarray:
    """Bits, or booleans, of one instruction's result."""
    with np.errstate(all="ignore"):
        if parts[0] == "cvt":
            return _converted(parts, values)
        if parts[0] == "selp":
            return np.where(values[2], values[0], values[1])
        if parts[0] == "setp":
            return _compared(parts, values)
        if parts[-1] == "pred":
            return _bitwise(parts[0], values)
        if parts[-1] == "f32":
            return _floating(parts, values).astype(np.float32).view(np.uint32)
        return _integral(parts, values)


def _compared(parts: list[str], values: list[np.ndarray]) -> np.ndarray:
    kind = parts[-1]
    if kind == "f32":
        values = [_as_float(value) for value in values]
    elif kind[0] == "s":
        values = [value.view(_SIGNED[kind[1:]]) for value in values]
    outcome = _COMPARE[parts[1]](*values)
    if parts[1] in ("equ", "neu"):
        outcome |= np.isnan(values[0]) | np.isnan(values[1])
    return outcome & ~(np.isnan(values[0]) | np.isnan(values[1])) if parts[1] == "ne" and kind == "f32" else outcome


def _bitwise(name: str, values: list[np.ndarray]) -> np.ndarray:
    match name:
        case "and":
            return values[0] & values[1]
        case "or":
            return values[0] | values[1]
        case "xor":
            return values[0] ^ values[1]
        case "not":
            return ~values[0]
    return values[0]


def _floating(parts: list[str], bits: list[np.ndarray]) -> np.ndarray:
    wide = [_as_float(value).astype(np.float64) for value in bits]
    match parts[0]:
        case "add":
            return _rounded(wide[0] + wide[1], parts)
        case "sub":
            return _rounded(wide[0] - wide[1], parts)
        case "mul":
            return _rounded(wide[0] * wide[1], parts)
        case "fma":
            return _rounded(wide[0] * wide[1] + wide[2], parts)
        case "div":
            return wide[0] / wide[1]
        case "rcp":
            return 1.0 / wide[0]
        case "rsqrt":
            return 1.0 / np.sqrt(wide[0])
        case "sqrt":
            return np.sqrt(wide[0])
        case "ex2":
            return np.exp2(wide[0])
        case "lg2":
            return np.log2(wide[0])
        case "neg":
            return -wide[0]
        case "abs":
            return np.abs(wide[0])
        case "max":
            return np.fmax(wide[0], wide[1])
        case "min":
            return np.fmin(wide[0], wide[1])
        case "mov":
            return wide[0]
    raise NotImplementedError(".".join(parts))


def _integral(parts: list[str], values: list[np.ndarray]) -> np.ndarray:
    kind = parts[-1]
    unsigned = _UNSIGNED[kind[1:]]
    signed = kind[0] == "s"
    if signed:
        values = [value.view(_SIGNED[str(8 * value.dtype.itemsize)]) for value in values]
    match parts[0]:
        case "add":
            return values[0] + values[1]
        case "sub":
            return values[0] - values[1]
        case "mul" | "mad" if "wide" in parts:
            double = {2: np.int32, 4: np.int64 if signed else np.uint64}[values[0].dtype.itemsize]
            product = values[0].astype(double) * values[1].astype(double)
            return product + values[2].astype(double) if parts[0] == "mad" else product
        case "mul" if "hi" in parts:
            assert values[0].dtype.itemsize == 4
            double = np.int64 if signed else np.uint64
            return ((values[0].astype(double) * values[1].astype(double)) >> double(32)).astype(unsigned)
        case "mul":
            return values[0] * values[1]
        case "mad":
            return values[0] * values[1] + values[2]
        case "shl":
            return np.where(values[1] >= values[0].dtype.itemsize * 8, 0, values[0] << values[1].astype(unsigned))
        case "shr":
            distance = values[1].view(np.uint32).astype(values[0].dtype)
            return values[0] >> np.minimum(distance, values[0].dtype.itemsize * 8 - 1)
        case "max":
            return np.maximum(values[0], values[1])
        case "min":
            return np.minimum(values[0], values[1])
        case "div":
            return np.floor_divide(values[0], values[1])
        case "rem":
            return np.fmod(values[0], values[1])
        case "neg":
            return (0 - values[0]).astype(values[0].dtype)
        case "mov" | "cvta":
            return values[0]
        case "and" | "or" | "xor" | "not":
            return _bitwise(parts[0], values)
    raise NotImplementedError(".".join(parts))


def _converted(parts: list[str], values: list[np.ndarray]) -> np.ndarray:
    target, source = parts[-2], parts[-1]
    if target in ("bf16x2", "f16x2"):
        high, low = (narrowed(_as_float(value), target) for value in values)
        return high.astype(np.uint32) << np.uint32(16) | low
    (value,) = values
    if source in ("bf16", "f16"):
        return widened(value, source).view(np.uint32)
    if source == "f32":
        number = _as_float(value)
        if target in ("bf16", "f16"):
            return narrowed(number, target)
        if target == "f32":
            return (np.clip(number, 0, 1) if "sat" in parts else number).view(np.uint32)
        return np.trunc(number).astype(_SIGNED[target[1:]])
    if source[0] == "s":
        value = value.view(_SIGNED[source[1:]]) if value.dtype.itemsize * 8 == int(source[1:]) else value
    if target == "f32":
        return value.astype(np.float32).view(np.uint32)
    return value.astype(np.int64 if source[0] == "s" else np.uint64).astype(_UNSIGNED[target[1:]])


def matrix_product(parts: list[str], a, b, c) -> list[np.ndarray]:
    """mma.sync, by the tables of fragments in the PTX ISA: 16 rows of A over lane // 4, columns of B over lane // 4."""
    warps = a[0].size // 32
    lane = np.arange(32)
    group, quad = lane // 4, lane % 4
    depth = 16 if "m16n8k16" in parts else 8
    left, right = np.zeros((warps, 16, depth)), np.zeros((warps, depth, 8))
    total = np.zeros((warps, 16, 8))
    if depth == 16:
        kind = parts[7]
        for register, bits in enumerate(a):
            row, first = group + 8 * (register % 2), 2 * quad + 8 * (register // 2)
            for half in (0, 1):
                left[:, row, first + half] = _half(bits, half, kind).reshape(warps, 32)
        for register, bits in enumerate(b):
            for half in (0, 1):
                right[:, 2 * quad + 8 * register + half, group] = _half(bits, half, kind).reshape(warps, 32)
    else:
        for register, bits in enumerate(a):
            row, column = group + 8 * (register % 2), quad + 4 * (register // 2)
            left[:, row, column] = _tf32(bits).reshape(warps, 32)
        for register, bits in enumerate(b):
            right[:, quad + 4 * register, group] = _tf32(bits).reshape(warps, 32)
    for register, bits in enumerate(c):
        total[:, group + 8 * (register // 2), 2 * quad + register % 2] = _as_float(bits).reshape(warps, 32)
    with np.errstate(all="ignore"):
        product = (left @ right + total).astype(np.float32)
    return [
        product[:, group + 8 * (register // 2), 2 * quad + register % 2].reshape(-1).view(np.uint32)
        for register in range(4)
    ]


def _half(bits: np.ndarray, half: int, kind: str) -> np.ndarray:
    return widened(((bits >> np.uint32(16 * half)) & np.uint32(0xFFFF)), kind)


def _tf32(bits: np.ndarray) -> np.ndarray:
    return _as_float(bits & np.uint32(0xFFFFE000))
