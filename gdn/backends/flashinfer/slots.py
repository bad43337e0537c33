"""Index arithmetic on the device: which rows are real, where packed rows lie in a dense batch, and back.

Nothing here waits for the device: what a row needs not have is decided by masks, never by a shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor


def inside(indices: Tensor, usable: int) -> Tensor:
    """`[N]` bool: the index names a slot."""
    return (indices >= 0) & (indices < usable)


def or_else(indices: Tensor, usable: int, instead: int) -> Tensor:
    """`[N]` int32, fresh: the slot, or `instead` where there is none."""
    return torch.where(inside(indices, usable), indices, instead).to(torch.int32)


class Owners(NamedTuple):
    """Whose each of `count` packed items is."""

    owner: Tensor
    """`[count]` int64, clamped to a valid row."""
    place: Tensor
    """`[count]` int64: its place within the owner's items."""
    owned: Tensor
    """`[count]` bool."""


def owners(offsets: Tensor, count: int) -> Owners:
    """Owner of each of `count` items packed at `offsets [N+1]`, N >= 1."""
    item = torch.arange(count, dtype=torch.int64, device=offsets.device)
    offsets = offsets.to(torch.int64)
    owner = torch.searchsorted(offsets[1:].contiguous(), item, right=True)
    owned = (owner < offsets.shape[0] - 1) & (item >= offsets[0])
    owner.clamp_(max=offsets.shape[0] - 2)
    return Owners(owner, item - offsets[owner], owned)


def dense_rows(offsets: Tensor, steps: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Packed row of each step of each request: `[N, steps]` int64, clamped to a valid row, and whether it is its own.

    Args:
        offsets: `[N+1]`.
        steps: of each request; those beyond its length repeat rows that aren't its own.
        tokens: packed rows, at least one.
    """
    offsets = offsets.to(torch.int64)
    step = torch.arange(steps, device=offsets.device)
    row = (offsets[:-1, None] + step).clamp_(0, tokens - 1)
    return row, step < offsets.diff()[:, None]


def gathered(x: Tensor, rows: Tensor) -> Tensor:
    """Rows `[N, steps, ...]` of packed `x [T, ...]`, contiguous."""
    return x.index_select(0, rows.flatten()).view(*rows.shape, *x.shape[1:])
