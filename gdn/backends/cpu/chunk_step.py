"""One chunk of up to 64 tokens of the recurrence on one state, in matrix products.

With G the inclusive prefix sum of g inside the chunk and S the state entering it (WY form of the delta rule: Yang et
al. 2024, arXiv:2406.06484, with the gates of arXiv:2412.06464):

    A[i, j] = beta_i e^(G_i - G_j) k_i . k_j   for i > j, else 0
    (I + A) D = beta (v - e^G S k)
    O = e^G S q + tril(e^(G_i - G_j) q_i . k_j) D
    S <- e^(G_last) S + sum_i e^(G_last - G_i) d_i k_i^T

Exponents are differences of fp64 sums and never positive, so strong decay neither overflows nor costs accuracy to the
tokens that follow it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gdn.backends.cpu.gates import normalise_

if TYPE_CHECKING:
    from torch import Tensor

FORGOTTEN = -1e5
"""Stands for any stronger log decay: exp of it is 0, and differences of its sums stay exact where -inf gives NaN."""


def advance_chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> Tensor:
    """Advance `state` `[HV, V, K]`, contiguous fp32, in place over C tokens.

    Args:
        state: updated in place.
        q: `[C, HK, K]`, any strides and float dtype, as k.
        k: `[C, HK, K]`.
        v: `[C, HV, V]`.
        g: `[C, HV]` fp32, log decay.
        beta: `[C, HV]` fp32.
        scale: factor on q after normalisation.

    Returns:
        `[HV, C, V]`, fp32.
    """
    tokens, key_heads, key_dim = k.shape
    value_heads, value_dim, _ = state.shape
    ratio = value_heads // key_heads
    per_key_head = (key_heads, ratio, tokens)

    units = torch.empty((key_heads, 2 * tokens, key_dim), dtype=torch.float32, device=k.device)
    units[:, :tokens].copy_(k.transpose(0, 1))
    units[:, tokens:].copy_(q.transpose(0, 1))
    normalise_(units)
    keys = units[:, :tokens]

    total = g.t().to(torch.float64, memory_format=torch.contiguous_format).clamp_(min=FORGOTTEN).cumsum(-1)
    since_start = total.exp().to(torch.float32)
    until_end = (total[:, -1:] - total).exp_().to(torch.float32)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(torch.float32)
    future = torch.ones((tokens, tokens), dtype=torch.bool, device=k.device).triu_(1)
    between = between.masked_fill_(future, -torch.inf).exp_().view(*per_key_head, tokens)
    strength = beta.t().contiguous()

    products = torch.bmm(units, keys.transpose(1, 2)).unsqueeze(1)
    system = (products[:, :, :tokens] * between).mul_(strength.view(*per_key_head, 1))
    attention = between.mul_(products[:, :, tokens:]).mul_(scale).view(value_heads, tokens, tokens)

    weights = torch.cat((strength.neg().mul_(since_start), since_start * scale), dim=1)
    readers = units.unsqueeze(1) * weights.view(key_heads, ratio, 2 * tokens, 1)
    readers = readers.view(value_heads, 2 * tokens, key_dim)

    transposed = state.transpose(1, 2)
    right = torch.empty((value_heads, tokens, value_dim), dtype=torch.float32, device=v.device)
    torch.mul(v.transpose(0, 1), strength.unsqueeze(-1), out=right)
    right.baddbmm_(readers[:, :tokens], transposed)
    corrections = torch.linalg.solve_triangular(
        system.view(value_heads, tokens, tokens), right, upper=False, unitriangular=True
    )
    output = torch.bmm(readers[:, tokens:], transposed).baddbmm_(attention, corrections)

    writers = (keys.unsqueeze(1) * until_end.view(*per_key_head, 1)).view(value_heads, tokens, key_dim)
    state.mul_(since_start[:, -1:].unsqueeze(-1)).baddbmm_(corrections.transpose(1, 2), writers)
    return output
