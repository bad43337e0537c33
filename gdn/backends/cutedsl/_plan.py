"""What one argument signature needs to launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import NamedTuple

from gdn.backends.cutedsl.compiled import Argument

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Plan(NamedTuple):
    """A compiled kernel that writes one output `[1, tokens, HV, V]`."""

    function: Callable[..., None] | None
    """None: there is nobody to launch it for."""
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    scale: float
    """Used where the caller gives none: K ** -0.5."""


def state_argument(states: Tensor, leading: int = 1) -> Argument:
    """A pool, or a buffer with two leading axes: dense states at any slot stride, read in vectors of 16 bytes."""
    HV, V, K = states.shape[leading:]
    sizes = (None,) * leading + (HV, V, K)
    strides = (None,) * leading + (V * K, K, 1)
    return Argument(states.dtype, sizes, strides, STATE_ALIGNMENT, STATE_ALIGNMENT // states.element_size())


def output_argument(dtype: torch.dtype, HV: int, V: int) -> Argument:
    """`out`, contiguous; the first of its axes has one entry, whose stride means nothing."""
    return Argument(dtype, (1, None, HV, V), (None, HV * V, V, 1), dtype.itemsize)


STATE_ALIGNMENT = 16
"""Bytes to which the address of every slot must be aligned."""
