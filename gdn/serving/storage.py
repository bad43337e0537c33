"""Memory of a pool: aligned slots in one of two orders, and one spare slot behind the last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor

Layout = Literal["slot_major", "page_major"]
"""slot_major: all slots of a layer lie together. page_major: all layers of a slot lie together."""


def allocate(
    layers: int, slots: int, entry: Sequence[int], dtype: torch.dtype, device: torch.device | str, *,
    layout: Layout = "slot_major", alignment: int = 1,
) -> Tensor:  # fmt: skip
    """Zeros `[layers, slots, *entry]`; each entry is contiguous and begins at a multiple of `alignment` bytes."""
    size = math.prod(entry)
    unit = math.lcm(alignment, dtype.itemsize) // dtype.itemsize
    pitch = -(-size // unit) * unit
    memory = torch.zeros(layers * slots * pitch + unit - 1, dtype=dtype, device=device)
    offset = -memory.data_ptr() // dtype.itemsize % unit
    outer = (slots * pitch, pitch) if layout == "slot_major" else (pitch, layers * pitch)
    inner = [math.prod(entry[axis + 1 :]) for axis in range(len(entry))]
    return memory.as_strided((layers, slots, *entry), (*outer, *inner), offset)


def with_spare(view: Tensor) -> Tensor:
    """The pool view `[slots, ...]` of one layer, with the spare slot that follows it: `[slots + 1, ...]`."""
    return view.as_strided((view.shape[0] + 1, *view.shape[1:]), view.stride(), view.storage_offset())


def bytes_of(*tensors: Tensor | None) -> int:
    """Bytes of the memory behind the tensors."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None)
