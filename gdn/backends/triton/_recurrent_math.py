"""What the recurrent kernels share: gates, norms, one step of the recurrence on a tile of the state.

Keys and queries stay as they were given: their norms (and the scale) are factors of the products with the state, so a
token's vectors are only loaded, never rewritten.
"""

import triton
import triton.language as tl

from gdn.backends.triton._gating_kernel import log_decay

_EPSILON = tl.constexpr(1e-6)


@triton.jit
def slot_of(indices, position, num_slots):
    """The slot that `indices[position]` names, int64, and whether it exists."""
    slot = tl.load(indices + position).to(tl.int64)
    return slot, (slot >= 0) & (slot < num_slots)


@triton.jit
def load_row(base, columns, column_stride, extent: tl.constexpr, BLOCK: tl.constexpr):
    """One row, fp32; columns beyond `extent` are 0."""
    if BLOCK == extent:
        return tl.load(base + columns * column_stride).to(tl.float32)
    return tl.load(base + columns * column_stride, mask=columns < extent, other=0.0).to(tl.float32)


@triton.jit
def inverse_norm(x):
    """1 / sqrt(sum(x^2) + 1e-6)."""
    return tl.rsqrt(tl.sum(x * x, 0) + _EPSILON)


@triton.jit
def inverse_norms(rows):
    """The same of each row."""
    wide = rows.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + _EPSILON)


@triton.jit
def gates(a, b, A_log, dt_bias):
    """Log decay g and write strength beta of one head and token, from pointers to their four numbers."""
    g = log_decay(tl.load(A_log).to(tl.float32), tl.load(a).to(tl.float32) + tl.load(dt_bias).to(tl.float32))
    return g, 1.0 / (1.0 + tl.exp(-tl.load(b).to(tl.float32)))


@triton.jit
def raw_dot(rows, stored, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Raw keys or queries `[M, BK]` times the rows of a state `[N, BK]`, fp32 `[M, N]`.

    PRECISION "split" is for 16-bit rows and fp32 states: their upper 11 bits and the rest, in tf32.
    """
    if PRECISION == "split":
        rows = rows.to(tl.float32)
        high = (stored.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        rest = tl.dot(rows, tl.trans(stored - high), input_precision="tf32")
        return tl.dot(rows, tl.trans(high), rest, input_precision="tf32")
    else:
        return tl.dot(rows.to(OPERAND), tl.trans(stored.to(OPERAND)), input_precision=PRECISION)


@triton.jit
def token_factors(q, k, scale):
    """Factors of the raw query and key, and the product of the two unit vectors with the scale."""
    k_factor = inverse_norm(k)
    q_factor = inverse_norm(q) * scale
    return q_factor, k_factor, tl.sum(k * q, 0) * (k_factor * q_factor)


@triton.jit
def step(state, q, k, v, alpha, beta, q_factor, k_factor, overlap):
    """One token on `state` `[BV, BK]`: the state after it and its output `[BV]`.

    Both products with the state are taken before it changes: o = alpha S q + (k . q) d.
    """
    stored = tl.sum(state * k[None, :], 1) * k_factor
    read = tl.sum(state * q[None, :], 1) * q_factor
    d = beta * (v - alpha * stored)
    return alpha * state + (d * k_factor)[:, None] * k[None, :], alpha * read + overlap * d


@triton.jit
def zero_rows(target, begin, end, stride, rows, V: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr):
    """Zero this program's part of the output of tokens begin..end-1."""
    token = begin
    while token < end:
        for tile in tl.static_range(TILES):
            zeros = tl.zeros([BV], target.dtype.element_ty)
            tl.store(target + token * stride + rows + tile * BV, zeros, mask=rows + tile * BV < V)
        token += 1


@triton.jit
def parent_of(links, draft, stride):
    """Parent of a draft; one that isn't an earlier draft counts as the root."""
    named = tl.load(links + draft * stride).to(tl.int32)
    return tl.where((named >= 0) & (named < draft), named, 0)
