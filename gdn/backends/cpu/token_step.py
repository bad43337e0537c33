"""One token of the recurrence on one state, shared by decode, packed decode and verify.

With alpha = exp(g) and the state S before the token, both products with S come from one read:

    d = beta (v - alpha S k)        o = alpha S q + (k . q) d        S <- alpha S + d k^T

which equals the recurrence of `gdn.ops` because o = (alpha S + d k^T) q.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gdn.backends.cpu.gates import log_decay
from gdn.backends.cpu.gates import normalise_
from gdn.backends.cpu.gates import write_strength

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PreparedTokens:
    """What the steps of R tokens need, fp32.

    Attributes:
        alpha: `[R, HV, 1, 1]` decay.
        log_decay: `[R, HV]`.
        readers: `[R, HV, 2, K]`: -beta alpha k, then alpha q; their products with S^T are added to `results`.
        results: `[R, HV, 2, V]`: beta v and 0 before the step, d and alpha S q after it.
        unit_keys: `[R, HK, K]`.
        keys: `[R, HV, 1, K]`: the same for each value head.
        key_query: `[R, HK, 1, 1]`: k . q.
    """

    alpha: Tensor
    log_decay: Tensor
    readers: Tensor
    results: Tensor
    unit_keys: Tensor
    keys: Tensor
    key_query: Tensor

    def output(self) -> Tensor:
        """`[R, HV, V]`, once every step has run."""
        corrections, reads = self.results.unflatten(1, (self.key_query.shape[1], -1)).unbind(3)
        return torch.addcmul(reads, self.key_query, corrections).flatten(1, 2)


def prepare_tokens(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float | None
) -> PreparedTokens:
    """Gates, normalisation and scale of R tokens: q, k `[R, HK, K]`, v `[R, HV, V]`, a, b `[R, HV]`."""
    rows, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[1:]
    ratio = value_heads // key_heads
    scale = key_dim**-0.5 if scale is None else scale

    g = log_decay(A_log, a, dt_bias)
    alpha = g.exp()
    beta = write_strength(b)

    units = torch.empty((rows, key_heads, 2, key_dim), dtype=torch.float32, device=k.device)
    units[:, :, 0].copy_(k)
    units[:, :, 1].copy_(q)
    normalise_(units)
    unit_keys, unit_queries = units.unbind(2)
    key_query = (unit_keys * unit_queries).sum(-1, keepdim=True).mul_(scale)

    weights = torch.stack((beta.neg().mul_(alpha), alpha * scale), dim=-1).view(rows, key_heads, ratio, 2, 1)
    results = torch.zeros((rows, value_heads, 2, value_dim), dtype=torch.float32, device=v.device)
    torch.mul(v, beta.unsqueeze(-1), out=results[:, :, 0])
    return PreparedTokens(
        alpha=alpha.view(rows, value_heads, 1, 1),
        log_decay=g,
        readers=(units.unsqueeze(2) * weights).view(rows, value_heads, 2, key_dim),
        results=results,
        unit_keys=unit_keys,
        keys=repeat_heads(unit_keys, ratio).unsqueeze(2),
        key_query=key_query.unsqueeze(-1),
    )


def repeat_heads(x: Tensor, ratio: int) -> Tensor:
    """`[R, HK, n]` to `[R, HV, n]`: value head j gets key head j // ratio."""
    rows, heads, width = x.shape
    return x.unsqueeze(2).expand(rows, heads, ratio, width).reshape(rows, heads * ratio, width)


def advance(source: Tensor, target: Tensor, alpha: Tensor, readers: Tensor, results: Tensor, keys: Tensor) -> None:
    """Step from the fp32 state `source` `[HV, V, K]` into `target`, which may be the same memory."""
    results.baddbmm_(readers, source.transpose(1, 2))
    if target.data_ptr() == source.data_ptr():
        target.mul_(alpha)
    else:
        torch.mul(source, alpha, out=target)
    target.baddbmm_(results[:, :1].transpose(1, 2), keys)


def decode_tokens(tokens: PreparedTokens, ssm_states: Tensor, row_slots: dict[int, int], out: Tensor) -> None:
    """Step each row's slot in place and write `out` `[R, HV, V]`; rows without a slot become zeros."""
    steps = tuple(
        zip(
            tokens.alpha.unbind(0),
            tokens.readers.unbind(0),
            tokens.results.unbind(0),
            tokens.keys.unbind(0),
            strict=True,
        )
    )
    for row, slot in row_slots.items():
        stored = ssm_states[slot]
        state = stored.to(torch.float32)
        advance(state, state, *steps[row])
        if state is not stored:
            stored.copy_(state)
    out.copy_(tokens.output())
    for row in range(out.shape[0]):
        if row not in row_slots:
            out[row].zero_()
