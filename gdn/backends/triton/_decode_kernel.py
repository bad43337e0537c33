"""Kernel of decode and packed decode: one token per request, some tiles of one head's state per program."""

import triton
import triton.language as tl

from gdn.backends.triton._recurrent_math import gates
from gdn.backends.triton._recurrent_math import load_row
from gdn.backends.triton._recurrent_math import slot_of
from gdn.backends.triton._recurrent_math import step
from gdn.backends.triton._recurrent_math import token_factors


@triton.jit(do_not_specialize=["num_slots", "num_tokens"])
def decode_kernel(
    q, k, v, a, b, A_log, dt_bias, states, indices, offsets, out,
    scale, num_slots, num_tokens, k_offset, v_offset,
    q_token, q_head, q_dim, k_token, k_head, k_dim, v_token, v_head, v_dim, a_token, a_head, b_token, b_head,
    A_log_head, dt_bias_head, state_slot, index_stride, offset_stride,
    HV: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TILES: tl.constexpr, HAS_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Program (request, head, TILES tiles of BV state rows), the tiles fastest. `out` is contiguous `[tokens, HV, V]`.

    A tile is loaded while the one before it is computed. With offsets, `out` is zeroed beforehand and a request
    without a token does nothing.
    """
    PARTS: tl.constexpr = (V + BV * TILES - 1) // (BV * TILES)
    program = tl.program_id(0)
    part = program % PARTS
    head = (program // PARTS) % HV
    request = (program // (PARTS * HV)).to(tl.int64)
    rows = part * (BV * TILES) + tl.arange(0, BV)
    columns = tl.arange(0, BK)

    slot, exists = slot_of(indices, request * index_stride, num_slots)
    if HAS_OFFSETS:
        token = tl.load(offsets + request * offset_stride).to(tl.int64)
        after = tl.load(offsets + (request + 1) * offset_stride).to(tl.int64)
        if (after <= token) | (token < 0) | (token >= num_tokens):
            return
    else:
        token = request
    target = out + (token * HV + head) * V + rows
    if not exists:
        for tile in tl.static_range(TILES):
            tl.store(target + tile * BV, tl.zeros([BV], out.dtype.element_ty), mask=rows + tile * BV < V)
        return

    place = states + slot * state_slot + head * (V * K) + rows[:, None] * K + columns[None, :]
    whole: tl.constexpr = (V % (BV * TILES) == 0) & (BK == K)
    if whole:
        stored = tl.load(place)
    else:
        stored = tl.load(place, mask=(rows < V)[:, None] & (columns < K)[None, :], other=0.0)
    values = v + v_offset + token * v_token + head * v_head + rows * v_dim
    value = tl.load(values, mask=rows < V, other=0.0)

    key_head = head // RATIO
    key = load_row(k + k_offset + token * k_token + key_head * k_head, columns, k_dim, K, BK)
    query = load_row(q + token * q_token + key_head * q_head, columns, q_dim, K, BK)
    g, beta = gates(
        a + token * a_token + head * a_head, b + token * b_token + head * b_head,
        A_log + head * A_log_head, dt_bias + head * dt_bias_head,
    )  # fmt: skip
    alpha = tl.exp(g)
    q_factor, k_factor, overlap = token_factors(query, key, scale)

    for tile in tl.static_range(TILES):
        here = rows + tile * BV
        following = stored
        next_value = value
        if tile + 1 < TILES:
            after_this = here + BV
            if whole:
                following = tl.load(place + (tile + 1) * (BV * K))
            else:
                inside = (after_this < V)[:, None] & (columns < K)[None, :]
                following = tl.load(place + (tile + 1) * (BV * K), mask=inside, other=0.0)
            next_value = tl.load(values + (tile + 1) * BV * v_dim, mask=after_this < V, other=0.0)
        state, output = step(
            stored.to(tl.float32), query, key, value.to(tl.float32), alpha, beta, q_factor, k_factor, overlap
        )
        tl.store(target + tile * BV, output.to(out.dtype.element_ty), mask=here < V)
        if whole:
            tl.store(place + tile * (BV * K), state.to(states.dtype.element_ty))
        else:
            inside = (here < V)[:, None] & (columns < K)[None, :]
            tl.store(place + tile * (BV * K), state.to(states.dtype.element_ty), mask=inside)
        stored = following
        value = next_value
