"""Tile sizes of extend, as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Final
from typing import NamedTuple

import triton

from gdn.backends.triton.tuning import first_that_fits

if TYPE_CHECKING:
    from torch import Tensor


class ExtendTile(NamedTuple):
    """Rows of one head's state in one program of the state kernel, its warps and stages."""

    rows: int
    warps: int
    stages: int


PREPARE_WARPS: Final = 4

_TABLE: Final[tuple[tuple[int | None, ExtendTile], ...]] = (
    (64, ExtendTile(32, 4, 3)),
    (512, ExtendTile(64, 4, 3)),
    (None, ExtendTile(32, 4, 2)),
)
"""With bf16 operands: (largest number of head states in the call, tile); None: any number."""

_SMALL_MEMORY: Final = ExtendTile(32, 4, 2)
"""For devices with less than 160 KiB of shared memory per block."""
_WIDE: Final = ExtendTile(32, 4, 1)
"""With fp32 operands; half the rows for keys beyond 128."""

_ROW: Final = 8
"""Elements of 16 bits in 16 bytes."""


def takes_narrow(key_dim: int, rows: Sequence[Tensor]) -> bool:
    """Whether the state kernel may take bf16 operands for q, k and v `[1, T, H, dim]` aligned to 16 bytes.

    Only where their tiles go to shared memory asynchronously: on SM90 (Triton 3.6) tiles that pass through registers
    gave wrong outputs or illegal accesses, so rows must be whole units of 16 bytes and there must be several stages.
    """
    whole = all(
        x.stride(3) == 1 and x.shape[3] % _ROW == 0 and x.stride(1) % _ROW == 0 and x.stride(2) % _ROW == 0
        for x in rows
    )
    return whole and key_dim <= 128


def extend_tile(states: int | None, key_dim: int, value_dim: int, *, narrow: bool, shared_memory: int) -> ExtendTile:
    """Tile for `states` head states (sequences times value heads); None: one tile for any number of them."""
    if not narrow:
        tile = _WIDE if key_dim <= 128 else _WIDE._replace(rows=16)
    elif shared_memory < 160 << 10:
        tile = _SMALL_MEMORY
    else:
        tile = first_that_fits(_TABLE, states)
    return tile._replace(rows=max(min(tile.rows, triton.next_power_of_2(value_dim)), 16))
