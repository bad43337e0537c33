"""Replay decode: a checkpoint state in the pool and a ring of the updates since (ReplaySSM), read without rewriting it.

With m entries in the ring, G_j the inclusive prefix sum of their log decays and G the whole sum, the state before the
token is S = e^G S0 + sum_j e^(G - G_j) d_j k_j^T, so S k and S q are products with S0 plus a few with the ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gdn.backends.cpu.chunk_step import FORGOTTEN
from gdn.backends.cpu.packed import split_heads
from gdn.backends.cpu.rows import decode_rows
from gdn.backends.cpu.token_step import PreparedTokens
from gdn.backends.cpu.token_step import prepare_tokens
from gdn.backends.cpu.token_step import repeat_heads
from gdn.signature import validated
from gdn.validation import check_replay_decode

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import ReplayDecode

_check = validated(check_replay_decode)


@dataclass(frozen=True, slots=True)
class Ring:
    """The m valid entries of one slot's ring, fp32.

    Attributes:
        updates: `[HV, m, V]`, d.
        keys: `[HV, m, K]`, normalised, repeated for the value heads.
        decays: `[HV, m]`, e^(G - G_j).
        total_decay: `[HV, 1, 1]`, e^G.
    """

    updates: Tensor
    keys: Tensor
    decays: Tensor
    total_decay: Tensor

    @classmethod
    def load(cls, d: Tensor, k: Tensor, g: Tensor, length: int) -> Ring:
        """Read one slot's `d [HV, L, V]`, `k [HK, L, K]`, `g [HV, L]`; entries past `length` are never touched."""
        value_heads = d.shape[0]
        keys = k[:, :length].to(torch.float32).flatten(1).unsqueeze(0)
        total = g[:, :length].to(torch.float64).clamp(min=FORGOTTEN).cumsum(-1)
        last = total[:, -1:] if length else total.new_zeros((value_heads, 1))
        return cls(
            updates=d[:, :length].to(torch.float32),
            keys=repeat_heads(keys, value_heads // k.shape[0]).view(value_heads, length, k.shape[2]),
            decays=(last - total).exp_().to(torch.float32),
            total_decay=last.exp().to(torch.float32).unsqueeze(-1),
        )


def replay_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    replayssm_d: Tensor,
    replayssm_k: Tensor,
    replayssm_g: Tensor,
    replayssm_write_pos: Tensor,
    replayssm_force_flush: Tensor | None = None,
    num_v_heads: int | None = None,
    head_v_dim: int | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `gdn.ops.ReplayDecode`. A write position outside the ring counts as the nearest one inside."""
    _check(
        mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, replayssm_d, replayssm_k, replayssm_g,
        replayssm_write_pos, replayssm_force_flush, num_v_heads, head_v_dim, out,
    )  # fmt: skip
    slots, value_heads, value_dim, key_dim = ssm_states.shape
    q, k, v = split_heads(mixed_qkv, value_heads, value_dim, key_dim)
    row_slots = decode_rows(cache_indices, None, v.shape[0], slots)
    write_positions: list[int] = replayssm_write_pos.tolist()
    force_flush = [0] * v.shape[0] if replayssm_force_flush is None else replayssm_force_flush.tolist()
    last = replayssm_g.shape[2] - 1
    if out is None:
        out = torch.empty((1, *v.shape), dtype=v.dtype, device=v.device)

    tokens = prepare_tokens(q, k, v, a, b, A_log, dt_bias, scale)
    for row, slot in row_slots.items():
        length = min(max(write_positions[row], 0), last)
        ring_d, ring_k, ring_g = replayssm_d[slot], replayssm_k[slot], replayssm_g[slot]
        ring = Ring.load(ring_d, ring_k, ring_g, length)
        _read(tokens, row, ssm_states[slot], ring)
        if length == last or force_flush[row]:
            _flush(tokens, row, ssm_states[slot], ring)
        else:
            ring_d[:, length].copy_(tokens.results[row, :, 0])
            ring_k[:, length].copy_(tokens.unit_keys[row])
            ring_g[:, length].copy_(tokens.log_decay[row])
    out[0].copy_(tokens.output())
    for row in range(out.shape[1]):
        if row not in row_slots:
            out[0, row].zero_()
    return out


def _read(tokens: PreparedTokens, row: int, checkpoint: Tensor, ring: Ring) -> None:
    """Complete `tokens.results[row]` with the products of the live state."""
    readers, results = tokens.readers[row], tokens.results[row]
    results.baddbmm_(readers * ring.total_decay, checkpoint.to(torch.float32).transpose(1, 2))
    if ring.decays.shape[1]:
        overlaps = torch.bmm(readers, ring.keys.transpose(1, 2)).mul_(ring.decays.unsqueeze(1))
        results.baddbmm_(overlaps, ring.updates)


def _flush(tokens: PreparedTokens, row: int, checkpoint: Tensor, ring: Ring) -> None:
    """Fold the ring and the row's own update into the checkpoint."""
    alpha = tokens.alpha[row]
    weighted = ring.updates * (ring.decays.unsqueeze(-1) * alpha)
    updates = torch.cat((weighted, tokens.results[row, :, :1]), dim=1)
    keys = torch.cat((ring.keys, tokens.keys[row]), dim=1)
    state = checkpoint.to(torch.float32)
    state.mul_(ring.total_decay * alpha).baddbmm_(updates.transpose(1, 2), keys)
    if state is not checkpoint:
        checkpoint.copy_(state)


def factory(context: BindContext) -> ReplayDecode:
    """Replay decode serves every config alike."""
    return replay_decode
