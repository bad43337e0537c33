"""Decode, packed decode and replay decode: one token per request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gdn.backends.cpu.native.library import Plan
from gdn.backends.cpu.native.library import address
from gdn.backends.cpu.native.library import check_on_cpu
from gdn.backends.cpu.native.library import make_plan
from gdn.backends.cpu.native.library import native
from gdn.backends.cpu.native.structures import ARGUMENTS
from gdn.backends.cpu.native.structures import DecodePlan
from gdn.backends.cpu.native.structures import Heads
from gdn.backends.cpu.native.structures import View
from gdn.backends.cpu.native.structures import view
from gdn.backends.cpu.rows import token_spans
from gdn.signature import planned
from gdn.validation import check_decode
from gdn.validation import check_packed_decode
from gdn.validation import check_replay_decode

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import Decode
    from gdn.ops import PackedDecode
    from gdn.ops import ReplayDecode

_pack = ARGUMENTS["decode"][1].pack
_threads = torch.get_num_threads


def factory(context: BindContext) -> Decode:
    """One native function serves every config."""
    run, plans = native("decode"), planned(_decode_plan)

    def decode(
        q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
        cache_indices: Tensor, query_start_loc: Tensor | None = None, scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `gdn.ops.Decode`."""
        plan = plans(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, out)
        if out is None:
            out = torch.empty(plan.shape, dtype=plan.dtype, device="cpu")
        call = _pack(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), a.data_ptr(), b.data_ptr(), A_log.data_ptr(), dt_bias.data_ptr(),
            ssm_states.data_ptr(), cache_indices.data_ptr(), address(query_start_loc), out.data_ptr(),
            0, 0, 0, 0, 0, plan.scale if scale is None else scale, _threads(),
        )  # fmt: skip
        if run(plan.address, call):
            assert query_start_loc is not None
            token_spans(query_start_loc, v.shape[1])
        return out

    return decode


