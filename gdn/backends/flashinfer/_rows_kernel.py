"""Kernels of `rows`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens", "sequences", "usable"])
def silence_kernel(
    out, offsets, indices, tokens, sequences, usable, offset_stride, index_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """Zero the rows of nobody; a program of rows that all belong to somebody writes nothing."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    low = tl.zeros((ROWS,), tl.int64)
    high = low + sequences
    for _ in tl.static_range(HALVINGS):  # the first sequence that ends after the row
        middle = (low + high) // 2
        end = tl.load(offsets + (middle + 1) * offset_stride, mask=middle < sequences, other=0)
        before = (end <= row) & (low < high)
        high = tl.where(before, high, middle)
        low = tl.where(before, middle + 1, low)
    owned = (low < sequences) & (row >= tl.load(offsets))
    slot = tl.load(indices + low * index_stride, mask=owned, other=-1)
    nobody = (row < tokens) & ((slot < 0) | (slot >= usable))
    if tl.sum(nobody.to(tl.int32)) > 0:
        for begin in range(0, WIDTH, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
            zeros = tl.zeros((ROWS, COLUMNS), out.dtype.element_ty)
            tl.store(out + place, zeros, mask=nobody[:, None] & (column < WIDTH)[None, :])


@triton.jit
def store_kernel(values, places, into, size, COLUMNS: tl.constexpr):
    """One block of one value."""
    value = tl.program_id(0).to(tl.int64)
    place = tl.load(places + value)
    if place >= 0:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        block = tl.load(values + value * size + column, mask=column < size)
        tl.store(into + place + column, block.to(into.dtype.element_ty), mask=column < size)
