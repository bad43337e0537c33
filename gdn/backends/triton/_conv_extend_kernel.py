"""Kernel of `conv_extend`: the causal convolution over packed sequences of any lengths."""

import triton
import triton.language as tl

from gdn.backends.triton._conv_math import activate
from gdn.backends.triton._conv_math import load_bias
from gdn.backends.triton._conv_math import load_taps


@triton.jit
def segment_begin(query_start_loc, starts_stride, segment, num_tokens):
    """First token of a segment >= 1; whatever the values, a token of this call."""
    begin = tl.load(query_start_loc + (segment - 1) * starts_stride).to(tl.int64)
    return tl.minimum(tl.maximum(begin, 0), num_tokens)


@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "num_slots", "tile_tokens"])
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
    tile_tokens,
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
    PADDED_WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program: up to tile_tokens tokens of one segment by BLOCK_DIM channels.

    Segment 0 lies before the first sequence, segment n + 1 is sequence n, the last segment follows the last sequence;
    the first and the last get zeros. Segment m owns the tiles from begin_m // tile_tokens + m up to the next one's
    first: at least ceil(length / tile_tokens) of them and never none, so every sequence, empty ones too, has a first
    tile, and no count of tiles has to be known on the host. A sequence's tiles start at its first token. Hence its
    first tile alone reads the slot (tile_tokens >= WIDTH - 1), and it writes the slot too.
    """
    blocks = tl.cdiv(dim, BLOCK_DIM)
    program = tl.program_id(0)
    tile = program // blocks
    channels = (program % blocks).to(tl.int64) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    inside = channels < dim

    segment = 0
    highest = num_sequences + 1
    while segment < highest:
        middle = (segment + highest + 1) // 2
        first_tile = segment_begin(query_start_loc, starts_stride, middle, num_tokens) // tile_tokens + middle
        reached = first_tile <= tile
        segment = tl.where(reached, middle, segment)
        highest = tl.where(reached, highest, middle - 1)

    begin = tl.full([], 0, tl.int64)
    if segment > 0:
        begin = segment_begin(query_start_loc, starts_stride, segment, num_tokens)
    end = tl.full([], 0, tl.int64) + num_tokens
    if segment <= num_sequences:
        end = segment_begin(query_start_loc, starts_stride, segment + 1, num_tokens)
    local = tile - (begin // tile_tokens + segment)
    start = begin + local * tile_tokens

    is_sequence = (segment > 0) & (segment <= num_sequences)
    sequence = segment - 1
    slot = tl.load(cache_indices + sequence * indices_stride, mask=is_sequence, other=-1).to(tl.int64)
    valid = is_sequence & (slot >= 0) & (slot < num_slots)
    has_history = valid
    if has_initial_state is not None:
        flag = tl.load(has_initial_state + sequence * initial_stride, mask=is_sequence, other=0)
        has_history = valid & (flag != 0)
    live = inside & valid

    x_channels = x + channels * x_dim_stride
    out_channels = out + channels * out_dim_stride
    columns = state + slot * state_slot_stride + channels * state_dim_stride

    taps = load_taps(weight, channels, inside, weight_dim_stride, weight_tap_stride, WIDTH, PADDED_WIDTH)
    offset = load_bias(bias, channels, inside, bias_stride)

    carried = ()
    for column in tl.static_range(WIDTH - 1):
        position = start - (WIDTH - 1) + column
        value = tl.load(
            x_channels + position * x_token_stride, mask=live & (position >= begin) & (start < end), other=0.0
        ).to(tl.float32)
        old = tl.load(
            columns + column * state_column_stride, mask=live & has_history & (local == 0), other=0.0
        ).to(tl.float32)
        carried = carried + (tl.where(position >= begin, value, old),)

    stop = tl.minimum(end, start + tile_tokens)
    for first in tl.range(start, stop, BLOCK_TOKENS):
        inputs = carried
        for step in tl.static_range(BLOCK_TOKENS):
            position = first + step
            value = tl.load(x_channels + position * x_token_stride, mask=live & (position < stop), other=0.0)
            inputs = inputs + (value.to(tl.float32),)
        for step in tl.static_range(BLOCK_TOKENS):
            total = offset
            for back in tl.static_range(WIDTH):
                total += inputs[WIDTH - 1 + step - back] * taps[back]
            result = tl.where(valid, activate(total, SILU), 0.0)
            position = first + step
            tl.store(
                out_channels + position * out_token_stride,
                result.to(out.dtype.element_ty),
                mask=inside & (position < stop),
            )
        carried = ()
        for column in tl.static_range(WIDTH - 1):
            carried = carried + (inputs[BLOCK_TOKENS + column],)

    length = end - begin
    if WIDTH > 1:
        if valid & (local == 0) & ((length > 0) | (has_history == 0)):
            kept = ()
            for column in tl.static_range(WIDTH - 1):
                position = end - (WIDTH - 1) + column
                value = tl.load(
                    x_channels + position * x_token_stride, mask=inside & (position >= begin), other=0.0
                ).to(tl.float32)
                old = tl.load(
                    columns + (column + length) * state_column_stride,
                    mask=inside & has_history & (position < begin),
                    other=0.0,
                ).to(tl.float32)
                kept = kept + (tl.where(position >= begin, value, old),)
            # Another thread of this program may still need an old column: all read before any writes.
            tl.debug_barrier()
            for column in tl.static_range(WIDTH - 1):
                tl.store(
                    columns + column * state_column_stride, kept[column].to(state.dtype.element_ty), mask=inside
                )