def packed_factory(context: BindContext) -> PackedDecode:
    """One native function serves every config."""
    run, plans = native("decode"), planned(_packed_plan)

    def packed_decode(
        mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
        cache_indices: Tensor, num_v_heads: int | None = None, head_v_dim: int | None = None,
        scale: float | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `gdn.ops.PackedDecode`."""
        plan, keys, values = plans(
            mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, num_v_heads, head_v_dim, out
        )
        if out is None:
            out = torch.empty(plan.shape, dtype=plan.dtype, device="cpu")
        rows = mixed_qkv.data_ptr()
        call = _pack(
            rows, rows + keys, rows + values, a.data_ptr(), b.data_ptr(), A_log.data_ptr(), dt_bias.data_ptr(),
            ssm_states.data_ptr(), cache_indices.data_ptr(), 0, out.data_ptr(),
            0, 0, 0, 0, 0, plan.scale if scale is None else scale, _threads(),
        )  # fmt: skip
        run(plan.address, call)
        return out

    return packed_decode


def replay_factory(context: BindContext) -> ReplayDecode:
    """One native function serves every config."""
    run, plans = native("replay"), planned(_replay_plan)

    def replay_decode(
        mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
        cache_indices: Tensor, replayssm_d: Tensor, replayssm_k: Tensor, replayssm_g: Tensor,
        replayssm_write_pos: Tensor, replayssm_force_flush: Tensor | None = None, num_v_heads: int | None = None,
        head_v_dim: int | None = None, scale: float | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `gdn.ops.ReplayDecode`."""
        plan, keys, values = plans(
            mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, replayssm_d, replayssm_k, replayssm_g,
            replayssm_write_pos, replayssm_force_flush, num_v_heads, head_v_dim, out,
        )  # fmt: skip
        if out is None:
            out = torch.empty(plan.shape, dtype=plan.dtype, device="cpu")
        rows = mixed_qkv.data_ptr()
        call = _pack(
            rows, rows + keys, rows + values, a.data_ptr(), b.data_ptr(), A_log.data_ptr(), dt_bias.data_ptr(),
            ssm_states.data_ptr(), cache_indices.data_ptr(), 0, out.data_ptr(), replayssm_d.data_ptr(),
            replayssm_k.data_ptr(), replayssm_g.data_ptr(), replayssm_write_pos.data_ptr(),
            address(replayssm_force_flush), plan.scale if scale is None else scale, _threads(),
        )  # fmt: skip
        run(plan.address, call)
        return out

    return replay_decode


PackedPlan = tuple[Plan, int, int]
"""A plan, and the bytes from the start of a packed row to its k and to its v."""


def _decode_plan(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
    cache_indices: Tensor, query_start_loc: Tensor | None, out: Tensor | None,
) -> Plan:  # fmt: skip
    check_decode(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, out)
    check_on_cpu("q", q)
    _, tokens, value_heads, value_dim = v.shape
    memory = DecodePlan(
        tokens=tokens, requests=cache_indices.shape[0], slots=ssm_states.shape[0],
        has_offsets=query_start_loc is not None, heads=Heads(q.shape[2], value_heads, q.shape[3], value_dim),
        q=view(q, 1, 2, 3), k=view(k, 1, 2, 3), v=view(v, 1, 2, 3), offsets=view(query_start_loc),
        **_common_views(a, b, A_log, dt_bias, ssm_states, cache_indices),
    )  # fmt: skip
    return make_plan(memory, tuple(v.shape), v.dtype, q.shape[3] ** -0.5)


def _packed_plan(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor, cache_indices: Tensor,
    num_v_heads: int | None, head_v_dim: int | None, out: Tensor | None,
) -> PackedPlan:  # fmt: skip
    check_packed_decode(mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, num_v_heads, head_v_dim, out)
    return _plan_rows(mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices)


def _replay_plan(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor, cache_indices: Tensor,
    replayssm_d: Tensor, replayssm_k: Tensor, replayssm_g: Tensor, replayssm_write_pos: Tensor,
    replayssm_force_flush: Tensor | None, num_v_heads: int | None, head_v_dim: int | None, out: Tensor | None,
) -> PackedPlan:  # fmt: skip
    check_replay_decode(
        mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, replayssm_d, replayssm_k, replayssm_g,
        replayssm_write_pos, replayssm_force_flush, num_v_heads, head_v_dim, out,
    )  # fmt: skip
    plan, keys, values = _plan_rows(mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices)
    memory = plan.memory
    assert isinstance(memory, DecodePlan)
    memory.ring_d, memory.ring_k, memory.ring_g = view(replayssm_d), view(replayssm_k), view(replayssm_g)
    memory.write_pos, memory.flush = view(replayssm_write_pos), view(replayssm_force_flush)
    memory.window, memory.has_flush = replayssm_d.shape[2], replayssm_force_flush is not None
    return plan, keys, values


def _plan_rows(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor, cache_indices: Tensor
) -> PackedPlan:
    check_on_cpu("mixed_qkv", mixed_qkv)
    tokens, columns = mixed_qkv.shape
    slots, value_heads, value_dim, key_dim = ssm_states.shape
    key_columns = (columns - value_heads * value_dim) // 2
    row = view(mixed_qkv)
    token, column = mixed_qkv.stride()
    keys = View(row.dtype, (token, key_dim * column, column))
    memory = DecodePlan(
        tokens=tokens, requests=tokens, slots=slots, q=keys, k=keys,
        heads=Heads(key_columns // key_dim, value_heads, key_dim, value_dim),
        v=View(row.dtype, (token, value_dim * column, column)),
        **_common_views(a, b, A_log, dt_bias, ssm_states, cache_indices),
    )  # fmt: skip
    plan = make_plan(memory, (1, tokens, value_heads, value_dim), mixed_qkv.dtype, key_dim**-0.5)
    step = key_columns * column * mixed_qkv.element_size()
    return plan, step, 2 * step


def _common_views(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor, cache_indices: Tensor
) -> dict[str, View]:
    return {
        "a": view(a), "b": view(b), "A_log": view(A_log), "dt_bias": view(dt_bias), "state": view(ssm_states),
        "index": view(cache_indices),
    }  # fmt: skip
