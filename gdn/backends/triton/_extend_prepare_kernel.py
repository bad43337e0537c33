"""First kernel of extend: everything of a chunk that doesn't depend on the state entering it.

Chunks live in a sparse index space that needs no table: chunk c of sequence n has index
`query_start_loc[n] // 64 + n + c`. These ranges never overlap, since a sequence of L tokens from s on has
ceil(L / 64) <= floor((s + L) / 64) - floor(s / 64) + 1 chunks, and `T // 64 + N` indices hold them all.
"""

import triton
import triton.language as tl

CHUNK = tl.constexpr(64)
BLOCK = tl.constexpr(16)
_FORGETS = tl.constexpr(-80.0)
"""A token with a stronger log decay starts a segment: what came before it counts as forgotten (e^-80 is 2e-35), and its
decay stays out of the sums, whose differences would lose their digits beside it, or be NaN for -inf.
"""
_GRAIN = tl.constexpr(64.0)
"""Log decays are summed as multiples of 1/64, whose sums over a chunk are exact, and what is left of them."""
_EPSILON = tl.constexpr(1e-6)


@triton.jit
def first_chunk(offsets, sequence, offset_stride):
    """Index of a sequence's first chunk, and its first token."""
    token = tl.load(offsets + sequence * offset_stride).to(tl.int64)
    return token // CHUNK + sequence, token


@triton.jit
def _sequence_of(offsets, chunk, num_sequences, offset_stride):
    """The last sequence whose first chunk is not after `chunk`."""
    low = 0
    high = num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        start, _ = first_chunk(offsets, middle, offset_stride)
        fits = start <= chunk
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle - 1)
    return low


@triton.jit
def _inverse_norm(products, same):
    """1 / sqrt(x . x + 1e-6) from the products of all pairs of vectors."""
    return tl.rsqrt(tl.sum(tl.where(same, products, 0.0), 1) + _EPSILON)


