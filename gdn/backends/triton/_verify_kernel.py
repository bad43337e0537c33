"""Kernel of verify for up to 32 drafts a request: the state is read once, all drafts meet it together.

With S the slot's state, E[i, j] the decay from draft j to draft i along its path (0 where j isn't on it) and e[i] the
one since S, the updates d of all drafts solve the unit triangular system (WY form of the delta rule)

    d_i = beta_i (v_i - e_i S k_i - sum_{j < i} E_ij (k_i . k_j) d_j)
    o_i = e_i S q_i + sum_{j <= i} E_ij (q_i . k_j) d_j

so that outputs need no state but S, and the state after draft i is e_i S + sum_j E_ij d_j k_j^T. Decays are products
of the gates' exponentials: nothing is divided, so a decay to zero is exact. Products with raw 16-bit keys and queries
lose nothing on tensor cores; their norms are factors of the results.
"""

import triton
import triton.language as tl

from gdn.backends.triton._gating_kernel import log_decay
from gdn.backends.triton._recurrent_math import inverse_norms
from gdn.backends.triton._recurrent_math import load_row
from gdn.backends.triton._recurrent_math import parent_of
from gdn.backends.triton._recurrent_math import raw_dot
from gdn.backends.triton._recurrent_math import slot_of
from gdn.backends.triton._recurrent_math import zero_rows


@triton.jit
def _number(vector, chosen):
    """The element where the mask `chosen` is true."""
    return tl.sum(tl.where(chosen, vector, 0.0), 0)


@triton.jit
def _row(matrix, chosen):
    return tl.sum(tl.where(chosen[:, None], matrix, 0.0), 0)


@triton.jit
def _column(matrix, chosen):
    return tl.sum(tl.where(chosen[None, :], matrix, 0.0), 1)


@triton.jit
def _path_decays(alpha, links, parent_draft, length, TREE: tl.constexpr, DRAFTS: tl.constexpr, BT: tl.constexpr):
    """E transposed `[BT, BT]` and e `[BT]` of the drafts' decays `alpha` `[BT]`."""
    at = tl.arange(0, BT)
    decays = tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    entering = alpha
    for i in tl.static_range(1, DRAFTS):
        before = at == i - 1
        if TREE:
            before = at == parent_of(links, tl.minimum(i, length - 1), parent_draft)
        here = at == i
        decay = _number(alpha, here)
        along = decay * _column(decays, before)
        decays = tl.where(here[None, :], decays + along[:, None], decays)
        entering = tl.where(here, decay * _number(entering, before), entering)
    return decays, entering


