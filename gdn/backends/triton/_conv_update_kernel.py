"""Kernels of `conv_update`: one token per request, and drafts as a chain or as a tree."""

import triton
import triton.language as tl

from gdn.backends.triton._conv_math import activate
from gdn.backends.triton._conv_math import load_bias
from gdn.backends.triton._conv_math import load_taps


@triton.jit(do_not_specialize=["num_rows", "num_slots", "num_window_rows"])
def conv_step_kernel(
    x,
    weight,
    bias,
    out,
    state,
    slots,
    windows,
    window_rows,
    num_rows,
    num_slots,
    num_window_rows,
    dim,
    x_row_stride,
    x_dim_stride,
    out_row_stride,
    out_dim_stride,
    weight_dim_stride,
    weight_tap_stride,
    bias_stride,
    state_slot_stride,
    state_dim_stride,
    state_column_stride,
    slots_stride,
    windows_row_stride,
    windows_dim_stride,
    windows_column_stride,
    window_rows_stride,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program: BLOCK_ROWS requests by BLOCK_DIM channels, one token each."""
    blocks = tl.cdiv(dim, BLOCK_DIM)
    program = tl.program_id(0)
    channels = (program % blocks).to(tl.int64) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    rows = (program // blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_inside = rows < num_rows
    inside = channels < dim

    slot = rows if slots is None else tl.load(slots + rows * slots_stride, mask=row_inside, other=-1).to(tl.int64)
    valid = row_inside & (slot >= 0) & (slot < num_slots)
    live = valid[:, None] & inside[None, :]

    newest = tl.load(x + rows[:, None] * x_row_stride + channels[None, :] * x_dim_stride, mask=live, other=0.0)
    inputs = (newest.to(tl.float32),)
    columns = state + slot[:, None] * state_slot_stride + channels[None, :] * state_dim_stride
    for back in tl.static_range(1, WIDTH):
        old = tl.load(columns + (WIDTH - 1 - back) * state_column_stride, mask=live, other=0.0)
        inputs = inputs + (old.to(tl.float32),)  # noqa: RUF005

    taps = load_taps(weight, channels, inside, weight_dim_stride, weight_tap_stride, WIDTH)
    total = tl.zeros([BLOCK_ROWS, BLOCK_DIM], dtype=tl.float32)
    total += load_bias(bias, channels, inside, bias_stride)[None, :]
    for back in tl.static_range(WIDTH):
        total += inputs[back] * taps[back][None, :]
    result = tl.where(valid[:, None], activate(total, SILU), 0.0)
    tl.store(
        out + rows[:, None] * out_row_stride + channels[None, :] * out_dim_stride,
        result.to(out.dtype.element_ty),
        mask=row_inside[:, None] & inside[None, :],
    )

    if WIDTH > 1:
        # Another thread of this program may hold the same channel in another load: all read before any writes.
        tl.debug_barrier()
        for back in tl.static_range(WIDTH - 1):
            tl.store(
                columns + (WIDTH - 2 - back) * state_column_stride,
                inputs[back].to(state.dtype.element_ty),
                mask=live,
            )
        if windows is not None:
            if window_rows is None:
                target = rows
            else:
                target = tl.load(window_rows + rows * window_rows_stride, mask=row_inside, other=-1).to(tl.int64)
            kept = live & ((target >= 0) & (target < num_window_rows))[:, None]
            window = windows + target[:, None] * windows_row_stride + channels[None, :] * windows_dim_stride
            for back in tl.static_range(WIDTH - 1):
                tl.store(
                    window + (WIDTH - 2 - back) * windows_column_stride,
                    inputs[back].to(windows.dtype.element_ty),
                    mask=kept,
                )


@triton.jit
def derive_parents(next_token, next_sibling, token_stride, sibling_stride, nodes, DRAFTS: tl.constexpr):
    """Parent of each node from first-child and next-sibling links, `[nodes]` int32.

    Nodes are visited in order: the first child of t gets parent t, the next sibling of t gets t's own parent. Links
    that don't point forward are ignored; nodes that nothing links to keep parent 0.
    """
    parents = nodes * 0
    for node in tl.range(0, DRAFTS):
        child = tl.load(next_token + node * token_stride).to(tl.int64)
        sibling = tl.load(next_sibling + node * sibling_stride).to(tl.int64)
        own = tl.sum(tl.where(nodes == node, parents, 0), axis=0)
        parents = tl.where((nodes == child) & (nodes > node), node, parents)
        parents = tl.where((nodes == sibling) & (nodes > node), own, parents)
    return parents


@triton.jit(do_not_specialize=["num_slots", "num_window_rows"])
def conv_draft_kernel(
    x,
    weight,
    bias,
    out,
    state,
    slots,
    windows,
    window_rows,
    next_token,
    next_sibling,
    parent_token,
    num_slots,
    num_window_rows,
    dim,
    x_row_stride,
    x_dim_stride,
    x_draft_stride,
    out_row_stride,
    out_dim_stride,
    out_draft_stride,
    weight_dim_stride,
    weight_tap_stride,
    bias_stride,
    state_slot_stride,
    state_dim_stride,
    state_column_stride,
    slots_stride,
    windows_row_stride,
    windows_draft_stride,
    windows_dim_stride,
    windows_column_stride,
    window_rows_stride,
    next_token_row_stride,
    next_token_draft_stride,
    next_sibling_row_stride,
    next_sibling_draft_stride,
    parent_row_stride,
    parent_draft_stride,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK_DRAFTS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program: all drafts of one request by BLOCK_DIM channels. A tree needs BLOCK_DRAFTS >= DRAFTS.

    The input of tap j at draft t is named by a position: >= 0 is a draft, -1 the slot's newest column, -2 the one
    before it.
    """
    blocks = tl.cdiv(dim, BLOCK_DIM)
    program = tl.program_id(0)
    block = program % blocks
    row = (program // blocks).to(tl.int64)
    channels = block.to(tl.int64) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    inside = channels < dim
    nodes = tl.arange(0, BLOCK_DRAFTS)

    slot = row if slots is None else tl.load(slots + row * slots_stride).to(tl.int64)
    valid = (slot >= 0) & (slot < num_slots)
    live = inside & valid

    x_channels = x + row * x_row_stride + channels * x_dim_stride
    out_channels = out + row * out_row_stride + channels * out_dim_stride
    columns = state + slot * state_slot_stride + channels * state_dim_stride

    if windows is not None:
        target = row if window_rows is None else tl.load(window_rows + row * window_rows_stride).to(tl.int64)
        kept = live & (target >= 0) & (target < num_window_rows)
        window = windows + target * windows_row_stride + channels * windows_dim_stride

    if next_token is not None:
        parents = derive_parents(
            next_token + row * next_token_row_stride,
            next_sibling + row * next_sibling_row_stride,
            next_token_draft_stride,
            next_sibling_draft_stride,
            nodes,
            DRAFTS,
        )
        if parent_token is not None:
            tl.store(
                parent_token + row * parent_row_stride + nodes.to(tl.int64) * parent_draft_stride,
                parents.to(parent_token.dtype.element_ty),
                mask=(nodes < DRAFTS) & valid & (block == 0),
            )

    taps = load_taps(weight, channels, inside, weight_dim_stride, weight_tap_stride, WIDTH)
    offset = load_bias(bias, channels, inside, bias_stride)

    for first in tl.range(0, DRAFTS, BLOCK_DRAFTS):
        steps = first + nodes
        step_inside = steps < DRAFTS
        long_steps = steps.to(tl.int64)
        position = steps
        total = tl.zeros([BLOCK_DRAFTS, BLOCK_DIM], dtype=tl.float32) + offset[None, :]
        for back in tl.static_range(WIDTH):
            if back > 0:
                if next_token is None:
                    position = position - 1
                else:
                    is_position = position[:, None] == nodes[None, :]
                    parent = tl.sum(tl.where(is_position, parents[None, :], 0), axis=1)
                    position = tl.where(position > 0, parent, position - 1)
            is_draft = step_inside & (position >= 0)
            value = tl.load(
                x_channels[None, :] + position.to(tl.int64)[:, None] * x_draft_stride,
                mask=is_draft[:, None] & live[None, :],
                other=0.0,
            ).to(tl.float32)
            if back > 0:
                is_history = step_inside & (position < 0)
                old = tl.load(
                    columns[None, :] + (WIDTH - 1 + position).to(tl.int64)[:, None] * state_column_stride,
                    mask=is_history[:, None] & live[None, :],
                    other=0.0,
                ).to(tl.float32)
                value = tl.where(is_history[:, None], old, value)
            total += value * taps[back][None, :]
            if windows is not None and back < WIDTH - 1:
                column = (WIDTH - 2 - back) * windows_column_stride
                tl.store(
                    window[None, :] + (long_steps * windows_draft_stride + column)[:, None],
                    value.to(windows.dtype.element_ty),
                    mask=step_inside[:, None] & kept[None, :],
                )
        result = tl.where(valid, activate(total, SILU), 0.0)
        tl.store(
            out_channels[None, :] + long_steps[:, None] * out_draft_stride,
            result.to(out.dtype.element_ty),
            mask=step_inside[:, None] & inside[None, :],
        )

    if next_token is None:
        newest = ()
        for back in tl.static_range(WIDTH - 1):
            last = row * 0 + (DRAFTS - 1 - back)
            value = tl.load(x_channels + last * x_draft_stride, mask=live & (last >= 0), other=0.0).to(tl.float32)
            old = tl.load(columns + (WIDTH - 1 + last) * state_column_stride, mask=live & (last < 0), other=0.0).to(
                tl.float32
            )
            newest = newest + (tl.where(last >= 0, value, old),)  # noqa: RUF005
        # Another thread of this program may still need an old column: all read before any writes.
        tl.debug_barrier()
        for back in tl.static_range(WIDTH - 1):
            tl.store(
                columns + (WIDTH - 2 - back) * state_column_stride,
                newest[back].to(state.dtype.element_ty),
                mask=live,
            )
