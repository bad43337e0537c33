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
from gdn.backends.flashinfer.layout import check_pool_address
from gdn.backends.flashinfer.layout import parameter
from gdn.backends.flashinfer.rows import check_kernels
from gdn.backends.flashinfer.rows import silence
from gdn.backends.flashinfer.rows import store
from gdn.backends.flashinfer.slots import dense_rows
from gdn.backends.flashinfer.slots import gathered
from gdn.backends.flashinfer.slots import inside
from gdn.backends.flashinfer.slots import or_else
from gdn.backends.flashinfer.slots import owners
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
        row, own = dense_rows(query_start_loc, plan.steps, v.shape[1])
        chains = Chains(
            *(gathered(x[0], row) for x in (q, k, v)), gathered(a, row), gathered(b, row), parameter(A_log),
            parameter(dt_bias), ssm_states, or_else(cache_indices, plan.usable, 0), scale,
        )  # fmt: skip
        states = None
        if buffer is not None:
            states = ssm_states.new_empty((*row.shape, *ssm_states.shape[1:]))
        given = (without_buffer if buffer is None else with_buffer)(chains, states)
        own = own & inside(cache_indices, plan.usable)[:, None]
        own[:, cache_steps:] = False
        if buffer is not None and states is not None and intermediate_state_indices is not None:
            store(states.flatten(0, 1), _places(buffer, intermediate_state_indices, own), buffer)
        _spread(given, query_start_loc, cache_indices, cache_steps, plan, out)
        return out

    return verify


def _places(buffer: Tensor, rows: Tensor, own: Tensor) -> Tensor:
    """`[N * steps]`: where each draft's state goes, as an offset into the buffer, or -1."""
    step = torch.arange(own.shape[1], device=own.device)
    place = rows.to(torch.int64)[:, None] * buffer.stride(0) + step * buffer.stride(1)
    return torch.where(own & inside(rows, buffer.shape[0])[:, None], place, -1).flatten()


def _spread(given: Tensor, offsets: Tensor, indices: Tensor, cache_steps: int, plan: Plan, out: Tensor) -> None:
    """Dense outputs `[N, steps, HV, V]` to their packed rows; zeros where there is no draft."""
    whose = owners(offsets, out.shape[1])
    dense = whose.owner * plan.steps + whose.place.clamp(0, plan.steps - 1)
    torch.index_select(given.flatten(0, 1), 0, dense, out=out[0])
    out[0].masked_fill_((whose.place >= cache_steps).view(-1, 1, 1), 0)
    silence(out[0], offsets, indices, plan.usable)


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
