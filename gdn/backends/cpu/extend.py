"""Extend: chunked prefill, one sequence after another, every chunk in cache-sized matrix products over all heads.

A sequence's chunks have the same shapes whatever else is in the call, so its bits don't depend on the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gdn.backends.cpu.chunk_step import advance_chunk
from gdn.backends.cpu.rows import PADDED
from gdn.backends.cpu.rows import host_indices
from gdn.backends.cpu.rows import token_spans
from gdn.backends.cpu.rows import zero_other_rows
from gdn.ops import ExtendResult
from gdn.signature import validated
from gdn.types import CHUNK
from gdn.validation import check_extend
from gdn.validation import check_seq_lens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import Extend

_check = validated(check_extend)


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
    return_chunk_states: bool = False,
    snapshot_chunks: Tensor | None = None,
    snapshot_slots: Tensor | None = None,
    seq_lens_cpu: Sequence[int] | None = None,
) -> ExtendResult:
    """See `gdn.ops.Extend`."""
    _check(q, k, v, g, beta, ssm_states, cache_indices, query_start_loc, out, snapshot_chunks, snapshot_slots)
    check_seq_lens(seq_lens_cpu, query_start_loc)
    spans = token_spans(query_start_loc, v.shape[1])
    slots = host_indices(cache_indices, ssm_states.shape[0])
    snapshots = _snapshot_plan(snapshot_chunks, snapshot_slots, ssm_states)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    zero_other_rows(out[0], (span for span, slot in zip(spans, slots, strict=True) if slot != PADDED))

    chunk_counts = [-(-(end - begin) // CHUNK) for begin, end in spans]
    chunk_states = ssm_states.new_zeros((1, sum(chunk_counts), *ssm_states.shape[1:])) if return_chunk_states else None
    first_chunk = 0
    for sequence, ((begin, end), slot, chunks) in enumerate(zip(spans, slots, chunk_counts, strict=True)):
        if slot != PADDED:
            stored = ssm_states[slot]
            state = stored.to(torch.float32)
            snapshot_at, snapshot = snapshots.get(sequence, (-1, None))
            for chunk in range(chunks):
                if chunk_states is not None:
                    chunk_states[0, first_chunk + chunk].copy_(state)
                if snapshot is not None and chunk == snapshot_at:
                    snapshot.copy_(state)
                rows = slice(begin + chunk * CHUNK, min(begin + (chunk + 1) * CHUNK, end))
                output = advance_chunk(state, q[0, rows], k[0, rows], v[0, rows], g[0, rows], beta[0, rows], scale)
                out[0, rows].copy_(output.transpose(0, 1))
            if snapshot is not None and chunks == snapshot_at:
                snapshot.copy_(state)
            if state is not stored and chunks:
                stored.copy_(state)
        first_chunk += chunks
    return ExtendResult(out, None, chunk_states)


def _snapshot_plan(
    snapshot_chunks: Tensor | None, snapshot_slots: Tensor | None, ssm_states: Tensor
) -> dict[int, tuple[int, Tensor]]:
    """Chunk index and destination of every sequence that asks for a snapshot."""
    if snapshot_chunks is None or snapshot_slots is None:
        return {}
    slots = host_indices(snapshot_slots, ssm_states.shape[0])
    return {
        sequence: (chunk, ssm_states[slot])
        for sequence, (chunk, slot) in enumerate(zip(snapshot_chunks.tolist(), slots, strict=True))
        if chunk >= 0 and slot != PADDED
    }


def factory(context: BindContext) -> Extend:
    """Extend serves every config alike."""
    return extend
