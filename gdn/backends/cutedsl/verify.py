"""Verify: the draft tokens of each request, a chain or a tree, without touching the pool."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from gdn.backends.cutedsl import compiled
from gdn.backends.cutedsl._plan import Plan
from gdn.backends.cutedsl._plan import output_argument
from gdn.backends.cutedsl._plan import state_argument
from gdn.backends.cutedsl._verify_kernel import VerifyKernel
from gdn.backends.cutedsl.compiled import Argument
from gdn.backends.cutedsl.compiled import architecture_of
from gdn.backends.cutedsl.tuning import VERIFY
from gdn.backends.cutedsl.tuning import block_of
from gdn.errors import InputError
from gdn.signature import planned
from gdn.validation import check_verify

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import Verify

MOST_DRAFTS = 16
"""Of one request."""


def factory(context: BindContext) -> Verify:
    """One block size for every batch where the config asks for equal bits, else the fastest."""
    plans = planned(partial(plan, context.config.deterministic, context.device.sm))

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
        if plan.function is None:
            return out.zero_()
        # A compiled kernel takes tensors in every place; it ignores those that stand for what isn't there.
        absent = intermediate_states_buffer is None
        plan.function(
            q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, query_start_loc,
            ssm_states if absent else intermediate_states_buffer,
            cache_indices if absent else intermediate_state_indices,
            cache_indices if retrieve_parent_token is None else retrieve_parent_token,
            out, plan.scale if scale is None else scale,
        )  # fmt: skip
        return out

    return verify


def plan(
    fixed: bool, sm: int, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, buffer: Tensor | None,
    buffer_rows: Tensor | None, cache_steps: int, parents: Tensor | None, out: Tensor | None,
) -> Plan:  # fmt: skip
    """Compiles where need be."""
    check_verify(
        A_log, dt_bias, q, k, v, a, b, ssm_states, cache_indices, query_start_loc, buffer, buffer_rows, cache_steps,
        parents, out,
    )  # fmt: skip
    if cache_steps > MOST_DRAFTS:
        raise InputError(f"cache_steps: expected at most {MOST_DRAFTS}, got {cache_steps}")
    HK, K = k.shape[2:]
    HV, V = v.shape[2:]
    requests, tokens = cache_indices.shape[0], v.shape[1]
    shape = (1, tokens, HV, V)
    if requests == 0:
        return Plan(None, shape, v.dtype, v.device, K**-0.5)
    size = ssm_states.element_size()
    block = block_of(VERIFY[size], None if fixed else requests * HV)
    kernel = VerifyKernel(
        HK, HV, K, V, cache_steps, size, ssm_states.dtype == v.dtype, block.warps, block.depth,
        buffer is not None, parents is not None,
    )  # fmt: skip
    line = Argument.any_strides(cache_indices, (None,))
    arguments = (
        *(Argument.any_strides(x, (1, None, *x.shape[2:])) for x in (q, k, v)),
        *(Argument.any_strides(x, (None, HV)) for x in (a, b)),
        *(Argument.any_strides(x, (HV,)) for x in (A_log, dt_bias)),
        state_argument(ssm_states), line, Argument.any_strides(query_start_loc, (None,)),
        state_argument(ssm_states) if buffer is None else state_argument(buffer, leading=2),
        line if buffer is None else Argument.any_strides(buffer_rows, (None,)),
        line if parents is None else Argument.any_strides(parents, (None, None)),
        output_argument(v.dtype, HV, V),
    )  # fmt: skip
    return Plan(compiled.function_of(kernel, arguments, architecture_of(sm)), shape, v.dtype, v.device, K**-0.5)