@triton.jit
def _state_after(
    draft, entering_state, decays, entering, pushes, k_base, columns, k_token, k_dim,
    K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """State after `draft`, from the updates on its path."""
    at = tl.arange(0, BT)
    state = entering_state.to(tl.float32) * _number(entering, at == draft)
    along = _column(decays, at == draft)
    j = 0
    while j <= draft:
        decay = _number(along, at == j)
        if decay != 0.0:
            key = load_row(k_base + j * k_token, columns, k_dim, K, BK)
            state += (decay * _row(pushes, at == j))[:, None] * key[None, :]
        j += 1
    return state


@triton.jit(do_not_specialize=["num_slots", "num_tokens", "num_requests", "num_rows"])
def verify_kernel(
    q, k, v, a, b, A_log, dt_bias, states, indices, offsets, buffer, buffer_rows, parents, out,
    scale, num_slots, num_tokens, num_requests, num_rows,
    q_token, q_head, q_dim, k_token, k_head, k_dim, v_token, v_head, v_dim, a_token, a_head, b_token, b_head,
    A_log_head, dt_bias_head, state_slot, index_stride, offset_stride, buffer_row, buffer_step, row_stride,
    parent_request, parent_draft,
    HV: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TILES: tl.constexpr, DRAFTS: tl.constexpr, BT: tl.constexpr, HAS_BUFFER: tl.constexpr, TREE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Program (request, head, TILES tiles of BV state rows), the tiles fastest. `out` is contiguous `[tokens, HV, V]`.

    OPERAND and PRECISION are those of products with the state, EXACT is the precision of the others. The programs of
    the first and of the last request also zero the rows outside the offsets.
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
    length = tl.minimum(last - first, DRAFTS).to(tl.int32)
    zero_rows(target, first + tl.maximum(length, 0), last, HV * V, rows, V, BV, TILES)
    if length <= 0:
        return

    offsets_in_head = rows[:, None] * K + columns[None, :] + head * (V * K)
    source = states + slot * state_slot + offsets_in_head
    entering_state = tl.load(source, mask=(rows < V)[:, None] & column_inside, other=0.0)
    kept = False
    place = buffer
    if HAS_BUFFER:
        row, kept = slot_of(buffer_rows, request * row_stride, num_rows)
        place = buffer + row * buffer_row + offsets_in_head
    links = parents
    if TREE:
        links = parents + request * parent_request

    at = tl.arange(0, BT)
    real = at < length
    tokens = first + at
    k_base = k + first * k_token + key_head * k_head
    q_base = q + first * q_token + key_head * q_head
    in_tokens = real[:, None] & column_inside
    keys = tl.load(k_base + at[:, None] * k_token + columns[None, :] * k_dim, mask=in_tokens, other=0.0)
    queries = tl.load(q_base + at[:, None] * q_token + columns[None, :] * q_dim, mask=in_tokens, other=0.0)
    drift = tl.load(a + tokens * a_token + head * a_head, mask=real, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias + head * dt_bias_head).to(tl.float32)
    alpha = tl.exp(log_decay(tl.load(A_log + head * A_log_head).to(tl.float32), drift + bias))
    strength = tl.load(b + tokens * b_token + head * b_head, mask=real, other=0.0).to(tl.float32)
    beta = 1.0 / (1.0 + tl.exp(-strength))

    k_norm = inverse_norms(keys)
    q_norm = inverse_norms(queries) * scale
    decays, entering = _path_decays(alpha, links, parent_draft, length, TREE, DRAFTS, BT)
    coupling = tl.dot(keys, tl.trans(keys), input_precision=EXACT)
    coupling *= decays * (k_norm[:, None] * (beta * k_norm)[None, :])
    coupling = tl.where(at[:, None] == at[None, :], 0.0, coupling)
    attention = tl.dot(keys, tl.trans(queries), input_precision=EXACT)
    attention *= decays * (k_norm[:, None] * q_norm[None, :])

    for tile in tl.static_range(TILES):
        here = rows + tile * BV
        inside = (here < V)[:, None] & column_inside
        if tile > 0:
            entering_state = tl.load(source + tile * (BV * K), mask=inside, other=0.0)
        in_values = real[:, None] & (here < V)[None, :]
        values = v + tokens[:, None] * v_token + head * v_head + here[None, :] * v_dim
        value = tl.load(values, mask=in_values, other=0.0).to(tl.float32)
        stored = raw_dot(keys, entering_state, OPERAND, PRECISION)
        read = raw_dot(queries, entering_state, OPERAND, PRECISION)
        update = beta[:, None] * (value - (entering * k_norm)[:, None] * stored)
        for i in tl.static_range(1, DRAFTS):
            pull = tl.sum(_column(coupling, at == i)[:, None] * update, 0)
            update = tl.where((at == i)[:, None], update - pull[None, :], update)
        output = (entering * q_norm)[:, None] * read
        output += tl.dot(tl.trans(attention), update, input_precision=EXACT)
        target_rows = target + tokens[:, None] * (HV * V) + here[None, :]
        tl.store(target_rows, output.to(out.dtype.element_ty), mask=in_values)

        if HAS_BUFFER:
            if kept:
                pushes = update * k_norm[:, None]
                state = entering_state.to(tl.float32)
                for i in tl.static_range(DRAFTS):
                    if i < length:
                        if TREE:
                            if i > 0:
                                parent = parent_of(links, i, parent_draft)
                                if parent != i - 1:
                                    state = _state_after(
                                        parent, entering_state, decays, entering, pushes, k_base, columns, k_token,
                                        k_dim, K, BK, BT,
                                    )  # fmt: skip
                        key = load_row(k_base + i * k_token, columns, k_dim, K, BK)
                        push = _row(pushes, at == i)
                        state = _number(alpha, at == i) * state + push[:, None] * key[None, :]
                        to_buffer = place + i * buffer_step + tile * (BV * K)
                        tl.store(to_buffer, state.to(buffer.dtype.element_ty), mask=inside)
