"""Kernels of `rows`."""

import triton
import triton.language as tl


@triton.jit
def _sequence_of(row, offsets, sequences, offset_stride, HALVINGS: tl.constexpr):
    """The first sequence that ends after each row; `sequences` where there is none."""
    low = tl.zeros_like(row).to(tl.int64)
    high = low + sequences
    for _ in tl.static_range(HALVINGS):
        middle = (low + high) // 2
        end = tl.load(offsets + (middle + 1) * offset_stride, mask=middle < sequences, other=0)
        before = (end <= row) & (low < high)
        high = tl.where(before, high, middle)
        low = tl.where(before, middle + 1, low)
    return low


@triton.jit
def _zero(out, row, nobody, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zero the rows of nobody; a program of rows that all belong to somebody writes nothing."""
    if tl.sum(nobody.to(tl.int32)) > 0:
        for begin in range(0, WIDTH, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
            zeros = tl.zeros((ROWS, COLUMNS), out.dtype.element_ty)
            tl.store(out + place, zeros, mask=nobody[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=["usable", "tokens", "sequences"])
def silence_kernel(
    out, offsets, indices, usable, tokens, sequences, offset_stride, index_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """Packed rows that lie in no sequence or in one without a slot."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sequence = _sequence_of(row, offsets, sequences, offset_stride, HALVINGS)
    owned = (sequence < sequences) & (row >= tl.load(offsets))
    slot = tl.load(indices + sequence * index_stride, mask=owned, other=-1)
    _zero(out, row, (row < tokens) & ((slot < 0) | (slot >= usable)), WIDTH, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["usable", "count"])
def silence_each_kernel(
    out, indices, usable, count, index_stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Rows, one of each slot, that have none."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(indices + row * index_stride, mask=row < count, other=-1)
    _zero(out, row, (row < count) & ((slot < 0) | (slot >= usable)), WIDTH, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["usable", "tokens", "sequences"])
def spread_kernel(
    given, offsets, indices, out, usable, tokens, sequences, offset_stride, index_stride,
    KEPT: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """Part of one packed row from its place in the dense batch; zero where it has none."""
    row = tl.program_id(0)
    sequence = _sequence_of(row, offsets, sequences, offset_stride, HALVINGS)
    owned = (sequence < sequences) & (row >= tl.load(offsets))
    slot = tl.load(indices + sequence * index_stride, mask=owned, other=-1)
    start = tl.load(offsets + sequence * offset_stride, mask=owned, other=0)
    step = row - start.to(tl.int64)
    kept = (slot >= 0) & (slot < usable) & (step < KEPT)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(given + (sequence * STEPS + step) * WIDTH + column, mask=kept & (column < WIDTH), other=0)
    tl.store(out + row.to(tl.int64) * WIDTH + column, value, mask=column < WIDTH)


@triton.jit(do_not_specialize=["usable", "buffer_rows"])
def store_drafts_kernel(
    states, offsets, indices, rows, buffer, usable, buffer_rows,
    offset_stride, index_stride, row_stride, buffer_row, buffer_step,
    KEPT: tl.constexpr, STEPS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Part of the state after one draft to its row and step of the buffer."""
    place = tl.program_id(0).to(tl.int64)
    request, step = place // STEPS, place % STEPS
    length = tl.load(offsets + (request + 1) * offset_stride) - tl.load(offsets + request * offset_stride)
    slot, row = tl.load(indices + request * index_stride), tl.load(rows + request * row_stride)
    kept = (slot >= 0) & (slot < usable) & (row >= 0) & (row < buffer_rows) & (step < length) & (step < KEPT)
    if kept:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        block = tl.load(states + place * SIZE + column, mask=column < SIZE)
        to = buffer + row.to(tl.int64) * buffer_row + step * buffer_step + column
        tl.store(to, block.to(buffer.dtype.element_ty), mask=column < SIZE)


@triton.jit
def store_kernel(values, places, into, size, COLUMNS: tl.constexpr):
    """One block of one value."""
    value = tl.program_id(0).to(tl.int64)
    place = tl.load(places + value)
    if place >= 0:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        block = tl.load(values + value * size + column, mask=column < size)
        tl.store(into + place + column, block.to(into.dtype.element_ty), mask=column < size)
