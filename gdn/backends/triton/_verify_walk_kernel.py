"""Kernels of verify for any number of drafts: each request's in order, some tiles of one head's state per program."""

import triton
import triton.language as tl

from gdn.backends.triton._recurrent_math import gates
from gdn.backends.triton._recurrent_math import load_row
from gdn.backends.triton._recurrent_math import parent_of
from gdn.backends.triton._recurrent_math import slot_of
from gdn.backends.triton._recurrent_math import step
from gdn.backends.triton._recurrent_math import token_factors
from gdn.backends.triton._recurrent_math import zero_rows


@triton.jit
def _is_ancestor(links, ancestor, draft, stride):
    """Whether the path from the root to `draft` passes `ancestor`."""
    at = draft
    while at > ancestor:
        at = parent_of(links, at, stride)
    return at == ancestor


@triton.jit
def _state_after(
    source, inside, wanted, links, parent_draft, q_base, k_base, v_base, a_base, b_base, A_log, dt_bias, scale,
    columns, value_inside, q_token, q_dim, k_token, k_dim, v_token, a_token, b_token, K: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """State after draft `wanted` and its output, by walking from the slot's state along the draft's ancestors."""
    state = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    output = tl.sum(state, 1) * 0.0
    draft = 0
    while draft <= wanted:
        if _is_ancestor(links, draft, wanted, parent_draft):
            query = load_row(q_base + draft * q_token, columns, q_dim, K, BK)
            key = load_row(k_base + draft * k_token, columns, k_dim, K, BK)
            value = tl.load(v_base + draft * v_token, mask=value_inside, other=0.0)
            g, beta = gates(a_base + draft * a_token, b_base + draft * b_token, A_log, dt_bias)
            q_factor, k_factor, overlap = token_factors(query, key, scale)
            state, output = step(state, query, key, value.to(tl.float32), tl.exp(g), beta, q_factor, k_factor, overlap)
        draft += 1
    return state, output


@triton.jit(do_not_specialize=["num_slots", "num_tokens", "num_requests", "num_rows", "steps"])
def verify_walk_kernel(
    q, k, v, a, b, A_log, dt_bias, states, indices, offsets, buffer, buffer_rows, parents, out,
    scale, num_slots, num_tokens, num_requests, num_rows, steps,
    q_token, q_head, q_dim, k_token, k_head, k_dim, v_token, v_head, v_dim, a_token, a_head, b_token, b_head,
    A_log_head, dt_bias_head, state_slot, index_stride, offset_stride, buffer_row, buffer_step, row_stride,
    parent_request, parent_draft,
    HV: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TILES: tl.constexpr, DRAFTS: tl.constexpr, HAS_BUFFER: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Program (request, head, TILES tiles of BV state rows), the tiles fastest. `out` is contiguous `[tokens, HV, V]`.

    Drafts go in rounds of DRAFTS, whose factors and gates are found once for all tiles; more than one round needs
    TILES == 1. The programs of the last request also zero the rows that follow it.
    """
    PARTS: tl.constexpr = (V + BV * TILES - 1) // (BV * TILES)
    program = tl.program_id(0)
    part = program % PARTS
    head = (program // PARTS) % HV
    request = (program // (PARTS * HV)).to(tl.int64)
    key_head = head // RATIO
    rows = part * (BV * TILES) + tl.arange(0, BV)
    columns = tl.arange(0, BK)
    column_inside = (columns < K)[None, :]
    target = out + head * V

    first = tl.maximum(tl.load(offsets + request * offset_stride).to(tl.int64), 0)
    last = tl.minimum(tl.load(offsets + (request + 1) * offset_stride).to(tl.int64), num_tokens)
    slot, exists = slot_of(indices, request * index_stride, num_slots)
    if request == 0:
        zero_rows(target, first * 0, tl.minimum(first, num_tokens), HV * V, rows, V, BV, TILES)
    if request == num_requests - 1:
        zero_rows(target, last, num_tokens, HV * V, rows, V, BV, TILES)
    if not exists:
        zero_rows(target, first, last, HV * V, rows, V, BV, TILES)
        return
    length = tl.minimum(last - first, steps).to(tl.int32)
    zero_rows(target, first + tl.maximum(length, 0), last, HV * V, rows, V, BV, TILES)
    if length <= 0:
        return

    offsets_in_head = rows[:, None] * K + columns[None, :] + head * (V * K)
    source = states + slot * state_slot + offsets_in_head
    state = tl.load(source, mask=(rows < V)[:, None] & column_inside, other=0.0).to(tl.float32)
    kept = False
    place = buffer
    if HAS_BUFFER:
        row, kept = slot_of(buffer_rows, request * row_stride, num_rows)
        place = buffer + row * buffer_row + offsets_in_head
    links = parents
    if TREE:
        links = parents + request * parent_request
    q_base = q + first * q_token + key_head * q_head
    k_base = k + first * k_token + key_head * k_head
    v_base = v + first * v_token + head * v_head + rows * v_dim

    if TREE:
        if not kept:
            draft = 0
            while draft < length:
                for tile in tl.static_range(TILES):
                    here = rows + tile * BV
                    _, output = _state_after(
                        source + tile * (BV * K), (here < V)[:, None] & column_inside, draft, links, parent_draft,
                        q_base, k_base, v_base + tile * BV * v_dim, a + first * a_token + head * a_head,
                        b + first * b_token + head * b_head, A_log + head * A_log_head, dt_bias + head * dt_bias_head,
                        scale, columns, here < V, q_token, q_dim, k_token, k_dim, v_token, a_token, b_token, K, BK,
                    )  # fmt: skip
                    row_out = target + (first + draft) * (HV * V) + here
                    tl.store(row_out, output.to(out.dtype.element_ty), mask=here < V)
                draft += 1
            return

    start = 0
    while start < length:
        factors = ()
        for draft in tl.static_range(DRAFTS):
            at = tl.minimum(start + draft, length - 1)
            query = load_row(q_base + at * q_token, columns, q_dim, K, BK)
            key = load_row(k_base + at * k_token, columns, k_dim, K, BK)
            token = first + at
            g, beta = gates(
                a + token * a_token + head * a_head, b + token * b_token + head * b_head,
                A_log + head * A_log_head, dt_bias + head * dt_bias_head,
            )  # fmt: skip
            q_factor, k_factor, overlap = token_factors(query, key, scale)
            factors = factors + ((tl.exp(g), beta, q_factor, k_factor, overlap),)  # noqa: RUF005
        for tile in tl.static_range(TILES):
            here = rows + tile * BV
            inside = (here < V)[:, None] & column_inside
            if tile > 0:
                state = tl.load(source + tile * (BV * K), mask=inside, other=0.0).to(tl.float32)
            for draft in tl.static_range(DRAFTS):
                at = start + draft
                if at < length:
                    query = load_row(q_base + at * q_token, columns, q_dim, K, BK)
                    key = load_row(k_base + at * k_token, columns, k_dim, K, BK)
                    value = tl.load(v_base + at * v_token + tile * BV * v_dim, mask=here < V, other=0.0)
                    if TREE:
                        if at > 0:
                            parent = parent_of(links, at, parent_draft)
                            if parent != at - 1:
                                from_buffer = place + parent * buffer_step + tile * (BV * K)
                                state = tl.load(from_buffer, mask=inside, other=0.0).to(tl.float32)
                    state, output = step(
                        state, query, key, value.to(tl.float32), factors[draft][0], factors[draft][1],
                        factors[draft][2], factors[draft][3], factors[draft][4],
                    )  # fmt: skip
                    row_out = target + (first + at) * (HV * V) + here
                    tl.store(row_out, output.to(out.dtype.element_ty), mask=here < V)
                    if HAS_BUFFER:
                        if kept:
                            to_buffer = place + at * buffer_step + tile * (BV * K)
                            tl.store(to_buffer, state.to(buffer.dtype.element_ty), mask=inside)
                    if TREE:
                        tl.debug_barrier()
        start += DRAFTS


@triton.jit(do_not_specialize=["num_slots", "num_tokens", "num_requests"])
def unbuffered_tree_walk_kernel(
    q, k, v, a, b, A_log, dt_bias, states, indices, offsets, parents, out,
    scale, num_slots, num_tokens, num_requests,
    q_token, q_head, q_dim, k_token, k_head, k_dim, v_token, v_head, v_dim, a_token, a_head, b_token, b_head,
    A_log_head, dt_bias_head, state_slot, index_stride, offset_stride, parent_request, parent_draft,
    HV: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A tree whose states nobody stores: program (request, head, tile) and draft walks from the root to its draft."""
    PARTS: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    head = (program // PARTS) % HV
    request = (program // (PARTS * HV)).to(tl.int64)
    wanted = tl.program_id(1)
    key_head = head // RATIO
    rows = (program % PARTS) * BV + tl.arange(0, BV)
    columns = tl.arange(0, BK)
    inside = (rows < V)[:, None] & (columns < K)[None, :]
    target = out + head * V

    first = tl.maximum(tl.load(offsets + request * offset_stride).to(tl.int64), 0)
    last = tl.minimum(tl.load(offsets + (request + 1) * offset_stride).to(tl.int64), num_tokens)
    if (request == 0) & (wanted == 0):
        zero_rows(target, first * 0, tl.minimum(first, num_tokens), HV * V, rows, V, BV, 1)
    if (request == num_requests - 1) & (wanted == 0):
        zero_rows(target, last, num_tokens, HV * V, rows, V, BV, 1)
    if wanted == 0:
        zero_rows(target, first + tl.num_programs(1), last, HV * V, rows, V, BV, 1)
    if wanted >= last - first:
        return
    slot, exists = slot_of(indices, request * index_stride, num_slots)
    if not exists:
        zero_rows(target, first + wanted, first + wanted + 1, HV * V, rows, V, BV, 1)
        return

    source = states + slot * state_slot + rows[:, None] * K + columns[None, :] + head * (V * K)
    _, output = _state_after(
        source, inside, wanted, parents + request * parent_request, parent_draft,
        q + first * q_token + key_head * q_head, k + first * k_token + key_head * k_head,
        v + first * v_token + head * v_head + rows * v_dim,
        a + first * a_token + head * a_head, b + first * b_token + head * b_head, A_log + head * A_log_head,
        dt_bias + head * dt_bias_head, scale, columns, rows < V, q_token, q_dim, k_token, k_dim, v_token, a_token,
        b_token, K, BK,
    )  # fmt: skip
    row_out = target + (first + wanted) * (HV * V) + rows
    tl.store(row_out, output.to(out.dtype.element_ty), mask=rows < V)
