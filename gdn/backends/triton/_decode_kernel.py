"""Kernel of decode and packed decode: one token per request, one tile of one head's state per program."""

import triton
import triton.language as tl

from gdn.backends.triton._recurrent_math import gates
from gdn.backends.triton._recurrent_math import load_row
from gdn.backends.triton._recurrent_math import slot_of
from gdn.backends.triton._recurrent_math import step
from gdn.backends.triton._recurrent_math import unit


@triton.jit(do_not_specialize=["num_slots", "num_tokens"])
def decode_kernel(
    q, k, v, a, b, A_log, dt_bias, states, indices, offsets, out,
    scale, num_slots, num_tokens, k_offset, v_offset,
    q_token, q_head, q_dim, k_token, k_head, k_dim, v_token, v_head, v_dim, a_token, a_head, b_token, b_head,
    A_log_head, dt_bias_head, state_slot, index_stride, offset_stride,
    HV: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """Program (request, head, tile of BV state rows), the tile fastest. `out` is contiguous `[tokens, HV, V]`.

    With offsets, `out` is zeroed beforehand and a request without a token does nothing.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    tile = program % TILES
    head = (program // TILES) % HV
    request = (program // (TILES * HV)).to(tl.int64)
    rows = tile * BV + tl.arange(0, BV)
    columns = tl.arange(0, BK)
    row_inside = rows < V

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
        tl.store(target, tl.zeros([BV], out.dtype.element_ty), mask=row_inside)
        return

    place = states + slot * state_slot + head * (V * K) + rows[:, None] * K + columns[None, :]
    inside = row_inside[:, None] & (columns < K)[None, :]
    if (V % BV == 0) & (BK == K):
        inside = None
    if STREAM:
        stored = tl.load(place, mask=inside, other=None if inside is None else 0.0, eviction_policy="evict_first")
    else:
        stored = tl.load(place, mask=inside, other=None if inside is None else 0.0)

    key_head = head // RATIO
    g, beta = gates(
        a + token * a_token + head * a_head, b + token * b_token + head * b_head,
        A_log + head * A_log_head, dt_bias + head * dt_bias_head,
    )  # fmt: skip
    key = unit(load_row(k + k_offset + token * k_token + key_head * k_head, columns, k_dim, K, BK))
    query = unit(load_row(q + token * q_token + key_head * q_head, columns, q_dim, K, BK)) * scale
    value = tl.load(v + v_offset + token * v_token + head * v_head + rows * v_dim, mask=row_inside, other=0.0)
    state, output = step(stored.to(tl.float32), query, key, value.to(tl.float32), tl.exp(g), beta)

    tl.store(target, output.to(out.dtype.element_ty), mask=row_inside)
    if STREAM:
        tl.store(place, state.to(states.dtype.element_ty), mask=inside, eviction_policy="evict_first")
    else:
        tl.store(place, state.to(states.dtype.element_ty), mask=inside)
