"""Tile sizes of extend, as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Final
from typing import NamedTuple

import torch
import triton

from gdn.backends.triton.tuning import first_that_fits

if TYPE_CHECKING:
    from torch import Tensor


class ExtendTile(NamedTuple):
    """Rows of one head's state in one program of the state kernel, its warps and stages, warps of the first kernel."""

    rows: int
    warps: int
    stages: int
    prepare_warps: int = 4


_TABLE: Final[tuple[tuple[int | None, ExtendTile], ...]] = (
    (64, ExtendTile(32, 4, 3)),
    (512, ExtendTile(64, 4, 3)),
    (None, ExtendTile(32, 4, 2)),
)
"""With bf16 operands: (largest number of head states in the call, tile); None: any number."""

_SMALL_MEMORY: Final = ExtendTile(32, 4, 2)
"""For devices with less than 160 KiB of shared memory per block."""
_WIDE: Final = ExtendTile(32, 4, 1)
"""With fp32 operands."""
_WITHOUT_WGMMA: Final = ExtendTile(32, 2, 1, prepare_warps=2)
"""For tiles that SM90's warp-group products can't be trusted with. Two warps aren't a warp group."""

_UNIT: Final = 16
"""Triton knows the alignment of rows only where their strides are multiples of 16 elements."""


def takes_narrow(key_dim: int, rows: Sequence[Tensor]) -> bool:
    """Whether the state kernel may take bf16 operands for q, k and v `[1, T, H, dim]` aligned to 16 bytes.

    Only where their tiles go to shared memory asynchronously, from rows that are whole units and in several stages.
    Tiles that pass through registers gave wrong outputs or illegal accesses on SM90: Triton from 3.6 on is known to
    compile some warp-group products wrong there (triton-lang/triton issues 10573 and 11366).
    """
    return key_dim <= 128 and all(
        x.stride(3) == 1 and not (x.shape[3] % _UNIT or x.stride(1) % _UNIT or x.stride(2) % _UNIT) for x in rows
    )


def narrow_tile(states: int | None, value_dim: int, shared_memory: int) -> ExtendTile:
    """Tile with bf16 operands, for `states` head states (sequences times value heads); None: for any number of them."""
    return _fitted(_SMALL_MEMORY if shared_memory < 160 << 10 else first_that_fits(_TABLE, states), value_dim)


def wide_tile(dtype: torch.dtype, key_dim: int, value_dim: int) -> ExtendTile:
    """Tile with fp32 operands, for activations of `dtype`."""
    if key_dim > 128:
        return _fitted(_WITHOUT_WGMMA._replace(rows=16), value_dim)
    return _fitted(_WITHOUT_WGMMA if dtype == torch.bfloat16 else _WIDE, value_dim)


def _fitted(tile: ExtendTile, value_dim: int) -> ExtendTile:
    return tile._replace(rows=max(min(tile.rows, triton.next_power_of_2(value_dim)), 16))
