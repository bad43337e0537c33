"""Decode: one token per request, the state updated in place through a view of its slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gdn.backends.cpu.rows import decode_rows
from gdn.backends.cpu.token_step import decode_tokens
from gdn.backends.cpu.token_step import prepare_tokens
from gdn.signature import validated
from gdn.validation import check_decode

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import Decode

_check = validated(check_decode)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `gdn.ops.Decode`."""
    _check(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, out)
    row_slots = decode_rows(cache_indices, query_start_loc, v.shape[1], ssm_states.shape[0])
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    tokens = prepare_tokens(q[0], k[0], v[0], a, b, A_log, dt_bias, scale)
    decode_tokens(tokens, ssm_states, row_slots, out[0])
    return out


def factory(context: BindContext) -> Decode:
    """Decode serves every config alike."""
    return decode