@triton.jit
def _invert_diagonal_blocks(scratch, lower, same_block):
    """Inverses of the four diagonal blocks of I + `lower`, strictly lower triangular `[64, 64]`; 0 elsewhere.

    By forward substitution in fp32, a column to a thread: through `scratch`, two fp32 `[16, 64]` in global memory,
    the factors reach the threads of their block and the rows of the inverses become a tile again.
    """
    at = tl.arange(0, CHUNK)
    row = at[:, None]
    column = at[None, :]
    place = (row % BLOCK) * CHUNK + column
    tl.store(scratch + place, lower, mask=same_block)
    tl.debug_barrier()
    first_of_block = scratch + (at // BLOCK) * BLOCK
    inverses = scratch + BLOCK * CHUNK
    rows = ()
    for i in tl.static_range(BLOCK):
        solved = tl.where(at % BLOCK == i, 1.0, 0.0)
        for j in tl.static_range(i):
            solved -= tl.load(first_of_block + i * CHUNK + j) * rows[j]
        tl.store(inverses + i * CHUNK + at, solved)
        rows = rows + (solved,)  # noqa: RUF005
    tl.debug_barrier()
    return tl.load(inverses + place, mask=same_block, other=0.0)


@triton.jit
def _unit_lower_inverse(scratch, lower, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Inverse of I + `lower`, which is strictly lower triangular `[64, 64]`.

    With D the inverses of the four diagonal blocks and L what lies below them, it is (I + D L)^-1 D, which is
    (I - M)(I + M^2) D for M = D L, whose fourth power is 0.
    """
    at = tl.arange(0, CHUNK)
    same_block = (at[:, None] // BLOCK) == (at[None, :] // BLOCK)
    inverse = _invert_diagonal_blocks(scratch, lower, same_block)
    operand = inverse.to(OPERAND)
    m = tl.dot(operand, tl.where(same_block, 0.0, lower).to(OPERAND), input_precision=PRECISION).to(OPERAND)
    squared = tl.dot(m, m, input_precision=PRECISION).to(OPERAND)
    half = inverse - tl.dot(m, operand, input_precision=PRECISION)
    return half + tl.dot(squared, half.to(OPERAND), input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_tokens", "num_sequences"])
def prepare_kernel(
    q, k, g, beta, offsets, solve, attend, factors,
    scale, num_tokens, num_sequences,
    q_token, q_head, q_dim, k_token, k_head, k_dim, g_token, g_head, beta_token, beta_head, offset_stride,
    HK: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (chunk index, value head), the head fastest. Writes at `[chunk, HV]` (I + A)^-1 diag(beta) and the masked
    q k^T of the scaled unit vectors, `[64, 64]` each; and `[4, 64]` factors of the chunk's tokens: of a raw key and a
    raw query that meet the state entering the chunk, of a raw key that enters the state leaving it, and the decay since
    the chunk's start. The heads of one key repeat its products rather than hold them.
    """
    HV: tl.constexpr = HK * RATIO
    OPERAND: tl.constexpr = tl.float32 if k.dtype.element_ty == tl.float32 else tl.float16
    program = tl.program_id(0)
    head = program % HV
    chunk = (program // HV).to(tl.int64)
    key_head = head // RATIO
    sequence = _sequence_of(offsets, chunk, num_sequences, offset_stride)
    start, token = first_chunk(offsets, sequence, offset_stride)
    end = tl.minimum(tl.load(offsets + (sequence + 1) * offset_stride).to(tl.int64), num_tokens)
    token = token + (chunk - start) * CHUNK
    if (token >= end) | (token < 0) | (chunk < start):
        return

    at = tl.arange(0, CHUNK)
    columns = tl.arange(0, BK)
    tokens = token + at
    real = tokens < end
    inside = real[:, None] & (columns < K)[None, :]
    decay = tl.load(g + tokens * g_token + head * g_head, mask=real, other=0.0)
    strength = tl.load(beta + tokens * beta_token + head * beta_head, mask=real, other=0.0)
    key_place = k + token * k_token + key_head * k_head
    key = tl.load(key_place + at[:, None] * k_token + columns[None, :] * k_dim, mask=inside, other=0.0)
    query_place = q + token * q_token + key_head * q_head
    query = tl.load(query_place + at[:, None] * q_token + columns[None, :] * q_dim, mask=inside, other=0.0)
    same = at[:, None] == at[None, :]
    keys_by_keys = tl.dot(key, tl.trans(key), input_precision=PRECISION)
    k_norm = _inverse_norm(keys_by_keys, same)
    q_norm = _inverse_norm(tl.dot(query, tl.trans(query), input_precision=PRECISION), same) * scale

    forgets = decay < _FORGETS
    counted = tl.where(forgets, 0.0, decay)
    coarse = tl.floor(counted * _GRAIN) / _GRAIN
    fine = counted - coarse
    segment = tl.cumsum(forgets.to(tl.int32), 0)
    coarse_total = tl.cumsum(coarse, 0)
    fine_total = tl.cumsum(fine, 0)
    last_segment = tl.sum(forgets.to(tl.int32), 0)
    since_start = tl.where(segment == 0, tl.exp(coarse_total + fine_total), 0.0)
    left = (tl.sum(coarse, 0) - coarse_total) + (tl.sum(fine, 0) - fine_total)
    until_end = tl.where(segment == last_segment, tl.exp(tl.minimum(left, 0.0)), 0.0)
    line = factors + (chunk * HV + head) * (4 * CHUNK) + at
    tl.store(line, since_start * k_norm)
    tl.store(line + CHUNK, since_start * q_norm)
    tl.store(line + 2 * CHUNK, until_end * k_norm)
    tl.store(line + 3 * CHUNK, since_start)

    linked = (at[:, None] >= at[None, :]) & (segment[:, None] == segment[None, :])
    apart = (coarse_total[:, None] - coarse_total[None, :]) + (fine_total[:, None] - fine_total[None, :])
    between = tl.where(linked, tl.exp(tl.minimum(apart, 0.0)), 0.0) * k_norm[None, :]
    first_of_head = (chunk * HV + head) * (CHUNK * CHUNK)
    matrix = first_of_head + at[:, None] * CHUNK + at[None, :]
    queries_by_keys = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    tl.store(attend + matrix, (queries_by_keys * between * q_norm[:, None]).to(attend.dtype.element_ty))
    lower = tl.where(at[:, None] > at[None, :], keys_by_keys * between * (strength * k_norm)[:, None], 0.0)
    scratch = (solve + first_of_head).to(tl.pointer_type(tl.float32), bitcast=True)
    inverse = _unit_lower_inverse(scratch, lower, OPERAND, PRECISION) * strength[None, :]
    tl.store(solve + matrix, inverse.to(solve.dtype.element_ty))
