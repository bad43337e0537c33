"""Products on tensor cores by `mma.sync`, from operands that every lane reads as 16 contiguous bytes of a row.

A lane of a warp is called (group, quad) = (lane // 4, lane % 4). In one product of 16 rows A with 8 rows B (both dense
along the sum), a lane gives rows group and group + 8 of A and row group of B, and receives of the result

    (group, 2 quad), (group, 2 quad + 1), (group + 8, 2 quad), (group + 8, 2 quad + 1).

Which columns a lane gives is free, as long as A and B agree: in a chunk of 4 * `vector` columns it gives the `vector`
ones from quad * `vector` on, which are 16 bytes of the wider operand.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass import Uint32

_KINDS = {cutlass.BFloat16: "bf16", cutlass.Float16: "f16"}
_TF32 = 0xFFFFE000
"""The bits of an fp32 number that tf32 keeps."""


def words_of(values):
    """16-bit numbers in pairs, as 32-bit words."""
    return cute.recast_tensor(_held(values), Uint32)


def add_product(total, first, second, right, kind):
    """total += A B^T over a chunk of 16-bit numbers: two products of 16 columns.

    Args:
        total: four fp32 numbers of this lane.
        first, second: what this lane gives of A, 8 numbers each of rows group and group + 8, as words.
        right: of B, as words.
        kind: the dtype of both.
    """
    for half in range(2):
        a = (first[2 * half], second[2 * half], first[2 * half + 1], second[2 * half + 1])
        b = (right[2 * half], right[2 * half + 1])
        _accumulate(total, f"m16n8k16.row.col.f32.{_KINDS[kind]}.{_KINDS[kind]}.f32", a, b)


def add_wide_product(total, first, second, right, *, split: bool):
    """The same for fp32 numbers: products of 8 columns in tf32.

    Args:
        first, second, right: `vector` numbers each. Those of B are exact in tf32; those of A are, unless `split`: then
            their upper bits and the rest are taken one after the other.
    """
    for pair in range(cute.size(first.shape) // 2):
        numbers = [row[2 * pair + half] for half in range(2) for row in (first, second)]
        b = [_bits(right[2 * pair + half]) for half in range(2)]
        if split:
            upper = [_bits(number) & Uint32(_TF32) for number in numbers]
            rest = [_bits(number - _number(bits)) for number, bits in zip(numbers, upper, strict=True)]
            _accumulate(total, "m16n8k8.row.col.f32.tf32.tf32.f32", rest, b)
            _accumulate(total, "m16n8k8.row.col.f32.tf32.tf32.f32", upper, b)
        else:
            _accumulate(total, "m16n8k8.row.col.f32.tf32.tf32.f32", [_bits(number) for number in numbers], b)


def _accumulate(total, shape: str, a, b) -> None:
    operands = [*a, *b, *(total[i] for i in range(4))]
    names = [f"{{$r{i}}}" for i in range(len(operands))]
    groups = (["{$w0}", "{$w1}", "{$w2}", "{$w3}"], names[:4], names[4:6], names[6:])
    text = ", ".join("{" + ", ".join(group) + "}" for group in groups)
    result = cute.arch.inline_ptx(
        f"mma.sync.aligned.{shape} {text};", write_only_types=[Float32] * 4, read_only_args=operands
    )
    for i in range(4):
        total[i] = result[i]


def _held(values):
    held = cute.make_rmem_tensor(values.shape, values.dtype)
    held.store(values)
    return held


def _bits(number):
    held = cute.make_rmem_tensor(1, Float32)
    held[0] = number
    return cute.recast_tensor(held, Uint32)[0]


def _number(bits):
    held = cute.make_rmem_tensor(1, Uint32)
    held[0] = bits
    return cute.recast_tensor(held, Float32)[0]
