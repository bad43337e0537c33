"""Verify: the draft tokens of each request, a chain or a tree, without touching the pool."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from typing import NamedTuple

import torch
import triton

from gdn.backends.triton._verify_kernel import unbuffered_tree_kernel
from gdn.backends.triton._verify_kernel import verify_kernel
from gdn.backends.triton.launch import Launch
from gdn.backends.triton.tuning import verify_tile
from gdn.signature import planned
from gdn.validation import check_verify

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import Verify

DRAFTS_AT_ONCE = 8
"""Drafts of one round of the kernel, whose factors it keeps in registers."""


class Plan(NamedTuple):
    """What one signature needs to launch."""

    launch: Launch
    grid: tuple[int, int]
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    scale: float
    numbers: tuple[int, ...]
    walks: bool
    """A tree without a buffer: each draft's program walks its own path."""


def factory(context: BindContext) -> Verify:
    """One tile for every batch where the config asks for equal bits, else the fastest."""
    plans = planned(partial(_plan, context.config.deterministic))

    def verify(
        A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, ssm_states: Tensor,
        cache_indices: Tensor, query_start_loc: Tensor, intermediate_states_buffer: Tensor | None,
        intermediate_state_indices: Tensor | None, cache_steps: int, retrieve_parent_token: Tensor | None = None,
        scale: float | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `gdn.ops.Verify`. Rows of drafts beyond `cache_steps` are zeros."""
        plan = plans(
            A_log, dt_bias, q, k, v, a, b, ssm_states, cache_indices, query_start_loc, intermediate_states_buffer,
            intermediate_state_indices, cache_steps, retrieve_parent_token, out,
        )  # fmt: skip
        if out is None:
            out = torch.empty(plan.shape, dtype=plan.dtype, device=plan.device)
        scale = plan.scale if scale is None else scale
        if plan.grid[0] == 0:
            return out.zero_()
        if plan.walks:
            plan.launch(
                *plan.grid, 1,
                q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, retrieve_parent_token, out,
                scale, *plan.numbers,
            )  # fmt: skip
        else:
            plan.launch(
                *plan.grid, 1,
                q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, intermediate_states_buffer,
                intermediate_state_indices, retrieve_parent_token, out, scale, *plan.numbers,
            )  # fmt: skip
        return out

    return verify


def _plan(
    fixed: bool, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, buffer: Tensor | None,
    buffer_rows: Tensor | None, cache_steps: int, parents: Tensor | None, out: Tensor | None,
) -> Plan:  # fmt: skip
    check_verify(
        A_log, dt_bias, q, k, v, a, b, ssm_states, cache_indices, query_start_loc, buffer, buffer_rows, cache_steps,
        parents, out,
    )  # fmt: skip
    slots, value_heads, value_dim, key_dim = ssm_states.shape
    requests, tokens = cache_indices.shape[0], v.shape[1]
    tile = verify_tile(None if fixed else requests * value_heads, ssm_states.element_size(), value_dim, key_dim)
    constants = {
        "HV": value_heads,
        "RATIO": value_heads // k.shape[2],
        "K": key_dim,
        "V": value_dim,
        "BK": triton.next_power_of_2(key_dim),
        "BV": tile.rows,
    }
    strides = (
        *q.stride()[1:], *k.stride()[1:], *v.stride()[1:], *a.stride(), *b.stride(), A_log.stride(0), dt_bias.stride(0),
        ssm_states.stride(0), cache_indices.stride(0), query_start_loc.stride(0),
    )  # fmt: skip
    links = (0, 0) if parents is None else tuple(parents.stride())
    walks = parents is not None and buffer is None
    tiles = 1 if walks or cache_steps > DRAFTS_AT_ONCE else tile.tiles
    programs = requests * value_heads * triton.cdiv(value_dim, tile.rows * tiles)
    if walks:
        kernel, grid = unbuffered_tree_kernel, (programs, min(cache_steps, tokens))
        numbers = (slots, tokens, requests, *strides, *links)
    else:
        kernel, grid = verify_kernel, (programs, 1)
        stored = (0, 0, 0) if buffer is None else (*buffer.stride()[:2], buffer_rows.stride(0))
        rows = 0 if buffer is None else buffer.shape[0]
        numbers = (slots, tokens, requests, rows, cache_steps, *strides, *stored, *links)
        constants |= {
            "HAS_BUFFER": buffer is not None,
            "TREE": parents is not None,
            "TILES": tiles,
            "DRAFTS": min(cache_steps, DRAFTS_AT_ONCE),
        }
    return Plan(
        Launch(kernel, constants, num_warps=tile.warps), grid, (1, tokens, value_heads, value_dim), v.dtype, v.device,
        key_dim**-0.5, numbers, walks,
    )  # fmt: skip
