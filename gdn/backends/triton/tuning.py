"""Tile sizes of the recurrent kernels, as data. Each table is read top to bottom; the first row that fits counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from typing import NamedTuple
from typing import TypeVar

import triton

Row = TypeVar("Row")


class Tile(NamedTuple):
    """Rows of one head's state that a program holds at a time, how many such tiles it takes in turn, its warps."""

    rows: int
    warps: int
    tiles: int = 1


Table = tuple[tuple[int | None, Tile], ...]
"""(largest number of head states in the call, tile); None: any number."""

_DECODE: Final[dict[int, Table]] = {
    2: ((64, Tile(4, 1)), (512, Tile(8, 1, 2)), (None, Tile(8, 1))),
    4: ((64, Tile(4, 1)), (None, Tile(16, 1))),
}
"""By bytes of a state element."""

_VERIFY: Final[dict[int, Table]] = {
    2: ((64, Tile(4, 1)), (None, Tile(32, 1))),
    4: ((64, Tile(4, 1)), (None, Tile(32, 1))),
}

_REPLAY: Final[dict[int, Table]] = {
    2: ((None, Tile(16, 1)),),
    4: ((None, Tile(32, 1)),),
}

LARGEST_TILE: Final = 8192
"""Elements of one tile: more would not stay in registers."""


def decode_tile(states: int | None, state_bytes: int, value_dim: int, key_dim: int) -> Tile:
    """Tile of decode for `states` head states (requests times value heads); None: one tile for any number of them."""
    return _fitted(_DECODE[state_bytes], states, value_dim, key_dim)


def verify_tile(states: int | None, state_bytes: int, value_dim: int, key_dim: int) -> Tile:
    """Tile of verify."""
    return _fitted(_VERIFY[state_bytes], states, value_dim, key_dim)


def replay_tile(states: int | None, state_bytes: int, value_dim: int, key_dim: int) -> Tile:
    """Tile of replay decode."""
    return _fitted(_REPLAY[state_bytes], states, value_dim, key_dim)


def first_that_fits(table: Sequence[tuple[int | None, Row]], size: int | None) -> Row:
    """The first row whose largest size holds `size`; the last one, for any size, where `size` is None."""
    return next(row for most, row in table if most is None or (size is not None and size <= most))


def _fitted(table: Table, states: int | None, value_dim: int, key_dim: int) -> Tile:
    tile = first_that_fits(table, states)
    padded_keys = triton.next_power_of_2(key_dim)
    rows = min(tile.rows, triton.next_power_of_2(value_dim), max(LARGEST_TILE // padded_keys, 1))
    tiles = min(tile.tiles, triton.cdiv(value_dim, rows))
    return Tile(rows, tile.warps, tiles)
