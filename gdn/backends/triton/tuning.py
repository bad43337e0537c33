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

_STATES: Final[dict[int, Table]] = {
    2: ((None, Tile(32, 1)),),
    4: ((None, Tile(16, 1)),),
}
"""Verify of all drafts together that stores their states."""

_OUTPUTS: Final[dict[int, Table]] = {
    2: ((64, Tile(32, 4)), (None, Tile(32, 1))),
    4: ((64, Tile(32, 4)), (None, Tile(32, 1))),
}
"""Verify of all drafts together that stores no state."""

_WALK: Final[Table] = ((64, Tile(4, 1)), (None, Tile(32, 1)))
"""Verify of one draft after the other."""

MOST_TOGETHER: Final = 32
WALKED_CHAIN: Final = 8
"""Up to so many drafts, storing a chain's states costs more than finding them one after the other."""

_REPLAY: Final[dict[int, Table]] = {
    2: ((None, Tile(16, 1)),),
    4: ((None, Tile(32, 1)),),
}

LARGEST_TILE: Final = 8192
"""Elements of one tile: more would not stay in registers."""


def decode_tile(states: int | None, state_bytes: int, value_dim: int, key_dim: int) -> Tile:
    """Tile of decode for `states` head states (requests times value heads); None: one tile for any number of them."""
    return _fitted(_DECODE[state_bytes], states, value_dim, key_dim)


def taken_together(drafts: int, stored_chain: bool) -> bool:
    """Whether verify solves for all drafts of a request at once rather than one after the other."""
    return drafts <= MOST_TOGETHER and not (stored_chain and drafts <= WALKED_CHAIN)


def verify_tile(states: int | None, state_bytes: int, value_dim: int, key_dim: int, *, stores: bool) -> Tile:
    """Tile of verify of all drafts together, which may store their states."""
    return _fitted((_STATES if stores else _OUTPUTS)[state_bytes], states, value_dim, key_dim, least=16)


def walk_tile(states: int | None, value_dim: int, key_dim: int) -> Tile:
    """Tile of verify of one draft after the other."""
    return _fitted(_WALK, states, value_dim, key_dim)


def replay_tile(states: int | None, state_bytes: int, value_dim: int, key_dim: int) -> Tile:
    """Tile of replay decode."""
    return _fitted(_REPLAY[state_bytes], states, value_dim, key_dim)


def first_that_fits(table: Sequence[tuple[int | None, Row]], size: int | None) -> Row:
    """The first row whose largest size holds `size`; the last one, for any size, where `size` is None."""
    return next(row for most, row in table if most is None or (size is not None and size <= most))


def _fitted(table: Table, states: int | None, value_dim: int, key_dim: int, least: int = 1) -> Tile:
    tile = first_that_fits(table, states)
    padded_keys = triton.next_power_of_2(key_dim)
    rows = max(min(tile.rows, triton.next_power_of_2(value_dim), LARGEST_TILE // padded_keys), least)
    tiles = min(tile.tiles, triton.cdiv(value_dim, rows))
    return Tile(rows, tile.warps, tiles)
