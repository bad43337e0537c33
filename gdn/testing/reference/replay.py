"""Decode over a checkpoint and a ring of updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gdn.testing.reference.projection import log_decay
from gdn.testing.reference.recurrence import Tokens
from gdn.testing.reference.recurrence import real_requests
from gdn.testing.reference.recurrence import result_like
from gdn.testing.reference.recurrence import split_packed

if TYPE_CHECKING:
    from torch import Tensor


def replay_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
    cache_indices: Tensor, replayssm_d: Tensor, replayssm_k: Tensor, replayssm_g: Tensor, replayssm_write_pos: Tensor,
    replayssm_force_flush: Tensor | None = None, num_v_heads: int | None = None, head_v_dim: int | None = None,
    scale: float | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `gdn.ops.ReplayDecode`: rebuild the live state, step it, then append the update or store the state."""
    q, k, v = split_packed(mixed_qkv, ssm_states)
    ratio = v.shape[1] // k.shape[1]
    g = log_decay(A_log, a, dt_bias)
    tokens = Tokens(q, k, v, g, torch.sigmoid(b.double()), scale)
    out = result_like(v.unsqueeze(0), out)
    window = replayssm_d.shape[2]
    for row, slot in real_requests(cache_indices, ssm_states.shape[0]):
        position = min(max(int(replayssm_write_pos[row]), 0), window - 1)
        live = ssm_states[slot].double()
        for entry in range(position):
            live = live * replayssm_g[slot, :, entry].double().exp()[:, None, None]
            key = replayssm_k[slot, :, entry].double().repeat_interleave(ratio, dim=0)
            live = live + torch.einsum("hv,hk->hvk", replayssm_d[slot, :, entry].double(), key)
        decayed = live * tokens.decay[row, :, None, None]
        update = tokens.beta[row, :, None] * (tokens.v[row] - torch.einsum("hvk,hk->hv", decayed, tokens.k[row]))
        live, out[0, row] = tokens.step(live, row)
        forced = replayssm_force_flush is not None and int(replayssm_force_flush[row]) != 0
        if position == window - 1 or forced:
            ssm_states[slot] = live
        else:
            replayssm_d[slot, :, position] = update
            replayssm_k[slot, :, position] = tokens.k[row, ::ratio]
            replayssm_g[slot, :, position] = g[row]
    return out
