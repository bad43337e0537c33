"""Verify, chains only: drafts laid out densely, states kept in scratch and moved to the rows that the caller names.

The library stores the state after draft t of request n at `[n, t]` of its buffer, for every n and t. The caller names
the buffer's rows, may name none, and owns what lies beyond a request's length; so the library gets a buffer of ours.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from typing import NamedTuple

import torch

from gdn._arguments import refuse
from gdn.backends.flashinfer import library
from gdn.backends.flashinfer.accepted import Accepted
from gdn.backends.flashinfer.chains import Chains
from gdn.backends.flashinfer.chains import Run
from gdn.backends.flashinfer.chains import fp32_run
from gdn.backends.flashinfer.chains import half_run
from gdn.backends.flashinfer.chains import tensor_core_run
from gdn.backends.flashinfer.launched import check_kernels
from gdn.backends.flashinfer.layout import check_pool_address
from gdn.backends.flashinfer.layout import parameter
from gdn.backends.flashinfer.rows import spread
from gdn.backends.flashinfer.rows import store_drafts
from gdn.backends.flashinfer.staging import drafts
from gdn.signature import planned
from gdn.validation import check_verify

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import Verify


class Plan(NamedTuple):
    """What one signature needs."""

    usable: int
    steps: int
    """Drafts of the dense batch, at least two: with one the library would take its decode kernel, which updates."""
    nobody: bool


def factory(context: BindContext) -> Verify:
    """By the library's public functions."""
    if context.state.dtype == "float32":
        mtp = library.function("gdn_decode:gated_delta_rule_mtp", kernel=library.FP32_VERIFY_KERNEL)
        return _bound(context, fp32_run(mtp), fp32_run(mtp))
    stored = _half(context)
    return _bound(context, stored, stored)


def tensor_core_factory(context: BindContext) -> Verify:
    """Without a buffer by the tensor-core kernel that the public functions don't reach."""
    hidden = library.function("gdn_kernels:gated_delta_rule_mtp_wy_output_only")
    return _bound(context, _half(context), tensor_core_run(hidden))


def _half(context: BindContext) -> Run:
    name = "gdn_decode:gated_delta_rule_decode_pretranspose"
    return half_run(library.function(name, kernel=library.BF16_KERNELS))


def _bound(context: BindContext, with_buffer: Run, without_buffer: Run) -> Verify:
    check_kernels()
    most = context.row.max_draft_tokens
    plans = planned(partial(_plan, Accepted.of(context), most))

    def verify(
        A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, ssm_states: Tensor,
        cache_indices: Tensor, query_start_loc: Tensor, intermediate_states_buffer: Tensor | None,
        intermediate_state_indices: Tensor | None, cache_steps: int, retrieve_parent_token: Tensor | None = None,
        scale: float | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `gdn.ops.Verify`. Rows of drafts beyond `cache_steps` are zeros."""
        buffer = intermediate_states_buffer
        plan = plans(
            A_log, dt_bias, q, k, v, a, b, ssm_states, cache_indices, query_start_loc, buffer,
            intermediate_state_indices, cache_steps, retrieve_parent_token, out,
        )  # fmt: skip
        check_pool_address(ssm_states)
        if out is None:
            out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        if plan.nobody:
            return out.zero_()
        laid = drafts(q[0], k[0], v[0], a, b, query_start_loc, cache_indices, plan.steps, plan.usable)
        chains = Chains(laid, parameter(A_log), parameter(dt_bias), ssm_states, scale)
        states = None
        if buffer is not None:
            states = ssm_states.new_empty((*laid.v.shape[:2], *ssm_states.shape[1:]))
        given = (without_buffer if buffer is None else with_buffer)(chains, states)
        where = query_start_loc, cache_indices
        if buffer is not None and states is not None and intermediate_state_indices is not None:
            store_drafts(states, *where, intermediate_state_indices, cache_steps, plan.usable, buffer)
        spread(given, *where, cache_steps, plan.usable, out[0])
        return out

    return verify


def _plan(
    accepted: Accepted, most: int | None, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor,
    b: Tensor, ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, buffer: Tensor | None,
    buffer_rows: Tensor | None, cache_steps: int, parents: Tensor | None, out: Tensor | None,
) -> Plan:  # fmt: skip
    check_verify(
        A_log, dt_bias, q, k, v, a, b, ssm_states, cache_indices, query_start_loc, buffer, buffer_rows, cache_steps,
        parents, out,
    )  # fmt: skip
    accepted.check(v, ssm_states, a, b)
    if parents is not None:
        refuse("retrieve_parent_token", "None: this backend verifies chains", "a tensor")
    if most is not None and cache_steps > most:
        refuse("cache_steps", f"at most {most}, as the row declares", str(cache_steps))
    usable = ssm_states.shape[0]
    return Plan(usable, max(cache_steps, 2), usable == 0 or 0 in (cache_indices.shape[0], v.shape[1]))
