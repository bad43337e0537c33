"""Tensor-parallel parts of what a layer's channels carry: convolution states, weights and biases.

Channels stand side by side as `[all q | all k | all v]`. A rank's part is a slice of each of the three, never one
contiguous slice of the whole, so a state that moves between tensor-parallel sizes is cut and joined here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gdn.config import GdnConfig
from gdn.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


def slice_channels(x: Tensor, config: GdnConfig, rank: int, tp_size: int, *, axis: int = -2) -> Tensor:
    """One rank's channels of `x`, as a copy.

    Args:
        x: any tensor with `config.conv_dim` channels along `axis`: conv states `[..., dim, W-1]`, weights `[dim, W]`,
            or with `axis=-1` a bias `[dim]` and packed rows `[T, dim]`.
        config: the whole layer's, before `GdnConfig.shard`.
        rank: in `range(tp_size)`.
        tp_size: how many parts the heads are divided into.

    Returns:
        `x` with `config.shard(tp_size).conv_dim` channels along `axis`.

    Raises:
        ConfigError: the heads don't divide.
        InputError: `x` has another number of channels, or there is no such rank.
    """
    if not 0 <= rank < tp_size:
        raise InputError(f"rank: expected one in [0, {tp_size}), got {rank}")
    config.shard(tp_size)
    return _joined([part.chunk(tp_size, dim=axis)[rank] for part in _split(x, config, axis)], axis)


def merge_channels(parts: Sequence[Tensor], config: GdnConfig, *, axis: int = -2) -> Tensor:
    """The whole of every rank's channels, in the order of ranks; undoes `slice_channels`.

    Args:
        parts: one tensor from each rank, of equal shapes.
        config: the whole layer's.

    Raises:
        ConfigError, InputError: as for `slice_channels`.
    """
    shard = config.shard(len(parts))
    by_rank = [_split(part, shard, axis) for part in parts]
    return _joined([piece for kind in zip(*by_rank, strict=True) for piece in kind], axis)


def _split(x: Tensor, config: GdnConfig, axis: int) -> Sequence[Tensor]:
    """The channels of q, k and v."""
    import torch

    if x.shape[axis] != config.conv_dim:
        raise InputError(f"x: expected {config.conv_dim} channels along axis {axis}, got shape {list(x.shape)}")
    keys = config.num_k_heads * config.head_k_dim
    return torch.split(x, [keys, keys, config.num_v_heads * config.head_v_dim], dim=axis)


def _joined(pieces: Sequence[Tensor], axis: int) -> Tensor:
    import torch

    return torch.cat(list(pieces), dim=axis)
