"""What one argument signature of a one-launch operation needs to launch."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import NamedTuple

if TYPE_CHECKING:
    import torch

    from gdn.backends.triton.launch import Launch


class RowPlan(NamedTuple):
    """A kernel over rows of tokens that writes one output `[1, rows, HV, V]`."""

    launch: Launch
    programs: int
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    scale: float
    """Used where the caller gives none: K ** -0.5."""
    numbers: tuple[int, ...]
    """What follows the pointers and the scale."""
