"""Verify: the draft tokens of each request, a chain or a tree, without touching the pool."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from typing import NamedTuple

import torch
import triton

from gdn._triton_launch import Launch
from gdn.backends.triton._plan import template
from gdn.backends.triton._verify_kernel import verify_kernel
from gdn.backends.triton._verify_walk_kernel import unbuffered_tree_walk_kernel
from gdn.backends.triton._verify_walk_kernel import verify_walk_kernel
from gdn.backends.triton.dots import fp32_precision
from gdn.backends.triton.dots import raw_product
from gdn.backends.triton.tuning import taken_together
from gdn.backends.triton.tuning import verify_tile
from gdn.backends.triton.tuning import walk_tile
from gdn.signature import planned
from gdn.validation import check_verify

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.device import DeviceInfo
    from gdn.ops import Verify

DRAFTS_AT_ONCE = 8
"""Drafts of one round of the walk, whose factors it keeps in registers."""


class Plan(NamedTuple):
    """What one signature needs to launch."""

    launch: Launch
    grid: tuple[int, int]
    out: Tensor
    """A `template` of the output."""
    scale: float
    numbers: tuple[int, ...]
    has_buffer: bool
    """Whether the kernel takes a buffer and its rows."""


def factory(context: BindContext) -> Verify:
    """One tile for every batch where the config asks for equal bits, else the fastest."""
    plans = planned(partial(_plan, context.config.deterministic, context.device))

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
            out = torch.empty_like(plan.out)
        scale = plan.scale if scale is None else scale
        if plan.grid[0] == 0:
            return out.zero_()
        if not plan.has_buffer:
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
    fixed: bool, device: DeviceInfo | None, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor,
    b: Tensor, ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, buffer: Tensor | None,
    buffer_rows: Tensor | None, cache_steps: int, parents: Tensor | None, out: Tensor | None,
) -> Plan:  # fmt: skip
    check_verify(
        A_log, dt_bias, q, k, v, a, b, ssm_states, cache_indices, query_start_loc, buffer, buffer_rows, cache_steps,
        parents, out,
    )  # fmt: skip
    slots, value_heads, value_dim, key_dim = ssm_states.shape
    requests, tokens = cache_indices.shape[0], v.shape[1]
    stored_chain = buffer is not None and parents is None
    together = taken_together(cache_steps, stored_chain)
    states = None if fixed else requests * value_heads
    if together:
        tile = verify_tile(states, ssm_states.element_size(), value_dim, key_dim, stores=buffer is not None)
    else:
        tile = walk_tile(states, value_dim, key_dim)
    constants = {
        "HV": value_heads,
        "RATIO": value_heads // k.shape[2],
        "K": key_dim,
        "V": value_dim,
        "BK": max(triton.next_power_of_2(key_dim), 16),
        "BV": tile.rows,
        "TILES": tile.tiles,
        "HAS_BUFFER": buffer is not None,
        "TREE": parents is not None,
    }
    strides = (
        *q.stride()[1:], *k.stride()[1:], *v.stride()[1:], *a.stride(), *b.stride(), A_log.stride(0), dt_bias.stride(0),
        ssm_states.stride(0), cache_indices.stride(0), query_start_loc.stride(0),
    )  # fmt: skip
    stored = (0, 0, 0) if buffer is None else (*buffer.stride()[:2], buffer_rows.stride(0))
    links = (0, 0) if parents is None else tuple(parents.stride())
    sizes = (slots, tokens, requests, 0 if buffer is None else buffer.shape[0])
    programs = requests * value_heads * triton.cdiv(value_dim, tile.rows * tile.tiles)
    grid, has_buffer = (programs, 1), True
    if together:
        kernel, numbers = verify_kernel, (*sizes, *strides, *stored, *links)
        operand, precision = raw_product(k.dtype, ssm_states.dtype, device)
        constants |= {
            "DRAFTS": cache_steps, "BT": max(triton.next_power_of_2(cache_steps), 16),
            "OPERAND": operand, "PRECISION": precision, "EXACT": fp32_precision(device),
        }  # fmt: skip
    elif buffer is None and parents is not None:
        kernel, numbers = unbuffered_tree_walk_kernel, (*sizes[:3], *strides, *links)
        grid, has_buffer = (programs, min(cache_steps, tokens)), False
    else:
        kernel, numbers = verify_walk_kernel, (*sizes, cache_steps, *strides, *stored, *links)
        constants["DRAFTS"] = min(cache_steps, DRAFTS_AT_ONCE)
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    return Plan(
        Launch(kernel, constants, num_warps=tile.warps), grid,
        template((1, tokens, value_heads, value_dim), v.dtype, v.device), key_dim**-0.5, numbers, has_buffer,
    )  # fmt: skip
