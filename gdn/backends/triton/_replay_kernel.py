"""Kernel of replay decode: a token over a checkpoint state and a ring of the updates since."""

import triton
import triton.language as tl

from gdn.backends.triton._recurrent_math import gates
from gdn.backends.triton._recurrent_math import load_row
from gdn.backends.triton._recurrent_math import slot_of
from gdn.backends.triton._recurrent_math import token_factors


@triton.jit(do_not_specialize=["num_slots"])
def replay_kernel(
    mixed_qkv, a, b, A_log, dt_bias, states, indices, ring_d, ring_k, ring_g, cursors, forced, out,
    scale, num_slots, k_offset, v_offset, token_stride, column_stride, a_token, a_head, b_token, b_head,
    A_log_head, dt_bias_head, state_slot, index_stride, d_slot, k_slot, g_slot, cursor_stride, forced_stride,
    HV: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, TILES: tl.constexpr, BL: tl.constexpr, FORCED: tl.constexpr,
):  # fmt: skip
    """Program (row, head, TILES tiles of BV state rows), the tiles fastest. `out` is contiguous `[rows, HV, V]`.

    The ring's products with the new key and query are found once for all tiles. Entries at and after the cursor are
    never read, and the appended one is the cursor's: no program reads what another writes.
    """
    PARTS: tl.constexpr = (V + BV * TILES - 1) // (BV * TILES)
    program = tl.program_id(0)
    part = program % PARTS
    head = (program // PARTS) % HV
    row = (program // (PARTS * HV)).to(tl.int64)
    key_head = head // RATIO
    rows = part * (BV * TILES) + tl.arange(0, BV)
    columns = tl.arange(0, BK)
    entries = tl.arange(0, BL)
    column_inside = columns < K
    target = out + (row * HV + head) * V + rows

    slot, exists = slot_of(indices, row * index_stride, num_slots)
    if not exists:
        for tile in tl.static_range(TILES):
            tl.store(target + tile * BV, tl.zeros([BV], out.dtype.element_ty), mask=rows + tile * BV < V)
        return
    place = states + slot * state_slot + head * (V * K) + rows[:, None] * K + columns[None, :]
    stored_state = tl.load(place, mask=(rows < V)[:, None] & column_inside[None, :], other=0.0)
    length = tl.minimum(tl.maximum(tl.load(cursors + row * cursor_stride), 0), L - 1)
    flush = length == L - 1
    if FORCED:
        flush = flush | (tl.load(forced + row * forced_stride) != 0)

    d_base = ring_d + slot * d_slot + head * (L * V)
    k_base = ring_k + slot * k_slot + key_head * (L * K)
    g_base = ring_g + slot * g_slot + head * L
    held = entries < length
    keys = tl.load(
        k_base + entries[:, None] * K + columns[None, :], mask=held[:, None] & column_inside[None, :], other=0.0
    ).to(tl.float32)
    decays = tl.load(g_base + entries, mask=held, other=0.0)
    total = tl.sum(decays, 0)
    later = tl.load(g_base + entries + 1, mask=entries + 1 < length, other=0.0)
    weights = tl.where(held, tl.exp(tl.cumsum(later, 0, reverse=True)), 0.0)

    source = mixed_qkv + row * token_stride
    query = load_row(source + key_head * K * column_stride, columns, column_stride, K, BK)
    key = load_row(source + k_offset + key_head * K * column_stride, columns, column_stride, K, BK)
    g, beta = gates(
        a + row * a_token + head * a_head, b + row * b_token + head * b_head,
        A_log + head * A_log_head, dt_bias + head * dt_bias_head,
    )  # fmt: skip
    q_factor, k_factor, overlap = token_factors(query, key, scale)
    alpha = tl.exp(g)
    base_decay = tl.exp(total)
    with_key = tl.sum(keys * key[None, :], 1) * (weights * k_factor)
    with_query = tl.sum(keys * query[None, :], 1) * (weights * q_factor)

    for tile in tl.static_range(TILES):
        here = rows + tile * BV
        inside = (here < V)[:, None] & column_inside[None, :]
        if tile > 0:
            stored_state = tl.load(place + tile * (BV * K), mask=inside, other=0.0)
        checkpoint = stored_state.to(tl.float32)
        updates = tl.load(
            d_base + entries[:, None] * V + here[None, :], mask=held[:, None] & (here < V)[None, :], other=0.0
        ).to(tl.float32)
        value = tl.load(source + v_offset + (head * V + here) * column_stride, mask=here < V, other=0.0)
        stored = tl.sum(checkpoint * key[None, :], 1) * (base_decay * k_factor) + tl.sum(updates * with_key[:, None], 0)
        read = tl.sum(checkpoint * query[None, :], 1) * (base_decay * q_factor) + tl.sum(
            updates * with_query[:, None], 0
        )
        update = beta * (value.to(tl.float32) - alpha * stored)
        output = alpha * read + overlap * update
        tl.store(target + tile * BV, output.to(out.dtype.element_ty), mask=here < V)
        if flush:
            live = checkpoint * base_decay
            entry = length - 1
            weight = 1.0
            while entry >= 0:
                d = tl.load(d_base + entry * V + here, mask=here < V, other=0.0).to(tl.float32)
                stored_key = load_row(k_base + entry * K, columns, 1, K, BK)
                live += (weight * d)[:, None] * stored_key[None, :]
                weight = weight * tl.exp(tl.load(g_base + entry))
                entry -= 1
            live = alpha * live + (update * k_factor)[:, None] * key[None, :]
            tl.store(place + tile * (BV * K), live.to(states.dtype.element_ty), mask=inside)
        else:
            tl.store(d_base + length * V + here, update.to(ring_d.dtype.element_ty), mask=here < V)
    if (part == 0) & (flush == 0):
        tl.store(g_base + length, g)
        if head % RATIO == 0:
            tl.store(k_base + length * K + columns, (key * k_factor).to(ring_k.dtype.element_ty), mask=column_inside)
