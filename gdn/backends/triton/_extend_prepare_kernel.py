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
def _unit_rows(x):
    """Rows of `[64, BK]` over sqrt(sum(x^2) + 1e-6)."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + _EPSILON)[:, None]


@triton.jit
def _substituted(diagonal, identity):
    """Inverses of I + `diagonal`, strictly lower triangular blocks `[4, 16, 16]`, by forward substitution."""
    at = tl.arange(0, BLOCK)
    inverse = tl.zeros_like(diagonal) + identity
    for i in tl.static_range(1, BLOCK):
        this_row = (at == i)[None, :, None]
        factors = tl.sum(tl.where(this_row, diagonal, 0.0), 1)
        solved = tl.sum(factors[:, :, None] * inverse, 1)
        inverse = tl.where(this_row, identity - solved[:, None, :], inverse)
    return inverse


@triton.jit
def _multiplied(diagonal, identity):
    """The same by products in fp32: (I + X)(I + X^2)(I + X^4)(I + X^8) for X = -`diagonal`, whose 16th power is 0.

    Powers of equal keys grow to C(15, 7), so about 4e-4 is lost at worst: less than 16-bit activations round.
    """
    power = -diagonal
    inverse = identity + power
    for _ in tl.static_range(3):
        power = tl.dot(power, power, input_precision="ieee")
        inverse += tl.dot(inverse, power, input_precision="ieee")
    return inverse


@triton.jit
def _unit_lower_inverse(lower, PRECISION: tl.constexpr, EXACT: tl.constexpr):
    """Inverse of I + `lower`, which is strictly lower triangular `[64, 64]`.

    With D the inverses of the four diagonal blocks and L what lies below them, it is (I + D L)^-1 D, which is
    (I - M)(I + M^2) D for M = D L, whose fourth power is 0.
    """
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    row = tl.arange(0, CHUNK)
    same_block = (row[:, None] // BLOCK) == (row[None, :] // BLOCK)
    four = tl.reshape(tl.where(same_block, lower, 0.0), [BLOCKS, BLOCK, BLOCKS, BLOCK])
    diagonal = tl.sum(four, 2)
    at = tl.arange(0, BLOCK)
    identity = tl.where(at[:, None] == at[None, :], 1.0, 0.0)[None, :, :]
    inverse = _substituted(diagonal, identity) if EXACT else _multiplied(diagonal, identity)
    blocks = tl.arange(0, BLOCKS)
    on_diagonal = (blocks[:, None] == blocks[None, :])[:, None, :, None]
    spread = tl.where(on_diagonal, inverse[:, :, None, :], 0.0)
    block_inverse = tl.reshape(spread, [CHUNK, CHUNK])
    below = tl.where(same_block, 0.0, lower)
    m = tl.dot(block_inverse, below, input_precision=PRECISION)
    squared = tl.dot(m, m, input_precision=PRECISION)
    half = block_inverse - tl.dot(m, block_inverse, input_precision=PRECISION)
    return half + tl.dot(squared, half, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_tokens", "num_sequences"])
def prepare_kernel(
    q, k, g, beta, offsets, unit_q, unit_k, solve, attend, decays,
    scale, num_tokens, num_sequences,
    q_token, q_head, q_dim, k_token, k_head, k_dim, g_token, g_head, beta_token, beta_head, offset_stride,
    HK: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Program (chunk index, key head). Writes, for the chunk's tokens, unit q and k `[tokens, HK, K]`; for each of
    the key head's value heads, at `[chunk, HV]`, (I + A)^-1 diag(beta) and the masked scaled q k^T, `[64, 64]` each,
    and the decays since the chunk's start and until its end, `[2, 64]`.
    """
    HV: tl.constexpr = HK * RATIO
    chunk = tl.program_id(0).to(tl.int64)
    key_head = tl.program_id(1)
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
    key = tl.load(
        k + tokens[:, None] * k_token + key_head * k_head + columns[None, :] * k_dim, mask=inside, other=0.0
    ).to(tl.float32)
    query = tl.load(
        q + tokens[:, None] * q_token + key_head * q_head + columns[None, :] * q_dim, mask=inside, other=0.0
    ).to(tl.float32)
    key = _unit_rows(key).to(unit_k.dtype.element_ty)
    query = _unit_rows(query).to(unit_q.dtype.element_ty)
    place = (tokens[:, None] * HK + key_head) * K + columns[None, :]
    tl.store(unit_k + place, key, mask=inside)
    tl.store(unit_q + place, query, mask=inside)
    if unit_k.dtype.element_ty == tl.float16:
        key = key.to(tl.float32)
        query = query.to(tl.float32)
    keys_by_keys = tl.dot(key, tl.trans(key), input_precision=PRECISION)
    queries_by_keys = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale

    later = at[:, None] > at[None, :]
    not_earlier = at[:, None] >= at[None, :]
    for i in range(RATIO):
        head = key_head * RATIO + i
        decay = tl.load(g + tokens * g_token + head * g_head, mask=real, other=0.0)
        strength = tl.load(beta + tokens * beta_token + head * beta_head, mask=real, other=0.0)
        forgets = decay < _FORGETS
        segment = tl.cumsum(forgets.to(tl.int32), 0)
        total = tl.cumsum(tl.where(forgets, 0.0, decay), 0)
        linked = not_earlier & (segment[:, None] == segment[None, :])
        between = tl.where(linked, tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)), 0.0)
        whole = tl.sum(tl.where(at == CHUNK - 1, total, 0.0), 0)
        last_segment = tl.sum(tl.where(at == CHUNK - 1, segment, 0), 0)
        lower = tl.where(later, keys_by_keys * between * strength[:, None], 0.0)
        inverse = _unit_lower_inverse(lower, PRECISION, EXACT) * strength[None, :]
        masked = queries_by_keys * between
        matrix = (chunk * HV + head) * (CHUNK * CHUNK) + at[:, None] * CHUNK + at[None, :]
        tl.store(solve + matrix, inverse.to(solve.dtype.element_ty))
        tl.store(attend + matrix, masked.to(attend.dtype.element_ty))
        line = decays + (chunk * HV + head) * (2 * CHUNK) + at
        tl.store(line, tl.where(segment == 0, tl.exp(total), 0.0))
        tl.store(line + CHUNK, tl.where(segment == last_segment, tl.exp(tl.minimum(whole - total, 0.0)), 0.0))
