"""Kernel of `conv_extend`: the causal convolution over packed sequences of any lengths."""

import triton
import triton.language as tl

from gdn.backends.triton._conv_math import activate
from gdn.backends.triton._conv_math import load_bias
from gdn.backends.triton._conv_math import load_taps


@triton.jit
def clamp_token(token, num_tokens):
    """Whatever the offsets hold, a token of this call or the end."""
    return tl.minimum(tl.maximum(token.to(tl.int64), 0), num_tokens)


@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "num_slots"])
def conv_extend_kernel(
    x,
    weight,
    bias,
    out,
    state,
    query_start_loc,
    cache_indices,
    has_initial_state,
    num_tokens,
    num_sequences,
    num_slots,
    dim,
    x_dim_stride,
    x_token_stride,
    out_dim_stride,
    out_token_stride,
    weight_dim_stride,
    weight_tap_stride,
    bias_stride,
    state_slot_stride,
    state_dim_stride,
    state_column_stride,
    starts_stride,
    indices_stride,
    initial_stride,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program: up to BLOCK_TOKENS tokens of one segment by BLOCK_DIM channels. BLOCK_TOKENS >= WIDTH - 1.

    Segment 0 lies before the first sequence, segment n + 1 is sequence n, the last segment follows the last sequence;
    the first and the last get zeros. Segment m owns the tiles from begin_m // BLOCK_TOKENS + m up to the next one's
    first: at least as many as its length needs, and num_tokens // BLOCK_TOKENS + num_sequences + 2 in all, whatever
    the lengths. A sequence's tiles start at its first token, hence only its first tile reads the slot, and the same
    program writes the slot when it has read it.
    """
    blocks = tl.cdiv(dim, BLOCK_DIM)
    program = tl.program_id(0)
    tile = program // blocks
    channels = (program % blocks).to(tl.int64) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    inside = channels < dim

    segment = tile * 0
    highest = segment + num_sequences + 1
    while segment < highest:
        middle = (segment + highest + 1) // 2
        first_token = clamp_token(tl.load(query_start_loc + (middle - 1).to(tl.int64) * starts_stride), num_tokens)
        reached = first_token // BLOCK_TOKENS + middle <= tile
        segment = tl.where(reached, middle, segment)
        highest = tl.where(reached, highest, middle - 1)

    starts = query_start_loc + segment.to(tl.int64) * starts_stride
    begin = clamp_token(tl.load(starts - starts_stride, mask=segment > 0, other=0), num_tokens)
    end = clamp_token(tl.load(starts, mask=segment <= num_sequences, other=num_tokens), num_tokens)
    local = tile - (begin // BLOCK_TOKENS + segment)
    tokens = begin + local * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    wanted = tokens < end

    is_sequence = (segment > 0) & (segment <= num_sequences)
    sequence = (segment - 1).to(tl.int64)
    slot = tl.load(cache_indices + sequence * indices_stride, mask=is_sequence, other=-1).to(tl.int64)
    valid = is_sequence & (slot >= 0) & (slot < num_slots)
    owns_state = valid & (local == 0) & (begin < end)
    reads_state = owns_state
    if has_initial_state is not None:
        flag = tl.load(has_initial_state + sequence * initial_stride, mask=is_sequence, other=0)
        reads_state = owns_state & (flag != 0)
    live = inside & valid
    columns = state + slot * state_slot_stride + channels * state_dim_stride

    taps = load_taps(weight, channels, inside, weight_dim_stride, weight_tap_stride, WIDTH)
    total = tl.zeros([BLOCK_TOKENS, BLOCK_DIM], dtype=tl.float32)
    total += load_bias(bias, channels, inside, bias_stride)[None, :]
    for back in tl.static_range(WIDTH):
        position = tokens - back
        given = wanted & (position >= begin)
        value = tl.load(
            x + position[:, None] * x_token_stride + channels[None, :] * x_dim_stride,
            mask=given[:, None] & live[None, :],
            other=0.0,
        ).to(tl.float32)
        if back > 0:
            if reads_state:
                stored = wanted & (position < begin)
                old = tl.load(
                    columns[None, :] + (position - begin + (WIDTH - 1))[:, None] * state_column_stride,
                    mask=stored[:, None] & inside[None, :],
                    other=0.0,
                ).to(tl.float32)
                value = tl.where(stored[:, None], old, value)
        total += value * taps[back][None, :]
    result = tl.where(valid, activate(total, SILU), 0.0)
    tl.store(
        out + tokens[:, None] * out_token_stride + channels[None, :] * out_dim_stride,
        result.to(out.dtype.element_ty),
        mask=wanted[:, None] & inside[None, :],
    )

    if owns_state:
        newest = ()
        for column in tl.static_range(WIDTH - 1):
            source = end - (WIDTH - 1) + column
            given_input = tl.load(
                x + source * x_token_stride + channels * x_dim_stride,
                mask=inside & (source >= begin),
                other=0.0,
            ).to(tl.float32)
            stored_input = tl.load(
                columns + (source - begin + (WIDTH - 1)) * state_column_stride,
                mask=inside & reads_state & (source < begin),
                other=0.0,
            ).to(tl.float32)
            newest = newest + (tl.where(source >= begin, given_input, stored_input),)  # noqa: RUF005
        # Another thread of this program may still need an old column: all read before any writes.
        tl.debug_barrier()
        for column in tl.static_range(WIDTH - 1):
            tl.store(columns + column * state_column_stride, newest[column].to(state.dtype.element_ty), mask=inside)
