"""Second kernel of extend: walk the chunks of a sequence with the state in registers."""

import triton
import triton.language as tl

from gdn.backends.triton._extend_prepare_kernel import CHUNK
from gdn.backends.triton._extend_prepare_kernel import first_chunk
from gdn.backends.triton._recurrent_math import slot_of


@triton.jit
def _advance(
    state, chunk, token, end, q, k, v, solve, attend, factors, out, head, rows, columns,
    q_token, q_dim, k_token, k_dim, v_token, v_dim,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """One chunk on the transposed state `[BK, BV]`: writes its outputs, returns the state after it.

    With G the inclusive sums of g: d = (I + A)^-1 diag(beta) (v - e^G S k); o = e^G S q + (masked q k^T) d;
    S <- e^(G_last) S + sum_i e^(G_last - G_i) d_i k_i^T. Keys and queries are loaded as given: their norms are in the
    factors that the first kernel wrote.
    """
    at = tl.arange(0, CHUNK)
    tokens = token + at
    real = tokens < end
    inside = real[:, None] & (columns < K)[None, :]
    key = tl.load(k + tokens[:, None] * k_token + columns[None, :] * k_dim, mask=inside, other=0.0).to(OPERAND)
    query = tl.load(q + tokens[:, None] * q_token + columns[None, :] * q_dim, mask=inside, other=0.0).to(OPERAND)
    value_inside = real[:, None] & (rows < V)[None, :]
    value = tl.load(v + tokens[:, None] * v_token + rows[None, :] * v_dim, mask=value_inside, other=0.0).to(tl.float32)
    matrix = (chunk * HV + head) * (CHUNK * CHUNK) + at[:, None] * CHUNK + at[None, :]
    solver = tl.load(solve + matrix).to(OPERAND)
    attention = tl.load(attend + matrix).to(OPERAND)
    line = factors + (chunk * HV + head) * (4 * CHUNK)
    key_enters = tl.load(line + at)
    query_enters = tl.load(line + CHUNK + at)
    key_leaves = tl.load(line + 2 * CHUNK + at)
    whole = tl.load(line + 4 * CHUNK - 1)

    operand = state.to(OPERAND)
    predicted = tl.dot(key, operand, input_precision=PRECISION)
    update = tl.dot(solver, (value - key_enters[:, None] * predicted).to(OPERAND), input_precision=PRECISION)
    output = tl.dot(query, operand, input_precision=PRECISION) * query_enters[:, None]
    output = tl.dot(attention, update.to(OPERAND), output, input_precision=PRECISION)
    target = out + (tokens[:, None] * HV + head) * V + rows[None, :]
    tl.store(target, output.to(out.dtype.element_ty), mask=value_inside)
    decayed = (update * key_leaves[:, None]).to(OPERAND)
    return tl.dot(tl.trans(key), decayed, state * whole, input_precision=PRECISION)


@triton.jit
def _zero_rows(out, begin, end, head, rows, HV: tl.constexpr, V: tl.constexpr):
    """Zero some columns of one head's output of tokens begin..end-1."""
    at = tl.arange(0, CHUNK)
    token = begin
    while token < end:
        tokens = token + at
        target = out + (tokens[:, None] * HV + head) * V + rows[None, :]
        zeros = tl.zeros([CHUNK, rows.shape[0]], out.dtype.element_ty)
        tl.store(target, zeros, mask=(tokens < end)[:, None] & (rows < V)[None, :])
        token += CHUNK


@triton.jit(do_not_specialize=["num_slots", "num_tokens", "num_sequences"])
def state_kernel(
    q, k, v, solve, attend, factors, states, indices, offsets, snapshot_chunks, snapshot_slots, chunk_offsets,
    chunk_states, out,
    num_slots, num_tokens, num_sequences, q_token, q_head, q_dim, k_token, k_head, k_dim, v_token, v_head, v_dim,
    state_slot, index_stride, offset_stride, snapshot_chunk_stride, snapshot_slot_stride,
    HK: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SNAPSHOTS: tl.constexpr, CHUNK_STATES: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    STAGES: tl.constexpr, MOST_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (sequence, value head, tile of BV state rows), the tile fastest. The programs of the last sequence also
    zero the rows that follow it. MOST_CHUNKS > 0 bounds the loop for Triton's interpreter.
    """
    HV: tl.constexpr = HK * RATIO
    TILES: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    tile = program % TILES
    head = (program // TILES) % HV
    sequence = (program // (TILES * HV)).to(tl.int64)
    q += (head // RATIO) * q_head
    k += (head // RATIO) * k_head
    v += head * v_head
    rows = tile * BV + tl.arange(0, BV)
    columns = tl.arange(0, BK)

    chunk, begin = first_chunk(offsets, sequence, offset_stride)
    begin = tl.maximum(begin, 0)
    end = tl.minimum(tl.load(offsets + (sequence + 1) * offset_stride).to(tl.int64), num_tokens)
    slot, exists = slot_of(indices, sequence * index_stride, num_slots)
    if sequence == num_sequences - 1:
        _zero_rows(out, end, num_tokens, head, rows, HV, V)
    if not exists:
        _zero_rows(out, begin, end, head, rows, HV, V)
        return
    count = (tl.maximum(end - begin, 0) + CHUNK - 1) // CHUNK

    in_state = head * (V * K) + rows[None, :] * K + columns[:, None]
    inside = (columns < K)[:, None] & (rows < V)[None, :]
    place = states + slot * state_slot + in_state
    state = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    wanted = -1
    snapshot = place
    if SNAPSHOTS:
        wanted = tl.load(snapshot_chunks + sequence * snapshot_chunk_stride).to(tl.int32)
        goal, goal_exists = slot_of(snapshot_slots, sequence * snapshot_slot_stride, num_slots)
        snapshot = states + goal * state_slot + in_state
        wanted = tl.where(goal_exists, wanted, -1)
    entering = chunk_states
    if CHUNK_STATES:
        first = tl.load(chunk_offsets + sequence).to(tl.int64)
        entering = chunk_states + first * (HV * V * K) + in_state

    if MOST_CHUNKS > 0:
        for c in tl.static_range(MOST_CHUNKS):
            if c < count:
                if CHUNK_STATES:
                    tl.store(entering + c * (HV * V * K), state.to(chunk_states.dtype.element_ty), mask=inside)
                if SNAPSHOTS:
                    if wanted == c:
                        tl.store(snapshot, state.to(states.dtype.element_ty), mask=inside)
                state = _advance(
                    state, chunk + c, begin + c * CHUNK, end, q, k, v, solve, attend, factors, out, head, rows, columns,
                    q_token, q_dim, k_token, k_dim, v_token, v_dim, HV, K, V, PRECISION, OPERAND,
                )  # fmt: skip
    else:
        for c in tl.range(0, count, num_stages=STAGES):
            if CHUNK_STATES:
                tl.store(entering + c * (HV * V * K), state.to(chunk_states.dtype.element_ty), mask=inside)
            if SNAPSHOTS:
                if wanted == c:
                    tl.store(snapshot, state.to(states.dtype.element_ty), mask=inside)
            state = _advance(
                state, chunk + c, begin + c * CHUNK, end, q, k, v, solve, attend, factors, out, head, rows, columns,
                q_token, q_dim, k_token, k_dim, v_token, v_dim, HV, K, V, PRECISION, OPERAND,
            )  # fmt: skip
    if SNAPSHOTS:
        if wanted == count:
            tl.store(snapshot, state.to(states.dtype.element_ty), mask=inside)
    if count > 0:
        tl.store(place, state.to(states.dtype.element_ty), mask=inside)
