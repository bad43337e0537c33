"""The causal depthwise convolution: over packed sequences, and step by step for decode and drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gdn.backends.cpu.conv_tree import ancestor_columns
from gdn.backends.cpu.conv_tree import draft_parents
from gdn.backends.cpu.conv_window import convolve
from gdn.backends.cpu.conv_window import fp32_taps
from gdn.backends.cpu.rows import PADDED
from gdn.backends.cpu.rows import host_indices
from gdn.backends.cpu.rows import select_slots
from gdn.backends.cpu.rows import token_spans
from gdn.backends.cpu.rows import zero_other_rows
from gdn.signature import validated
from gdn.validation import check_conv_extend
from gdn.validation import check_conv_update
from gdn.validation import check_seq_lens

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence

    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import ConvExtend
    from gdn.ops import ConvUpdate

_check_extend = validated(check_conv_extend)
_check_update = validated(check_conv_update)

_BLOCK_ELEMENTS = 2**18
"""Inputs per block of `conv_extend`: its few fp32 buffers stay in cache."""


def conv_extend(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor | None,
    activation: str | None = "silu",
    seq_lens_cpu: Sequence[int] | None = None,
) -> Tensor:
    """See `gdn.ops.ConvExtend`."""
    _check_extend(x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation)
    check_seq_lens(seq_lens_cpu, query_start_loc)
    dim, width = weight.shape
    spans = token_spans(query_start_loc, x.shape[1])
    slots = host_indices(cache_indices, conv_states.shape[0])
    continued = [True] * len(spans) if has_initial_state is None else has_initial_state.tolist()
    history_columns = width - 1
    block = max(16, _BLOCK_ELEMENTS // max(dim, 1))
    taps = fp32_taps(weight)

    out = torch.empty_like(x)
    rows, out_rows = x.t(), out.t()
    for (begin, end), slot, has_history in zip(spans, slots, continued, strict=True):
        if slot == PADDED or begin == end:
            continue
        stored = conv_states[slot, :, :history_columns].t()
        history = stored if has_history else torch.zeros_like(stored)
        for first in range(begin, end, block):
            last = min(first + block, end)
            window = torch.empty((history_columns + last - first, dim), dtype=torch.float32, device=x.device)
            window[:history_columns].copy_(history)
            window[history_columns:].copy_(rows[first:last])
            tokens = last - first
            out_rows[first:last].copy_(
                convolve(lambda tap, w=window, n=tokens: w[tap : tap + n], taps, bias, activation)
            )
            history = window[tokens:]
        stored.copy_(history)
    zero_other_rows(out_rows, (span for span, slot in zip(spans, slots, strict=True) if slot != PADDED))
    return out


def conv_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    conv_state_indices: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
) -> Tensor:
    """See `gdn.ops.ConvUpdate`. The parents of padded requests are not written."""
    _check_update(
        x, conv_state, weight, bias, activation, conv_state_indices, intermediate_conv_window,
        intermediate_state_indices, retrieve_next_token, retrieve_next_sibling, retrieve_parent_token,
    )  # fmt: skip
    requests, slot_count = x.shape[0], conv_state.shape[0]
    history = weight.shape[1] - 1
    indices = range(requests) if conv_state_indices is None else conv_state_indices.tolist()
    rows = [row for row, slot in enumerate(indices) if 0 <= slot < slot_count]
    every_row = len(rows) == requests
    real = torch.tensor(rows, dtype=torch.int64)
    slots = [indices[row] for row in rows]
    histories = conv_state[:, :, :history]
    stored = select_slots(histories, slots)

    steps = (x.unsqueeze(-1) if x.dim() == 2 else x).permute(2, 0, 1)
    drafts, _, dim = steps.shape
    window = torch.empty((history + drafts, len(rows), dim), dtype=torch.float32, device=x.device)
    loaded = histories.index_select(0, torch.tensor(slots)) if stored is None else stored
    window[:history].copy_(loaded.permute(2, 0, 1))
    window[history:].copy_(steps if every_row else steps.index_select(1, real))
    taps = fp32_taps(weight)

    if retrieve_next_token is None or retrieve_next_sibling is None:

        def tap_input(tap: int) -> Tensor:
            return window[tap : tap + drafts]

        newest = window[drafts:].permute(1, 2, 0)
        if stored is None:
            histories.index_copy_(0, torch.tensor(slots), newest.to(conv_state.dtype))
        else:
            stored.copy_(newest)
    else:
        parents = draft_parents(retrieve_next_token.index_select(0, real), retrieve_next_sibling.index_select(0, real))
        if retrieve_parent_token is not None:
            retrieve_parent_token.index_copy_(0, real, parents.to(retrieve_parent_token.dtype))
        columns = ancestor_columns(parents, history + 1).transpose(1, 2)

        def tap_input(tap: int) -> Tensor:
            return window.gather(0, columns[tap].unsqueeze(-1).expand(drafts, len(rows), dim))

    if intermediate_conv_window is not None and history:
        kept = range(requests) if intermediate_state_indices is None else intermediate_state_indices.tolist()
        _store_windows(intermediate_conv_window, [kept[row] for row in rows], tap_input)

    result = convolve(tap_input, taps, bias, activation)
    out = torch.empty_like(x)
    out_steps = (out.unsqueeze(-1) if out.dim() == 2 else out).permute(2, 0, 1)
    if every_row:
        out_steps.copy_(result)
    else:
        out.zero_()
        out_steps.index_copy_(1, real, result.to(out.dtype))
    return out


def _store_windows(buffer: Tensor, buffer_rows: Sequence[int], tap_input: Callable[[int], Tensor]) -> None:
    """Store the W-1 newest inputs after each draft; a row outside the buffer stores nothing."""
    windows = torch.stack([tap_input(tap) for tap in range(1, buffer.shape[3] + 1)], dim=-1)
    for position, row in enumerate(buffer_rows):
        if 0 <= row < buffer.shape[0]:
            buffer[row, : windows.shape[0]].copy_(windows[:, position])


def extend_factory(context: BindContext) -> ConvExtend:
    """conv_extend serves every config alike."""
    return conv_extend


def update_factory(context: BindContext) -> ConvUpdate:
    """conv_update serves every config alike."""
    return conv_update
