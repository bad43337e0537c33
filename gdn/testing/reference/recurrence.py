"""Decode, extend and verify: the recurrence of `gdn.ops`, token by token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import torch

from gdn.ops import ExtendResult
from gdn.testing.reference.projection import log_decay
from gdn.testing.reference.projection import normalised
from gdn.testing.reference.projection import split_rows
from gdn.types import CHUNK

if TYPE_CHECKING:
    from torch import Tensor


class Tokens:
    """Normalised q and k (one per value head), v, g and beta of packed tokens, all fp64."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None) -> None:
        ratio = v.shape[1] // k.shape[1]
        scale = k.shape[2] ** -0.5 if scale is None else scale
        self.q = (normalised(q) * scale).repeat_interleave(ratio, dim=1)
        self.k = normalised(k).repeat_interleave(ratio, dim=1)
        self.v, self.decay, self.beta = v.double(), g.double().exp(), beta.double()

    def step(self, state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """The state `[HV, V, K]` after the token, and its output `[HV, V]`."""
        state = torch.where(self.decay[token, :, None, None] == 0, 0.0, state * self.decay[token, :, None, None])
        error = self.v[token] - torch.einsum("hvk,hk->hv", state, self.k[token])
        state = state + torch.einsum("hv,hk->hvk", self.beta[token, :, None] * error, self.k[token])
        return state, torch.einsum("hvk,hk->hv", state, self.q[token])


def real_requests(indices: Tensor, slots: int) -> Iterator[tuple[int, int]]:
    """Request and slot of every request whose slot exists."""
    for request, slot in enumerate(indices.tolist()):
        if 0 <= slot < slots:
            yield request, slot


def result_like(v: Tensor, out: Tensor | None) -> Tensor:
    result = torch.zeros(v.shape, dtype=torch.float64) if out is None else out
    return result.zero_()


def decode(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
    cache_indices: Tensor, query_start_loc: Tensor | None = None, scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `gdn.ops.Decode`."""
    tokens = Tokens(q[0], k[0], v[0], log_decay(A_log, a, dt_bias), torch.sigmoid(b.double()), scale)
    out = result_like(v, out)
    offsets = list(range(v.shape[1] + 1)) if query_start_loc is None else query_start_loc.tolist()
    for request, slot in real_requests(cache_indices, ssm_states.shape[0]):
        for token in range(offsets[request], offsets[request + 1]):
            state, out[0, token] = tokens.step(ssm_states[slot].double(), token)
            ssm_states[slot] = state
    return out


def packed_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
    cache_indices: Tensor, num_v_heads: int | None = None, head_v_dim: int | None = None, scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `gdn.ops.PackedDecode`."""
    q, k, v = split_packed(mixed_qkv, ssm_states)
    return decode(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=ssm_states,
        cache_indices=cache_indices, scale=scale, out=out,
    )  # fmt: skip


def split_packed(mixed_qkv: Tensor, ssm_states: Tensor) -> list[Tensor]:
    """q, k, v of packed rows; HK is what the row's width leaves."""
    _, value_heads, value_dim, key_dim = ssm_states.shape
    key_heads = (mixed_qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
    return split_rows(mixed_qkv, key_heads, key_dim, value_heads, value_dim)


def extend(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor, cache_indices: Tensor,
    query_start_loc: Tensor, scale: float | None = None, out: Tensor | None = None, return_chunk_states: bool = False,
    snapshot_chunks: Tensor | None = None, snapshot_slots: Tensor | None = None,
    seq_lens_cpu: Sequence[int] | None = None,
) -> ExtendResult:  # fmt: skip
    """See `gdn.ops.Extend`."""
    tokens = Tokens(q[0], k[0], v[0], g[0], beta[0], scale)
    out = result_like(v, out)
    offsets = query_start_loc.tolist()
    spans = list(itertools.pairwise(offsets))
    entering: list[list[Tensor]] = [
        [torch.zeros(ssm_states.shape[1:], dtype=torch.float64)] * -(-(end - begin) // CHUNK) for begin, end in spans
    ]
    for request, slot in real_requests(cache_indices, ssm_states.shape[0]):
        begin, end = spans[request]
        state = ssm_states[slot].to(torch.float64, copy=True)
        boundaries = []
        for token in range(begin, end):
            if (token - begin) % CHUNK == 0:
                boundaries.append(state)
            state, out[0, token] = tokens.step(state, token)
        if begin < end:
            ssm_states[slot] = state
        entering[request] = boundaries
        _store_snapshot(request, [*boundaries, state], snapshot_chunks, snapshot_slots, ssm_states)
    if not return_chunk_states:
        return ExtendResult(out)
    flat = [state for states in entering for state in states]
    empty = torch.zeros((0, *ssm_states.shape[1:]), dtype=torch.float64)
    return ExtendResult(out, None, (torch.stack(flat) if flat else empty).unsqueeze(0))


def _store_snapshot(request: int, states: list[Tensor], chunks: Any, slots: Any, ssm_states: Tensor) -> None:
    if chunks is None or slots is None:
        return
    chunk, slot = int(chunks[request]), int(slots[request])
    if 0 <= chunk < len(states) and 0 <= slot < ssm_states.shape[0]:
        ssm_states[slot] = states[chunk]


def verify(
    A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, ssm_states: Tensor,
    cache_indices: Tensor, query_start_loc: Tensor, intermediate_states_buffer: Tensor | None,
    intermediate_state_indices: Tensor | None, cache_steps: int, retrieve_parent_token: Tensor | None = None,
    scale: float | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `gdn.ops.Verify`."""
    tokens = Tokens(q[0], k[0], v[0], log_decay(A_log, a, dt_bias), torch.sigmoid(b.double()), scale)
    out = result_like(v, out)
    offsets = query_start_loc.tolist()
    for request, slot in real_requests(cache_indices, ssm_states.shape[0]):
        begin, end = offsets[request], offsets[request + 1]
        row = -1 if intermediate_state_indices is None else int(intermediate_state_indices[request])
        nodes: list[Tensor] = []
        for draft in range(end - begin):
            parent = draft - 1
            if retrieve_parent_token is not None and draft:
                named = int(retrieve_parent_token[request, draft])
                parent = named if 0 <= named < draft else 0
            before = nodes[parent] if draft else ssm_states[slot].double()
            state, out[0, begin + draft] = tokens.step(before, begin + draft)
            nodes.append(state)
            if intermediate_states_buffer is not None and 0 <= row < intermediate_states_buffer.shape[0]:
                intermediate_states_buffer[row, draft] = state
    return out
