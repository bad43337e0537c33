"""Extend: chunked prefill in place in the pool, with states at chunk boundaries where they are asked for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from typing import NamedTuple

import torch

from gdn.backends.flashinfer import library
from gdn.backends.flashinfer.accepted import Accepted
from gdn.backends.flashinfer.boundaries import Boundaries
from gdn.backends.flashinfer.context_parallel import USE_CP
from gdn.backends.flashinfer.launched import check_kernels
from gdn.backends.flashinfer.layout import check_pool_address
from gdn.backends.flashinfer.layout import dense
from gdn.backends.flashinfer.rows import silence
from gdn.backends.flashinfer.staging import prefill_inputs
from gdn.ops import ExtendResult
from gdn.signature import planned
from gdn.validation import check_extend
from gdn.validation import check_seq_lens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import Extend


class Plan(NamedTuple):
    """What one signature needs."""

    scale: float
    nobody: bool


def factory(context: BindContext) -> Extend:
    """Gates go in linear and keys of length one: the library's log domain and its norm are passes of their own before
    the same kernel, which one pass of ours replaces.
    """
    check_kernels()
    prefill = library.function("gdn_prefill:chunk_gated_delta_rule")
    plans = planned(partial(_plan, Accepted.of(context)))

    def extend(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor, cache_indices: Tensor,
        query_start_loc: Tensor, scale: float | None = None, out: Tensor | None = None,
        return_chunk_states: bool = False, snapshot_chunks: Tensor | None = None, snapshot_slots: Tensor | None = None,
        seq_lens_cpu: Sequence[int] | None = None,
    ) -> ExtendResult:  # fmt: skip
        """See `gdn.ops.Extend`. A decay below 1e-10 of one token counts as 1e-10: the kernel clamps it there."""
        pool = ssm_states
        plan = plans(
            q, k, v, g, beta, pool, cache_indices, query_start_loc, out, snapshot_chunks, snapshot_slots,
        )  # fmt: skip
        check_seq_lens(seq_lens_cpu, query_start_loc)
        check_pool_address(pool)
        if out is None:
            out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        boundaries = Boundaries(
            pool, cache_indices, query_start_loc, v.shape[1], chunk_states=return_chunk_states, lengths=seq_lens_cpu,
            snapshot_chunks=snapshot_chunks, snapshot_slots=snapshot_slots,
        )  # fmt: skip
        if plan.nobody:
            return ExtendResult(out.zero_(), None, boundaries.finish(pool))
        given = prefill_inputs(q[0], k[0], g[0], cache_indices, pool.shape[0])
        target = dense(out[0])
        prefill(
            given.q, given.k, dense(v[0]), given.decay, dense(beta[0]),
            scale=plan.scale if scale is None else scale, initial_state=pool, output_final_state=True,
            cu_seqlens=dense(query_start_loc), use_qk_l2norm_in_kernel=False, output=target, output_state=pool,
            use_cp=USE_CP, state_indices=given.slots, output_state_indices=given.slots, backend="flashinfer",
            **boundaries.arguments,
        )  # fmt: skip
        if scale == 0.0:  # which the library takes for its default
            target.zero_()
        silence(target, query_start_loc, cache_indices, pool.shape[0])
        if target.data_ptr() != out.data_ptr():
            out[0].copy_(target)
        return ExtendResult(out, None, boundaries.finish(pool))

    return extend


def _plan(
    accepted: Accepted, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ssm_states: Tensor,
    cache_indices: Tensor, query_start_loc: Tensor, out: Tensor | None, snapshot_chunks: Tensor | None,
    snapshot_slots: Tensor | None,
) -> Plan:  # fmt: skip
    check_extend(q, k, v, g, beta, ssm_states, cache_indices, query_start_loc, out, snapshot_chunks, snapshot_slots)
    accepted.check(v, ssm_states)
    return Plan(ssm_states.shape[3] ** -0.5, 0 in (ssm_states.shape[0], cache_indices.shape[0], v.shape[1]))
