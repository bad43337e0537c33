"""Extend: chunked prefill. A sequence's bits don't depend on the batch or on the number of threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gdn.backends.cpu.native.library import Plan
from gdn.backends.cpu.native.library import address
from gdn.backends.cpu.native.library import check_on_cpu
from gdn.backends.cpu.native.library import make_plan
from gdn.backends.cpu.native.library import native
from gdn.backends.cpu.native.structures import ARGUMENTS
from gdn.backends.cpu.native.structures import ExtendPlan
from gdn.backends.cpu.native.structures import Heads
from gdn.backends.cpu.native.structures import view
from gdn.backends.cpu.rows import token_spans
from gdn.ops import ExtendResult
from gdn.signature import planned
from gdn.types import CHUNK
from gdn.validation import check_extend
from gdn.validation import check_seq_lens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import Extend

_pack = ARGUMENTS["extend"][1].pack
_threads = torch.get_num_threads


def factory(context: BindContext) -> Extend:
    """One native function serves every config."""
    run, plans = native("extend"), planned(_plan)

    def extend(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor, cache_indices: Tensor,
        query_start_loc: Tensor, scale: float | None = None, out: Tensor | None = None,
        return_chunk_states: bool = False, snapshot_chunks: Tensor | None = None,
        snapshot_slots: Tensor | None = None, seq_lens_cpu: Sequence[int] | None = None,
    ) -> ExtendResult:  # fmt: skip
        """See `gdn.ops.Extend`."""
        plan = plans(q, k, v, g, beta, ssm_states, cache_indices, query_start_loc, out, snapshot_chunks, snapshot_slots)
        check_seq_lens(seq_lens_cpu, query_start_loc)
        if out is None:
            out = torch.empty(plan.shape, dtype=plan.dtype, device="cpu")
        chunk_states = None
        if return_chunk_states:
            spans = token_spans(query_start_loc, v.shape[1])
            chunks = sum(-(-(end - begin) // CHUNK) for begin, end in spans)
            chunk_states = ssm_states.new_zeros((1, chunks, *ssm_states.shape[1:]))
        call = _pack(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr(), ssm_states.data_ptr(),
            cache_indices.data_ptr(), query_start_loc.data_ptr(), address(snapshot_chunks), address(snapshot_slots),
            address(chunk_states), out.data_ptr(), plan.scale if scale is None else scale, _threads(),
        )  # fmt: skip
        if run(plan.address, call):
            token_spans(query_start_loc, v.shape[1])
        return ExtendResult(out, None, chunk_states)

    return extend


def _plan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ssm_states: Tensor, cache_indices: Tensor,
    query_start_loc: Tensor, out: Tensor | None, snapshot_chunks: Tensor | None, snapshot_slots: Tensor | None,
) -> Plan:  # fmt: skip
    check_extend(q, k, v, g, beta, ssm_states, cache_indices, query_start_loc, out, snapshot_chunks, snapshot_slots)
    check_on_cpu("q", q)
    _, tokens, value_heads, value_dim = v.shape
    memory = ExtendPlan(
        tokens=tokens, requests=cache_indices.shape[0], slots=ssm_states.shape[0],
        has_snapshots=snapshot_chunks is not None, heads=Heads(q.shape[2], value_heads, q.shape[3], value_dim),
        q=view(q, 1, 2, 3), k=view(k, 1, 2, 3), v=view(v, 1, 2, 3), g=view(g, 1, 2), beta=view(beta, 1, 2),
        state=view(ssm_states), index=view(cache_indices), offsets=view(query_start_loc),
        snapshot_chunk=view(snapshot_chunks), snapshot_slot=view(snapshot_slots),
    )  # fmt: skip
    return make_plan(memory, tuple(v.shape), v.dtype, q.shape[3] ** -0.5)
