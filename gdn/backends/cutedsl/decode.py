"""Decode: one token per request, over separate or packed q, k and v."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from gdn.backends.cutedsl import compiled
from gdn.backends.cutedsl._decode_kernel import DecodeKernel
from gdn.backends.cutedsl._plan import Plan
from gdn.backends.cutedsl._plan import output_argument
from gdn.backends.cutedsl._plan import state_argument
from gdn.backends.cutedsl.compiled import Argument
from gdn.backends.cutedsl.compiled import architecture_of
from gdn.backends.cutedsl.tuning import DECODE
from gdn.backends.cutedsl.tuning import block_of
from gdn.signature import planned
from gdn.validation import check_decode
from gdn.validation import check_packed_decode

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import Decode
    from gdn.ops import PackedDecode


def factory(context: BindContext) -> Decode:
    """One block size for every batch where the config asks for equal bits, else the fastest."""
    plans = planned(partial(plan, context.config.deterministic, context.device.sm))

    def decode(
        q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
        cache_indices: Tensor, query_start_loc: Tensor | None = None, scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `gdn.ops.Decode`."""
        plan = plans(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, out)
        if out is None:
            out = torch.empty(plan.shape, dtype=plan.dtype, device=plan.device)
        if query_start_loc is not None:
            out.zero_()
        if plan.function is not None:
            offsets = cache_indices if query_start_loc is None else query_start_loc
            scale = plan.scale if scale is None else scale
            plan.function(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, offsets, out, scale)
        return out

    return decode


def packed_factory(context: BindContext) -> PackedDecode:
    """See `factory`."""
    plans = planned(partial(packed_plan, context.config.deterministic, context.device.sm))

    def packed_decode(
        mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
        cache_indices: Tensor, num_v_heads: int | None = None, head_v_dim: int | None = None,
        scale: float | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `gdn.ops.PackedDecode`."""
        plan = plans(mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, num_v_heads, head_v_dim, out)
        if out is None:
            out = torch.empty(plan.shape, dtype=plan.dtype, device=plan.device)
        if plan.function is not None:
            scale = plan.scale if scale is None else scale
            plan.function(
                mixed_qkv, mixed_qkv, mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, cache_indices, out,
                scale,
            )  # fmt: skip
        return out

    return packed_decode


def plan(
    fixed: bool, sm: int, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor | None, out: Tensor | None,
) -> Plan:  # fmt: skip
    """Compiles where need be."""
    check_decode(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, out)
    HK, K = q.shape[2:]
    HV, V = v.shape[2:]
    tokens = [Argument.any_strides(x, (1, None, *x.shape[2:])) for x in (q, k, v)]
    unit = q.stride(3) == k.stride(3) == 1
    offsets = cache_indices if query_start_loc is None else query_start_loc
    constants = {"packed": False, "has_offsets": query_start_loc is not None, "unit": unit}
    return _planned_for(
        fixed, sm, (HK, HV, K, V), v.shape[1], tokens, a, b, A_log, dt_bias, ssm_states, cache_indices, offsets,
        constants,
    )  # fmt: skip


def packed_plan(
    fixed: bool, sm: int, mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
    cache_indices: Tensor, num_v_heads: int | None, head_v_dim: int | None, out: Tensor | None,
) -> Plan:  # fmt: skip
    """Compiles where need be."""
    check_packed_decode(
        mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, num_v_heads, head_v_dim, out
    )  # fmt: skip
    rows, dim = mixed_qkv.shape
    _, HV, V, K = ssm_states.shape
    HK = (dim - HV * V) // (2 * K)
    tokens = [Argument.any_strides(mixed_qkv, (None, dim))] * 3
    constants = {"packed": True, "has_offsets": False, "unit": mixed_qkv.stride(1) == 1}
    return _planned_for(
        fixed, sm, (HK, HV, K, V), rows, tokens, a, b, A_log, dt_bias, ssm_states, cache_indices, cache_indices,
        constants,
    )  # fmt: skip


def _planned_for(
    fixed: bool, sm: int, heads: tuple[int, int, int, int], rows: int, tokens: list[Argument], a: Tensor, b: Tensor,
    A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor, cache_indices: Tensor, offsets: Tensor,
    constants: dict[str, bool],
) -> Plan:  # fmt: skip
    HK, HV, K, V = heads
    requests, size = cache_indices.shape[0], ssm_states.element_size()
    block = block_of(DECODE[size], None if fixed else requests * HV)
    # A lane keeps the value and the output of one row of its group: no more rounds than lanes.
    rounds = min(block.depth, K * size // 16, 32)
    kernel = DecodeKernel(HK, HV, K, V, size, block.warps, rounds, **constants)
    function = None
    if requests > 0:
        arguments = (
            *tokens, Argument.any_strides(a, (None, HV)), Argument.any_strides(b, (None, HV)),
            Argument.any_strides(A_log, (HV,)), Argument.any_strides(dt_bias, (HV,)), state_argument(ssm_states),
            Argument.any_strides(cache_indices, (None,)), Argument.any_strides(offsets, (None,)),
            output_argument(tokens[0].dtype, HV, V),
        )  # fmt: skip
        function = compiled.function_of(kernel, arguments, architecture_of(sm))
    return Plan(function, (1, rows, HV, V), tokens[0].dtype, ssm_states.device, K**-0.5)
