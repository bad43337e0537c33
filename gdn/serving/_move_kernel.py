"""The Triton kernel behind `gdn.serving.moves`: one launch for all layers and all pairs."""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 2048


@triton.jit(do_not_specialize=["spare"])
def move_kernel(
    target,
    to,
    source,
    origin,
    spare,
    size,
    target_layer_stride,
    target_row_stride,
    source_layer_stride,
    source_row_stride,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK elements of one entry of one layer. Without a source, zeros are stored."""
    blocks = tl.cdiv(size, BLOCK)
    program = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    pair = program // blocks
    row = tl.load(to + pair).to(tl.int64)
    if row != spare:
        elements = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = elements < size
        if source is None:
            value = tl.zeros([BLOCK], dtype=target.dtype.element_ty)
        else:
            entry = source + layer * source_layer_stride + tl.load(origin + pair).to(tl.int64) * source_row_stride
            value = tl.load(entry + elements, mask=inside)
        entry = target + layer * target_layer_stride + row * target_row_stride
        tl.store(entry + elements, value.to(target.dtype.element_ty), mask=inside)


def launch(target: Tensor, to: Tensor, source: Tensor | None = None, origin: Tensor | None = None) -> None:
    """See `gdn.serving.moves.move_rows`; without a source the rows are cleared."""
    layers, rows = target.shape[:2]
    size = math.prod(target.shape[2:])
    grid = (to.shape[0] * triton.cdiv(size, BLOCK), layers)
    if not (grid[0] and grid[1]):
        return
    strides = (0, 0) if source is None else source.stride()[:2]
    with _on_device(target):
        move_kernel[grid](target, to, source, origin, rows - 1, size, *target.stride()[:2], *strides, BLOCK=BLOCK)


def _on_device(tensor: Tensor) -> AbstractContextManager[None]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
