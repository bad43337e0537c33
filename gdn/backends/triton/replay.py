"""Replay decode: decode over a checkpoint and a ring of updates, which writes the state once per ring."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import triton

from gdn._triton_launch import Launch
from gdn.backends.triton._plan import RowPlan
from gdn.backends.triton._plan import template
from gdn.backends.triton._replay_kernel import replay_kernel
from gdn.backends.triton.tuning import replay_tile
from gdn.signature import planned
from gdn.validation import check_replay_decode

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import ReplayDecode


def factory(context: BindContext) -> ReplayDecode:
    """One tile for every batch where the config asks for equal bits, else the fastest."""
    plans = planned(partial(_plan, context.config.deterministic))

    def replay_decode(
        mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
        cache_indices: Tensor, replayssm_d: Tensor, replayssm_k: Tensor, replayssm_g: Tensor,
        replayssm_write_pos: Tensor, replayssm_force_flush: Tensor | None = None, num_v_heads: int | None = None,
        head_v_dim: int | None = None, scale: float | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `gdn.ops.ReplayDecode`."""
        plan = plans(
            mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, replayssm_d, replayssm_k, replayssm_g,
            replayssm_write_pos, replayssm_force_flush, num_v_heads, head_v_dim, out,
        )  # fmt: skip
        if out is None:
            out = torch.empty_like(plan.out)
        plan.launch(
            plan.programs, 1, 1,
            mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, replayssm_d, replayssm_k, replayssm_g,
            replayssm_write_pos, replayssm_force_flush, out, plan.scale if scale is None else scale, *plan.numbers,
        )  # fmt: skip
        return out

    return replay_decode


def _plan(
    fixed: bool, mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
    cache_indices: Tensor, ring_d: Tensor, ring_k: Tensor, ring_g: Tensor, cursors: Tensor, forced: Tensor | None,
    num_v_heads: int | None, head_v_dim: int | None, out: Tensor | None,
) -> RowPlan:  # fmt: skip
    check_replay_decode(
        mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, ring_d, ring_k, ring_g, cursors, forced,
        num_v_heads, head_v_dim, out,
    )  # fmt: skip
    rows, dim = mixed_qkv.shape
    slots, value_heads, value_dim, key_dim = ssm_states.shape
    keys, window = (dim - value_heads * value_dim) // 2, ring_d.shape[2]
    token, column = mixed_qkv.stride()
    tile = replay_tile(None if fixed else rows * value_heads, ssm_states.element_size(), value_dim, key_dim)
    constants = {
        "HV": value_heads,
        "RATIO": value_heads * key_dim // keys,
        "K": key_dim,
        "V": value_dim,
        "L": window,
        "BK": triton.next_power_of_2(key_dim),
        "BV": tile.rows,
        "TILES": tile.tiles,
        "BL": max(triton.next_power_of_2(window), 2),
        "FORCED": forced is not None,
    }
    return RowPlan(
        Launch(replay_kernel, constants, num_warps=tile.warps),
        rows * value_heads * triton.cdiv(value_dim, tile.rows * tile.tiles),
        template((1, rows, value_heads, value_dim), mixed_qkv.dtype, mixed_qkv.device),
        key_dim**-0.5,
        (
            slots, keys * column, 2 * keys * column, token, column, *a.stride(), *b.stride(), A_log.stride(0),
            dt_bias.stride(0), ssm_states.stride(0), cache_indices.stride(0), ring_d.stride(0), ring_k.stride(0),
            ring_g.stride(0), cursors.stride(0), 0 if forced is None else forced.stride(0),
        ),
    )  # fmt: skip
