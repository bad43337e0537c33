"""Sizes of the blocks, as data. Each table is read top to bottom; the first row that fits counts."""

from __future__ import annotations

from typing import Final
from typing import NamedTuple


class Block(NamedTuple):
    """Warps of a block, and how much each of its warps takes.

    decode: rows of each group of lanes. verify: tiles of 16 rows.
    """

    warps: int
    depth: int


Table = tuple[tuple[int | None, Block], ...]
"""(largest number of head states in the call, block); None: any number."""

DECODE: Final[dict[int, Table]] = {
    2: ((64, Block(1, 2)), (512, Block(2, 8)), (None, Block(4, 16))),
    4: ((64, Block(1, 4)), (512, Block(4, 8)), (None, Block(4, 16))),
}
"""By bytes of a state element. Not measured yet: chosen so that a small batch fills the GPU and a large one keeps 64
registers of loads in flight for each thread."""

VERIFY: Final[dict[int, Table]] = {
    2: ((64, Block(2, 1)), (None, Block(4, 2))),
    4: ((64, Block(2, 1)), (None, Block(8, 1))),
}
"""Not measured yet."""


def block_of(table: Table, states: int | None) -> Block:
    """The first row that holds `states` head states; the last one, for any number of them, where `states` is None."""
    return next(block for most, block in table if most is None or (states is not None and states <= most))
