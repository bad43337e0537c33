"""Tile sizes of extend, as data."""

from __future__ import annotations

from typing import Final
from typing import NamedTuple

import triton

from gdn.backends.triton.tuning import first_that_fits


class ExtendTile(NamedTuple):
    """Rows of one head's state in one program of the state kernel, warps and stages of both kernels."""

    rows: int
    warps: int
    stages: int
    prepare_warps: int = 4


_TABLE: Final[tuple[tuple[int | None, ExtendTile], ...]] = (
    (64, ExtendTile(32, 4, 3)),
    (512, ExtendTile(64, 4, 3)),
    (None, ExtendTile(32, 4, 2)),
)
"""(largest number of head states in the call, tile); None: any number. bf16 operands with one stage faulted on SM90
(Triton 3.6), so no row has it."""

_SMALL_MEMORY: Final = ExtendTile(32, 4, 2)
"""For devices with less than 160 KiB of shared memory per block."""
_LARGE_OPERANDS: Final = ExtendTile(32, 4, 1)
"""For fp32 operands and for head dims above 128."""


def extend_tile(states: int | None, key_dim: int, value_dim: int, operand_bytes: int, shared_memory: int) -> ExtendTile:
    """Tile for `states` head states (sequences times value heads); None: one tile for any number of them."""
    if operand_bytes > 2 or key_dim > 128:
        tile = _LARGE_OPERANDS if operand_bytes * key_dim <= 512 else _LARGE_OPERANDS._replace(rows=16)
    elif shared_memory < 160 << 10:
        tile = _SMALL_MEMORY
    else:
        tile = first_that_fits(_TABLE, states)
    return tile._replace(rows=max(min(tile.rows, triton.next_power_of_2(value_dim)), 16))
