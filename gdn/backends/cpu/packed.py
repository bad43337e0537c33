"""Packed decode: decode over the convolution's output, read through views."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import NamedTuple

import torch

from gdn.backends.cpu.rows import decode_rows
from gdn.backends.cpu.token_step import decode_tokens
from gdn.backends.cpu.token_step import prepare_tokens
from gdn.signature import validated
from gdn.validation import check_packed_decode

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import PackedDecode

_check = validated(check_packed_decode)


class HeadViews(NamedTuple):
    """Views into packed rows: q, k `[R, HK, K]`, v `[R, HV, V]`."""

    q: Tensor
    k: Tensor
    v: Tensor


def split_heads(mixed_qkv: Tensor, value_heads: int, value_dim: int, key_dim: int) -> HeadViews:
    """Split rows `[all q | all k | all v]`; the number of key heads follows from the row's width."""
    key_width = (mixed_qkv.shape[1] - value_heads * value_dim) // 2
    q, k, v = mixed_qkv.split((key_width, key_width, value_heads * value_dim), dim=1)
    key_heads = key_width // key_dim
    return HeadViews(
        q.unflatten(1, (key_heads, key_dim)),
        k.unflatten(1, (key_heads, key_dim)),
        v.unflatten(1, (value_heads, value_dim)),
    )


def packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    num_v_heads: int | None = None,
    head_v_dim: int | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `gdn.ops.PackedDecode`."""
    _check(mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, num_v_heads, head_v_dim, out)
    slots, value_heads, value_dim, key_dim = ssm_states.shape
    q, k, v = split_heads(mixed_qkv, value_heads, value_dim, key_dim)
    row_slots = decode_rows(cache_indices, None, v.shape[0], slots)
    if out is None:
        out = torch.empty((1, *v.shape), dtype=v.dtype, device=v.device)
    tokens = prepare_tokens(q, k, v, a, b, A_log, dt_bias, scale)
    decode_tokens(tokens, ssm_states, row_slots, out[0])
    return out


def factory(context: BindContext) -> PackedDecode:
    """Packed decode serves every config alike."""
    return packed_decode
