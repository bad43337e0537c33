"""Kernels of verify: the drafts of each request in order, one tile of one head's state per program."""

import triton
import triton.language as tl

from gdn.backends.triton._recurrent_math import gates
from gdn.backends.triton._recurrent_math import load_row
from gdn.backends.triton._recurrent_math import slot_of
from gdn.backends.triton._recurrent_math import step
from gdn.backends.triton._recurrent_math import unit


@triton.jit
def _load_token(
    q, k, v, a, b, A_log, dt_bias, token, key_head, head, rows, row_inside, columns, scale,
    q_token, q_head, q_dim, k_token, k_head, k_dim, v_token, v_head, v_dim, a_token, a_head, b_token, b_head,
    A_log_head, dt_bias_head, K: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Query, key, value, decay and write strength of one token and head."""
    g, beta = gates(
        a + token * a_token + head * a_head, b + token * b_token + head * b_head,
        A_log + head * A_log_head, dt_bias + head * dt_bias_head,
    )  # fmt: skip
    key = unit(load_row(k + token * k_token + key_head * k_head, columns, k_dim, K, BK))
    query = unit(load_row(q + token * q_token + key_head * q_head, columns, q_dim, K, BK)) * scale
    value = tl.load(v + token * v_token + head * v_head + rows * v_dim, mask=row_inside, other=0.0)
    return query, key, value.to(tl.float32), tl.exp(g), beta


@triton.jit
def _is_ancestor(parents, ancestor, draft, parent_draft):
    """Whether the path from the root to `draft` passes `ancestor`."""
    at = draft
    while at > ancestor:
        named = tl.load(parents + at * parent_draft).to(tl.int32)
        at = tl.where((named >= 0) & (named < at), named, 0)
    return at == ancestor


@triton.jit(do_not_specialize=["num_slots", "num_tokens", "num_requests", "num_rows", "steps"])
def verify_kernel(
    q, k, v, a, b, A_log, dt_bias, states, indices, offsets, buffer, buffer_rows, parents, out,
    scale, num_slots, num_tokens, num_requests, num_rows, steps,
    q_token, q_head, q_dim, k_token, k_head, k_dim, v_token, v_head, v_dim, a_token, a_head, b_token, b_head,
    A_log_head, dt_bias_head, state_slot, index_stride, offset_stride, buffer_row, buffer_step, row_stride,
    parent_request, parent_draft,
    HV: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_BUFFER: tl.constexpr, TREE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Program (request, head, tile of BV state rows), the tile fastest. `out` is contiguous `[tokens, HV, V]`.

    The loads of a draft are issued before the state of the draft before it is stored. The programs of the last request
    also zero the rows that follow it.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    tile = program % TILES
    head = (program // TILES) % HV
    request = (program // (TILES * HV)).to(tl.int64)
    key_head = head // RATIO
    rows = tile * BV + tl.arange(0, BV)
    columns = tl.arange(0, BK)
    row_inside = rows < V
    inside = row_inside[:, None] & (columns < K)[None, :]
    target = out + head * V + rows

    first = tl.load(offsets + request * offset_stride).to(tl.int64)
    last = tl.load(offsets + (request + 1) * offset_stride).to(tl.int64)
    first = tl.maximum(first, 0)
    last = tl.minimum(last, num_tokens)
    if request == num_requests - 1:
        token = last
        while token < num_tokens:
            tl.store(target + token * (HV * V), tl.zeros([BV], out.dtype.element_ty), mask=row_inside)
            token += 1
    slot, exists = slot_of(indices, request * index_stride, num_slots)
    if not exists:
        token = first
        while token < last:
            tl.store(target + token * (HV * V), tl.zeros([BV], out.dtype.element_ty), mask=row_inside)
            token += 1
        return
    length = tl.minimum(last - first, steps).to(tl.int32)
    if length <= 0:
        return

    tile_offset = rows[:, None] * K + columns[None, :] + head * (V * K)
    state = tl.load(states + slot * state_slot + tile_offset, mask=inside, other=0.0).to(tl.float32)
    kept = False
    place = buffer
    if HAS_BUFFER:
        row, kept = slot_of(buffer_rows, request * row_stride, num_rows)
        place = buffer + row * buffer_row + tile_offset
    links = parents
    if TREE:
        links = parents + request * parent_request

    query, key, value, alpha, beta = _load_token(
        q, k, v, a, b, A_log, dt_bias, first, key_head, head, rows, row_inside, columns, scale,
        q_token, q_head, q_dim, k_token, k_head, k_dim, v_token, v_head, v_dim, a_token, a_head, b_token, b_head,
        A_log_head, dt_bias_head, K, BK,
    )  # fmt: skip
    draft = 0
    while draft < length:
        for _ in tl.static_range(UNROLL):
            if draft < length:
                if TREE:
                    if draft > 0:
                        named = tl.load(links + draft * parent_draft).to(tl.int32)
                        parent = tl.where((named >= 0) & (named < draft), named, 0)
                        if parent != draft - 1:
                            state = tl.load(place + parent * buffer_step, mask=inside, other=0.0).to(tl.float32)
                state, output = step(state, query, key, value, alpha, beta)
                following = tl.minimum(draft + 1, length - 1)
                query, key, value, alpha, beta = _load_token(
                    q, k, v, a, b, A_log, dt_bias, first + following, key_head, head, rows, row_inside, columns, scale,
                    q_token, q_head, q_dim, k_token, k_head, k_dim, v_token, v_head, v_dim, a_token, a_head,
                    b_token, b_head, A_log_head, dt_bias_head, K, BK,
                )  # fmt: skip
                tl.store(target + (first + draft) * (HV * V), output.to(out.dtype.element_ty), mask=row_inside)
                if HAS_BUFFER:
                    if kept:
                        tl.store(place + draft * buffer_step, state.to(buffer.dtype.element_ty), mask=inside)
                if TREE:
                    tl.debug_barrier()
            draft += 1


@triton.jit(do_not_specialize=["num_slots", "num_tokens", "num_requests", "steps"])
def unbuffered_tree_kernel(
    q, k, v, a, b, A_log, dt_bias, states, indices, offsets, parents, out,
    scale, num_slots, num_tokens, num_requests, steps,
    q_token, q_head, q_dim, k_token, k_head, k_dim, v_token, v_head, v_dim, a_token, a_head, b_token, b_head,
    A_log_head, dt_bias_head, state_slot, index_stride, offset_stride, parent_request, parent_draft,
    HV: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A tree whose states nobody stores: program (request, draft, head, tile) walks from the root to its draft."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    tile = program % TILES
    head = (program // TILES) % HV
    request = (program // (TILES * HV)).to(tl.int64)
    wanted = tl.program_id(1)
    key_head = head // RATIO
    rows = tile * BV + tl.arange(0, BV)
    columns = tl.arange(0, BK)
    row_inside = rows < V
    inside = row_inside[:, None] & (columns < K)[None, :]
    target = out + head * V + rows

    first = tl.maximum(tl.load(offsets + request * offset_stride).to(tl.int64), 0)
    last = tl.minimum(tl.load(offsets + (request + 1) * offset_stride).to(tl.int64), num_tokens)
    if (request == num_requests - 1) & (wanted == 0):
        token = last
        while token < num_tokens:
            tl.store(target + token * (HV * V), tl.zeros([BV], out.dtype.element_ty), mask=row_inside)
            token += 1
    if wanted >= last - first:
        return
    slot, exists = slot_of(indices, request * index_stride, num_slots)
    if not exists:
        tl.store(target + (first + wanted) * (HV * V), tl.zeros([BV], out.dtype.element_ty), mask=row_inside)
        return

    tile_offset = rows[:, None] * K + columns[None, :] + head * (V * K)
    state = tl.load(states + slot * state_slot + tile_offset, mask=inside, other=0.0).to(tl.float32)
    output = tl.zeros([BV], tl.float32)
    draft = 0
    while draft <= wanted:
        if _is_ancestor(parents + request * parent_request, draft, wanted, parent_draft):
            query, key, value, alpha, beta = _load_token(
                q, k, v, a, b, A_log, dt_bias, first + draft, key_head, head, rows, row_inside, columns, scale,
                q_token, q_head, q_dim, k_token, k_head, k_dim, v_token, v_head, v_dim, a_token, a_head,
                b_token, b_head, A_log_head, dt_bias_head, K, BK,
            )  # fmt: skip
            state, output = step(state, query, key, value, alpha, beta)
        draft += 1
    tl.store(target + (first + wanted) * (HV * V), output.to(out.dtype.element_ty), mask=row_inside)
