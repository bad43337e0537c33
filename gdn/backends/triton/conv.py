"""The causal depthwise convolution: over packed sequences, and step by step for decode and drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

import torch
import triton

from gdn._triton_launch import Launch
from gdn.backends.triton._conv_extend_kernel import conv_extend_kernel
from gdn.backends.triton._conv_update_kernel import conv_draft_kernel
from gdn.backends.triton._conv_update_kernel import conv_step_kernel
from gdn.backends.triton.tuning import first_that_fits
from gdn.signature import planned
from gdn.validation import check_conv_extend
from gdn.validation import check_conv_update
from gdn.validation import check_seq_lens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import ConvExtend
    from gdn.ops import ConvUpdate


class Tile(NamedTuple):
    """Rows (tokens, requests or drafts) and channels of one program, and its warps."""

    rows: int
    channels: int
    warps: int


EXTEND_TILE = Tile(32, 128, 4)
STEP_TILES = ((8, Tile(1, 128, 2)), (64, Tile(2, 128, 2)), (None, Tile(8, 128, 4)))
"""Tiles of one token per request, by the largest number of requests that each serves."""
DRAFT_TILE = Tile(8, 128, 4)
"""Rows are the most drafts at once; a tree takes all its drafts at once."""


class Plan(NamedTuple):
    """What one signature needs to launch: the grid, and the numbers that follow the pointers."""

    launch: Launch
    programs: int
    numbers: tuple[int, ...]
    on_drafts: bool = False


def extend_factory(context: BindContext) -> ConvExtend:
    """conv_extend serves every config alike."""
    plans = planned(_plan_extend)

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
        """See `gdn.ops.ConvExtend`. Offsets that decrease or leave `[0, T]` touch no memory outside the tensors."""
        plan = plans(x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation)
        check_seq_lens(seq_lens_cpu, query_start_loc)
        out = torch.empty_like(x)
        plan.launch(
            plan.programs, 1, 1,
            x, weight, bias, out, conv_states, query_start_loc, cache_indices, has_initial_state, *plan.numbers,
        )  # fmt: skip
        return out

    return conv_extend


def update_factory(context: BindContext) -> ConvUpdate:
    """conv_update serves every config alike."""
    plans = planned(_plan_update)

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
        plan = plans(
            x, conv_state, weight, bias, activation, conv_state_indices, intermediate_conv_window,
            intermediate_state_indices, retrieve_next_token, retrieve_next_sibling, retrieve_parent_token,
        )  # fmt: skip
        out = torch.empty_like(x)
        if plan.on_drafts:
            plan.launch(
                plan.programs, 1, 1,
                x, weight, bias, out, conv_state, conv_state_indices, intermediate_conv_window,
                intermediate_state_indices, retrieve_next_token, retrieve_next_sibling, retrieve_parent_token,
                *plan.numbers,
            )  # fmt: skip
        else:
            plan.launch(
                plan.programs, 1, 1,
                x, weight, bias, out, conv_state, conv_state_indices, intermediate_conv_window,
                intermediate_state_indices, *plan.numbers,
            )  # fmt: skip
        return out

    return conv_update


def _plan_extend(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor, query_start_loc: Tensor,
    cache_indices: Tensor, has_initial_state: Tensor | None, activation: str | None,
) -> Plan:  # fmt: skip
    check_conv_extend(x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation)
    dim, tokens = x.shape
    width, sequences = weight.shape[1], cache_indices.shape[0]
    block_tokens = max(EXTEND_TILE.rows, triton.next_power_of_2(width - 1))
    block_dim = _block_dim(EXTEND_TILE, dim)
    constants = {"WIDTH": width, "SILU": _is_silu(activation), "BLOCK_TOKENS": block_tokens, "BLOCK_DIM": block_dim}
    tiles = tokens // block_tokens + sequences + 2 if tokens else 0
    numbers = (
        tokens, sequences, conv_states.shape[0], dim,
        *x.stride(), *_strides_like(x), *weight.stride(), *_strides(bias, 1), *conv_states.stride(),
        *query_start_loc.stride(), *cache_indices.stride(), *_strides(has_initial_state, 1),
    )  # fmt: skip
    launch = Launch(conv_extend_kernel, constants, num_warps=EXTEND_TILE.warps)
    return Plan(launch, tiles * triton.cdiv(dim, block_dim), numbers)


def _plan_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None,
    slots: Tensor | None, windows: Tensor | None, window_rows: Tensor | None,
    next_token: Tensor | None, next_sibling: Tensor | None, parent_token: Tensor | None,
) -> Plan:  # fmt: skip
    check_conv_update(
        x, conv_state, weight, bias, activation, slots, windows, window_rows, next_token, next_sibling, parent_token
    )
    requests, dim = x.shape[:2]
    drafts = x.shape[2] if x.dim() == 3 else 1
    on_drafts = drafts > 1 or next_token is not None
    constants: dict[str, Any] = {"WIDTH": weight.shape[1], "SILU": _is_silu(activation)}
    x_strides, out_strides = x.stride(), _strides_like(x)
    window_strides = _strides(windows, 4)
    shared = (*weight.stride(), *_strides(bias, 1), *conv_state.stride(), *_strides(slots, 1))
    counts = (conv_state.shape[0], 0 if windows is None else windows.shape[0])
    if not on_drafts:
        tile = first_that_fits(STEP_TILES, requests)
        block_dim = _block_dim(tile, dim)
        numbers = (
            requests, *counts, dim, *x_strides[:2], *out_strides[:2], *shared,
            window_strides[0], *window_strides[2:], *_strides(window_rows, 1),
        )  # fmt: skip
        launch = Launch(
            conv_step_kernel, constants | {"BLOCK_ROWS": tile.rows, "BLOCK_DIM": block_dim}, num_warps=tile.warps
        )
        return Plan(launch, triton.cdiv(requests, tile.rows) * triton.cdiv(dim, block_dim), numbers)
    tile = DRAFT_TILE
    block_dim = _block_dim(tile, dim)
    block_drafts = triton.next_power_of_2(max(drafts, 1))
    if next_token is None:
        block_drafts = min(block_drafts, tile.rows)
    numbers = (
        *counts, dim, *(*x_strides, 0)[:3], *(*out_strides, 0)[:3], *shared,
        *window_strides, *_strides(window_rows, 1),
        *_strides(next_token, 2), *_strides(next_sibling, 2), *_strides(parent_token, 2),
    )  # fmt: skip
    constants |= {"DRAFTS": drafts, "BLOCK_DRAFTS": block_drafts, "BLOCK_DIM": block_dim}
    launch = Launch(conv_draft_kernel, constants, num_warps=tile.warps)
    return Plan(launch, requests * triton.cdiv(dim, block_dim) if drafts else 0, numbers, on_drafts=True)


def _is_silu(activation: str | None) -> bool:
    return activation is not None


def _block_dim(tile: Tile, dim: int) -> int:
    return min(tile.channels, max(16, triton.next_power_of_2(dim)))


def _strides(tensor: Tensor | None, axes: int) -> tuple[int, ...]:
    return (0,) * axes if tensor is None else tensor.stride()


def _strides_like(x: Tensor) -> tuple[int, ...]:
    """Strides of `torch.empty_like(x)`."""
    return torch.empty_like(x, device="meta").stride()
