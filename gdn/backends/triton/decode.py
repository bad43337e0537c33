"""Decode: one token per request, over separate or packed q, k and v."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import triton

from gdn._triton_launch import Launch
from gdn.backends.triton._decode_kernel import decode_kernel
from gdn.backends.triton._plan import RowPlan
from gdn.backends.triton._plan import template
from gdn.backends.triton.tuning import decode_tile
from gdn.signature import planned
from gdn.validation import check_decode
from gdn.validation import check_packed_decode

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import Decode
    from gdn.ops import PackedDecode


def factory(context: BindContext) -> Decode:
    """One tile for every batch where the config asks for equal bits, else the fastest."""
    plans = planned(partial(_plan, context.config.deterministic))

    def decode(
        q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
        cache_indices: Tensor, query_start_loc: Tensor | None = None, scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `gdn.ops.Decode`."""
        plan = plans(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, out)
        if out is None:
            out = torch.empty_like(plan.out)
        if query_start_loc is not None:
            out.zero_()
        plan.launch(
            plan.programs, 1, 1,
            q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, out,
            plan.scale if scale is None else scale, *plan.numbers,
        )  # fmt: skip
        return out

    return decode


def packed_factory(context: BindContext) -> PackedDecode:
    """See `factory`."""
    plans = planned(partial(_packed_plan, context.config.deterministic))

    def packed_decode(
        mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
        cache_indices: Tensor, num_v_heads: int | None = None, head_v_dim: int | None = None,
        scale: float | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `gdn.ops.PackedDecode`."""
        plan = plans(mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, num_v_heads, head_v_dim, out)
        if out is None:
            out = torch.empty_like(plan.out)
        plan.launch(
            plan.programs, 1, 1,
            mixed_qkv, mixed_qkv, mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, None, out,
            plan.scale if scale is None else scale, *plan.numbers,
        )  # fmt: skip
        return out

    return packed_decode


def _plan(
    fixed: bool, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor | None, out: Tensor | None,
) -> RowPlan:  # fmt: skip
    check_decode(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, out)
    strides = (*q.stride()[1:], *k.stride()[1:], *v.stride()[1:])
    return _planned_for(
        fixed,
        v.shape[1],
        q.shape[2],
        v.dtype,
        a,
        b,
        A_log,
        dt_bias,
        ssm_states,
        cache_indices,
        query_start_loc,
        (0, 0),
        strides,
    )


def _packed_plan(
    fixed: bool, mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
    cache_indices: Tensor, num_v_heads: int | None, head_v_dim: int | None, out: Tensor | None,
) -> RowPlan:  # fmt: skip
    check_packed_decode(
        mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, num_v_heads, head_v_dim, out
    )  # fmt: skip
    rows, dim = mixed_qkv.shape
    _, value_heads, value_dim, key_dim = ssm_states.shape
    keys = (dim - value_heads * value_dim) // 2
    token, column = mixed_qkv.stride()
    strides = (token, key_dim * column, column, token, key_dim * column, column, token, value_dim * column, column)
    return _planned_for(
        fixed, rows, keys // key_dim, mixed_qkv.dtype, a, b, A_log, dt_bias, ssm_states, cache_indices, None,
        (keys * column, 2 * keys * column), strides,
    )  # fmt: skip


def _planned_for(
    fixed: bool, tokens: int, key_heads: int, dtype: torch.dtype, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor | None, offsets: tuple[int, int],
    strides: tuple[int, ...],
) -> RowPlan:  # fmt: skip
    slots, value_heads, value_dim, key_dim = ssm_states.shape
    requests = cache_indices.shape[0]
    states = None if fixed else requests * value_heads
    tile = decode_tile(states, ssm_states.element_size(), value_dim, key_dim)
    constants = {
        "HV": value_heads,
        "RATIO": value_heads // key_heads,
        "K": key_dim,
        "V": value_dim,
        "BK": triton.next_power_of_2(key_dim),
        "BV": tile.rows,
        "TILES": tile.tiles,
        "HAS_OFFSETS": query_start_loc is not None,
    }
    return RowPlan(
        Launch(decode_kernel, constants, num_warps=tile.warps),
        requests * value_heads * triton.cdiv(value_dim, tile.rows * tile.tiles),
        template((1, tokens, value_heads, value_dim), dtype, ssm_states.device),
        key_dim**-0.5,
        (
            slots, tokens, *offsets, *strides, *a.stride(), *b.stride(), A_log.stride(0), dt_bias.stride(0),
            ssm_states.stride(0), cache_indices.stride(0), 0 if query_start_loc is None else query_start_loc.stride(0),
        ),
    )  # fmt: skip
