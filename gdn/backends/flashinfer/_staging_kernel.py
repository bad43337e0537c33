"""Kernels of `staging`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "usable", "instead"])
def slots_kernel(indices, slots, usable, instead, count, index_stride, BLOCK: tl.constexpr):
    """The slot, or `instead` where there is none."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + row * index_stride, mask=row < count, other=-1)
    real = (index >= 0) & (index < usable)
    tl.store(slots + row, tl.where(real, index, instead).to(tl.int32), mask=row < count)


@triton.jit(do_not_specialize=["tokens", "sequences", "usable"])
def prefill_kernel(
    q, k, g, indices, unit_q, unit_k, decay, slots, usable, tokens, sequences,
    q_token, q_head, k_token, k_head, g_token, g_head, index_stride,
    HEADS: tl.constexpr, RATIO: tl.constexpr, RATIO_PADDED: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of one key head and some tokens: q and k of length one, exp of the gates; of the first head also the slots."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    token, real = row.to(tl.int64), row < tokens
    column = tl.arange(0, K)[None, :]
    to = (token * HEADS + head)[:, None] * K + column
    query = tl.load(q + (token * q_token + head * q_head)[:, None] + column, mask=real[:, None], other=0)
    key = tl.load(k + (token * k_token + head * k_head)[:, None] + column, mask=real[:, None], other=0)
    value_head = head * RATIO + tl.arange(0, RATIO_PADDED)[None, :]
    gated = real[:, None] & (tl.arange(0, RATIO_PADDED) < RATIO)[None, :]
    gate = tl.load(g + token[:, None] * g_token + value_head * g_head, mask=gated, other=0)
    query, key = query.to(tl.float32), key.to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, axis=1) + 1e-6)[:, None]
    key *= tl.rsqrt(tl.sum(key * key, axis=1) + 1e-6)[:, None]
    tl.store(unit_q + to, query.to(unit_q.dtype.element_ty), mask=real[:, None])
    tl.store(unit_k + to, key.to(unit_k.dtype.element_ty), mask=real[:, None])
    tl.store(decay + token[:, None] * (HEADS * RATIO) + value_head, tl.exp(gate), mask=gated)
    if head == 0:
        index = tl.load(indices + token * index_stride, mask=row < sequences, other=-1)
        slot = tl.where((index >= 0) & (index < usable), index, -1)
        tl.store(slots + row, slot.to(tl.int32), mask=row < sequences)


@triton.jit(do_not_specialize=["tokens", "usable"])
def drafts_kernel(
    q, k, v, a, b, offsets, indices, dense_q, dense_k, dense_v, dense_a, dense_b, slots, usable, tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, a_token, a_head, b_token, b_head, offset_stride, index_stride,
    STEPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    HEADS_PADDED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One draft of one request into the dense batch; beyond the request's length any row that exists."""
    place = tl.program_id(0).to(tl.int64)
    request, step = place // STEPS, place % STEPS
    start = tl.load(offsets + request * offset_stride).to(tl.int64)
    token = tl.minimum(tl.maximum(start + step, 0), tokens - 1)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    keys, values = column < KEYS * K, column < VALUES * V
    key_from, value_from = column // K, column // V
    query = tl.load(q + token * q_token + key_from * q_head + column % K, mask=keys)
    key = tl.load(k + token * k_token + key_from * k_head + column % K, mask=keys)
    value = tl.load(v + token * v_token + value_from * v_head + column % V, mask=values)
    tl.store(dense_q + place * (KEYS * K) + column, query, mask=keys)
    tl.store(dense_k + place * (KEYS * K) + column, key, mask=keys)
    tl.store(dense_v + place * (VALUES * V) + column, value, mask=values)
    if tl.program_id(1) == 0:
        head = tl.arange(0, HEADS_PADDED)
        here = head < VALUES
        tl.store(dense_a + place * VALUES + head, tl.load(a + token * a_token + head * a_head, mask=here), mask=here)
        tl.store(dense_b + place * VALUES + head, tl.load(b + token * b_token + head * b_head, mask=here), mask=here)
        if step == 0:
            index = tl.load(indices + request * index_stride)
            tl.store(slots + request, tl.where((index >= 0) & (index < usable), index, 0).to(tl.int32))
