"""Gating, the normalisation of q and k, and the split of packed rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Final

import torch

from gdn.config import GdnConfig

if TYPE_CHECKING:
    from torch import Tensor

EPSILON: Final = 1e-6
SOFTPLUS_THRESHOLD: Final = 20.0


def log_decay(A_log: Tensor, a: Tensor, dt_bias: Tensor) -> Tensor:
    """g = -exp(A_log) * softplus(a + dt_bias), softplus linear above 20; 0 where a factor is 0 and the other inf."""
    x = a.double() + dt_bias.double()
    softplus = torch.where(x > SOFTPLUS_THRESHOLD, x, torch.log1p(torch.exp(x.clamp(max=SOFTPLUS_THRESHOLD))))
    return -torch.nan_to_num(torch.exp(A_log.double()) * softplus, nan=0.0, posinf=torch.inf)


def normalised(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis."""
    x = x.double()
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + EPSILON)


def gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g `[1, T, HV]` and beta `[1, T, HV]`."""
    return log_decay(A_log, a, dt_bias).unsqueeze(0), torch.sigmoid(b.double()).unsqueeze(0)


def split_rows(mixed_qkv: Tensor, key_heads: int, key_dim: int, value_heads: int, value_dim: int) -> list[Tensor]:
    """q, k `[R, HK, K]` and v `[R, HV, V]` of rows `[all q | all k | all v]`."""
    rows, keys = mixed_qkv.shape[0], key_heads * key_dim
    q, k, v = mixed_qkv.split((keys, keys, value_heads * value_dim), dim=1)
    return [
        q.reshape(rows, key_heads, key_dim),
        k.reshape(rows, key_heads, key_dim),
        v.reshape(rows, value_heads, value_dim),
    ]


def qkv_split(config: GdnConfig) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """The split for one config's heads."""

    def split(mixed_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = split_rows(
            mixed_qkv, config.num_k_heads, config.head_k_dim, config.num_v_heads, config.head_v_dim
        )  # fmt: skip
        return q.unsqueeze(0).contiguous(), k.unsqueeze(0).contiguous(), v.unsqueeze(0).contiguous()

    return split
