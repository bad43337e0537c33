"""QKV split: contiguous copies of the three parts of packed rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gdn.signature import validated
from gdn.validation import check_qkv_split

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import QkvSplit

_check = validated(check_qkv_split)


def factory(context: BindContext) -> QkvSplit:
    """The heads of the bound config say where rows are cut."""
    config = context.config
    key_heads, key_dim = config.num_k_heads, config.head_k_dim
    value_heads, value_dim = config.num_v_heads, config.head_v_dim
    widths = (key_heads * key_dim, key_heads * key_dim, value_heads * value_dim)

    def qkv_split(mixed_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `gdn.ops.QkvSplit`."""
        _check(mixed_qkv, key_heads, value_heads, key_dim, value_dim)
        q, k, v = (part.clone(memory_format=torch.contiguous_format) for part in mixed_qkv.split(widths, dim=1))
        tokens = mixed_qkv.shape[0]
        return (
            q.view(1, tokens, key_heads, key_dim),
            k.view(1, tokens, key_heads, key_dim),
            v.view(1, tokens, value_heads, value_dim),
        )

    return qkv_split
