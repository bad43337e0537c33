"""Kernel of replay decode: a token over a checkpoint state and a ring of the updates since."""

import triton
import triton.language as tl

from gdn.backends.triton._recurrent_math import gates
from gdn.backends.triton._recurrent_math import load_row
from gdn.backends.triton._recurrent_math import slot_of
from gdn.backends.triton._recurrent_math import unit


@triton.jit(do_not_specialize=["num_slots"])
def replay_kernel(
    mixed_qkv, a, b, A_log, dt_bias, states, indices, ring_d, ring_k, ring_g, cursors, forced, out,
    scale, num_slots, k_offset, v_offset, token_stride, column_stride, a_token, a_head, b_token, b_head,
    A_log_head, dt_bias_head, state_slot, index_stride, d_slot, k_slot, g_slot, cursor_stride, forced_stride,
    HV: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BL: tl.constexpr, FORCED: tl.constexpr,
):  # fmt: skip
    """Program (row, head, tile of BV state rows), the tile fastest. `out` is contiguous `[rows, HV, V]`.

    Entries at and after the cursor are never read, and the appended one is the cursor's: no program reads what another
    writes.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    tile = program % TILES
    head = (program // TILES) % HV
    row = (program // (TILES * HV)).to(tl.int64)
    key_head = head // RATIO
    rows = tile * BV + tl.arange(0, BV)
    columns = tl.arange(0, BK)
    entries = tl.arange(0, BL)
    row_inside = rows < V
    column_inside = columns < K
    inside = row_inside[:, None] & column_inside[None, :]
    target = out + (row * HV + head) * V + rows

    slot, exists = slot_of(indices, row * index_stride, num_slots)
    if not exists:
        tl.store(target, tl.zeros([BV], out.dtype.element_ty), mask=row_inside)
        return
    place = states + slot * state_slot + head * (V * K) + rows[:, None] * K + columns[None, :]
    checkpoint = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    length = tl.minimum(tl.maximum(tl.load(cursors + row * cursor_stride), 0), L - 1)
    flush = length == L - 1
    if FORCED:
        flush = flush | (tl.load(forced + row * forced_stride) != 0)

    d_base = ring_d + slot * d_slot + head * (L * V)
    k_base = ring_k + slot * k_slot + key_head * (L * K)
    g_base = ring_g + slot * g_slot + head * L
    held = entries < length
    updates = tl.load(
        d_base + entries[:, None] * V + rows[None, :], mask=held[:, None] & row_inside[None, :], other=0.0
    ).to(tl.float32)
    keys = tl.load(
        k_base + entries[:, None] * K + columns[None, :], mask=held[:, None] & column_inside[None, :], other=0.0
    ).to(tl.float32)
    decays = tl.load(g_base + entries, mask=held, other=0.0)
    total = tl.sum(decays, 0)
    weights = tl.where(held, tl.exp(tl.minimum(total - tl.cumsum(decays, 0), 0.0)), 0.0)

    g, beta = gates(
        a + row * a_token + head * a_head, b + row * b_token + head * b_head,
        A_log + head * A_log_head, dt_bias + head * dt_bias_head,
    )  # fmt: skip
    source = mixed_qkv + row * token_stride
    query = unit(load_row(source + key_head * K * column_stride, columns, column_stride, K, BK)) * scale
    key = unit(load_row(source + k_offset + key_head * K * column_stride, columns, column_stride, K, BK))
    value = tl.load(source + v_offset + (head * V + rows) * column_stride, mask=row_inside, other=0.0).to(tl.float32)

    alpha = tl.exp(g)
    base_decay = tl.exp(total)
    with_key = tl.sum(keys * key[None, :], 1) * weights
    with_query = tl.sum(keys * query[None, :], 1) * weights
    stored = base_decay * tl.sum(checkpoint * key[None, :], 1) + tl.sum(updates * with_key[:, None], 0)
    read = base_decay * tl.sum(checkpoint * query[None, :], 1) + tl.sum(updates * with_query[:, None], 0)
    update = beta * (value - alpha * stored)
    output = alpha * read + tl.sum(key * query, 0) * update
    tl.store(target, output.to(out.dtype.element_ty), mask=row_inside)

    if flush:
        live = checkpoint * base_decay
        entry = length - 1
        weight = 1.0
        while entry >= 0:
            d = tl.load(d_base + entry * V + rows, mask=row_inside, other=0.0).to(tl.float32)
            stored_key = load_row(k_base + entry * K, columns, 1, K, BK)
            live += (weight * d)[:, None] * stored_key[None, :]
            weight = weight * tl.exp(tl.load(g_base + entry))
            entry -= 1
        live = alpha * live + update[:, None] * key[None, :]
        tl.store(place, live.to(states.dtype.element_ty), mask=inside)
    else:
        tl.store(d_base + length * V + rows, update.to(ring_d.dtype.element_ty), mask=row_inside)
        if tile == 0:
            tl.store(g_base + length, g)
            if head % RATIO == 0:
                tl.store(k_base + length * K + columns, key.to(ring_k.dtype.element_ty), mask=column_inside)
