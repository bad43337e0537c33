"""Verify: draft tokens of each request, a chain or a tree, without touching the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gdn.backends.cpu.native.library import Plan
from gdn.backends.cpu.native.library import address
from gdn.backends.cpu.native.library import check_on_cpu
from gdn.backends.cpu.native.library import make_plan
from gdn.backends.cpu.native.library import native
from gdn.backends.cpu.native.structures import ARGUMENTS
from gdn.backends.cpu.native.structures import Heads
from gdn.backends.cpu.native.structures import VerifyPlan
from gdn.backends.cpu.native.structures import view
from gdn.backends.cpu.rows import token_spans
from gdn.errors import InputError
from gdn.signature import planned
from gdn.validation import check_verify

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import Verify

_pack = ARGUMENTS["verify"][1].pack
_threads = torch.get_num_threads


def factory(context: BindContext) -> Verify:
    """One native function serves chains and trees of every config."""
    run, plans = native("verify"), planned(_plan)

    def verify(
        A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, ssm_states: Tensor,
        cache_indices: Tensor, query_start_loc: Tensor, intermediate_states_buffer: Tensor | None,
        intermediate_state_indices: Tensor | None, cache_steps: int, retrieve_parent_token: Tensor | None = None,
        scale: float | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `gdn.ops.Verify`.

        Raises:
            InputError: also where a request has more than `cache_steps` tokens, which only the host's values can tell.
        """
        plan = plans(
            A_log, dt_bias, q, k, v, a, b, ssm_states, cache_indices, query_start_loc, intermediate_states_buffer,
            intermediate_state_indices, cache_steps, retrieve_parent_token, out,
        )  # fmt: skip
        if out is None:
            out = torch.empty(plan.shape, dtype=plan.dtype, device="cpu")
        call = _pack(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), a.data_ptr(), b.data_ptr(), A_log.data_ptr(), dt_bias.data_ptr(),
            ssm_states.data_ptr(), cache_indices.data_ptr(), query_start_loc.data_ptr(),
            address(intermediate_states_buffer), address(intermediate_state_indices), address(retrieve_parent_token),
            out.data_ptr(), plan.scale if scale is None else scale, _threads(),
        )  # fmt: skip
        if run(plan.address, call):
            _explain_offsets(query_start_loc, v.shape[1], cache_steps)
        return out

    return verify


def _explain_offsets(query_start_loc: Tensor, tokens: int, cache_steps: int) -> None:
    spans = token_spans(query_start_loc, tokens)
    longest = max(end - begin for begin, end in spans)
    raise InputError(f"query_start_loc: expected lengths of at most cache_steps={cache_steps}, got {longest}")


def _plan(
    A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, ssm_states: Tensor,
    cache_indices: Tensor, query_start_loc: Tensor, buffer: Tensor | None, buffer_rows: Tensor | None,
    cache_steps: int, parents: Tensor | None, out: Tensor | None,
) -> Plan:  # fmt: skip
    check_verify(
        A_log, dt_bias, q, k, v, a, b, ssm_states, cache_indices, query_start_loc, buffer, buffer_rows, cache_steps,
        parents, out,
    )  # fmt: skip
    check_on_cpu("q", q)
    _, tokens, value_heads, value_dim = v.shape
    memory = VerifyPlan(
        tokens=tokens, requests=cache_indices.shape[0], slots=ssm_states.shape[0],
        rows=0 if buffer is None else buffer.shape[0], steps=cache_steps, has_buffer=buffer is not None,
        has_parents=parents is not None, parent_columns=0 if parents is None else parents.shape[1],
        heads=Heads(q.shape[2], value_heads, q.shape[3], value_dim),
        q=view(q, 1, 2, 3), k=view(k, 1, 2, 3), v=view(v, 1, 2, 3), a=view(a), b=view(b), A_log=view(A_log),
        dt_bias=view(dt_bias), state=view(ssm_states), index=view(cache_indices), offsets=view(query_start_loc),
        buffer=view(buffer, 0, 1), buffer_row=view(buffer_rows), parents=view(parents),
    )  # fmt: skip
    return make_plan(memory, tuple(v.shape), v.dtype, q.shape[3] ** -0.5)
