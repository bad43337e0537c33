"""Which operands extend takes for which rows of q, k and v."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
import triton.language as tl

from gdn.backends.triton import extend
from gdn.backends.triton.extend_tuning import takes_narrow

pytestmark = pytest.mark.interpret


def rows(key_dim, value_dim, *, dtype=torch.bfloat16, lead=0, tail=0, step=1):
    """q, k, v `[1, 9, H, dim]` with H = 2, 2, 4, as slices of one matrix."""
    widths = [2 * key_dim * step, 2 * key_dim * step, 4 * value_dim * step]
    wide = torch.zeros(9, lead + sum(widths) + tail, dtype=dtype)
    begins = [lead, lead + widths[0], lead + widths[0] + widths[1]]
    parts = [wide[:, begin : begin + width : step] for begin, width in zip(begins, widths, strict=True)]
    dims = (key_dim, key_dim, value_dim)
    return [part.unflatten(1, (-1, dim))[None] for part, dim in zip(parts, dims, strict=True)]


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "layout", "narrow"),
    [
        (128, 128, {}, True),
        (96, 48, {}, True),
        (32, 64, {"lead": 16, "tail": 32}, True),
        (60, 64, {}, False),
        (64, 60, {}, False),
        (72, 64, {}, False),
        (64, 64, {"tail": 8}, False),
        (64, 64, {"step": 2}, False),
        (192, 128, {}, False),
    ],
)
def test_bf16_operands_need_rows_in_whole_units(key_dim, value_dim, layout, narrow):
    assert takes_narrow(key_dim, rows(key_dim, value_dim, **layout)) is narrow


@pytest.mark.parametrize(
    ("dtype", "key_dim", "aligned"),
    [(torch.bfloat16, 64, tl.bfloat16), (torch.bfloat16, 60, tl.float32), (torch.float16, 64, tl.float32)],
)
def test_unaligned_rows_never_take_bf16_operands(dtype, key_dim, aligned):
    q, k, v = rows(key_dim, 64, dtype=dtype)
    gates = torch.zeros(1, 9, 4)
    pool = torch.zeros(2, 4, 64, key_dim)
    offsets = torch.tensor([0, 9], dtype=torch.int32)
    plan = extend._plan(False, None, q, k, v, gates, gates, pool, offsets[:1], offsets, None, None, None, False)
    assert plan.aligned.walk._constants["OPERAND"] == aligned
    assert plan.unaligned.walk._constants["OPERAND"] == tl.float32
