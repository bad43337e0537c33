"""Verify: draft tokens of each request, a chain or a tree, without touching the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gdn.backends.cpu.rows import PADDED
from gdn.backends.cpu.rows import host_indices
from gdn.backends.cpu.rows import token_spans
from gdn.backends.cpu.rows import zero_other_rows
from gdn.backends.cpu.token_step import advance
from gdn.backends.cpu.token_step import prepare_tokens
from gdn.errors import InputError
from gdn.signature import validated
from gdn.validation import check_verify

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import Verify

_check = validated(check_verify)


def verify(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    intermediate_states_buffer: Tensor | None,
    intermediate_state_indices: Tensor | None,
    cache_steps: int,
    retrieve_parent_token: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `gdn.ops.Verify`.

    Raises:
        InputError: also where a request has more than `cache_steps` tokens, which only the host's values can tell.
    """
    _check(
        A_log, dt_bias, q, k, v, a, b, ssm_states, cache_indices, query_start_loc, intermediate_states_buffer,
        intermediate_state_indices, cache_steps, retrieve_parent_token, out,
    )  # fmt: skip
    spans = token_spans(query_start_loc, v.shape[1])
    if longest := max((end - begin for begin, end in spans if end - begin > cache_steps), default=0):
        raise InputError(f"query_start_loc: expected lengths of at most cache_steps={cache_steps}, got {longest}")
    slots = host_indices(cache_indices, ssm_states.shape[0])
    snapshots = _snapshot_rows(intermediate_states_buffer, intermediate_state_indices, len(spans))
    parents = None if retrieve_parent_token is None else retrieve_parent_token.tolist()
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)

    tokens = prepare_tokens(q[0], k[0], v[0], a, b, A_log, dt_bias, scale)
    parts = (tokens.alpha, tokens.readers, tokens.results, tokens.keys)
    for request, ((begin, end), slot) in enumerate(zip(spans, slots, strict=True)):
        if slot == PADDED or begin == end:
            continue
        kept = snapshots[request]
        nodes = _node_states(kept, ssm_states, end - begin, chain=parents is None)
        for step, token in enumerate(range(begin, end)):
            if step == 0:
                source = ssm_states[slot].to(torch.float32)
            else:
                source = nodes[step - 1 if parents is None else _parent(parents[request], step)]
            target = nodes[step]
            advance(source, target, *(part[token] for part in parts))
            if kept is not None and kept.dtype != torch.float32:
                kept[step].copy_(target)
    out[0].copy_(tokens.output())
    zero_other_rows(out[0], (span for span, slot in zip(spans, slots, strict=True) if slot != PADDED))
    return out


def _snapshot_rows(buffer: Tensor | None, indices: Tensor | None, requests: int) -> list[Tensor | None]:
    """The `[>=D, HV, V, K]` part of the buffer that each request owns, None where it owns none."""
    if buffer is None or indices is None:
        return [None] * requests
    return [None if row == PADDED else buffer[row] for row in host_indices(indices, buffer.shape[0])]


def _node_states(kept: Tensor | None, ssm_states: Tensor, steps: int, *, chain: bool) -> tuple[Tensor, ...]:
    """An fp32 state per draft: the snapshots themselves where they are fp32, else scratch (one will do for a chain)."""
    if kept is not None and kept.dtype == torch.float32:
        return kept[:steps].unbind(0)
    distinct = 1 if chain else steps
    scratch = torch.empty((distinct, *ssm_states.shape[1:]), dtype=torch.float32, device=ssm_states.device)
    return scratch.unbind(0) * steps if chain else scratch.unbind(0)


def _parent(parents: list[int], step: int) -> int:
    """A parent that isn't an earlier draft counts as the root."""
    parent = parents[step] if step < len(parents) else 0
    return parent if 0 <= parent < step else 0


def factory(context: BindContext) -> Verify:
    """One function serves chains and trees of every config."""
    return verify
