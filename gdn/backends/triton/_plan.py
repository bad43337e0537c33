"""What one argument signature of a one-launch operation needs to launch."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from gdn._triton_launch import Launch


class RowPlan(NamedTuple):
    """A kernel over rows of tokens that writes one output `[1, rows, HV, V]`."""

    launch: Launch
    programs: int
    out: Tensor
    """A `template` of the output."""
    scale: float
    """Used where the caller gives none: K ** -0.5."""
    numbers: tuple[int, ...]
    """What follows the pointers and the scale."""


def template(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element seen as a tensor of `shape`: `torch.empty_like` of it allocates in half the host time of
    `torch.empty`.
    """
    return torch.empty((), dtype=dtype, device=device).expand(shape)
