"""States at chunk boundaries: what extend returns as `chunk_states`, and snapshots into slots.

The library stores a sequence's state after every 64 tokens at rows that an index names, -1 for nowhere. So chunk
states are stored straight into the returned buffer, and of snapshots only each sequence's wanted state into scratch.
The state that enters chunk 0 is the slot's own, read before the call; a final state is read after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

import torch

from gdn.backends.flashinfer.rows import store
from gdn.backends.flashinfer.slots import Owners
from gdn.backends.flashinfer.slots import inside
from gdn.backends.flashinfer.slots import owners
from gdn.types import CHUNK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Spans(NamedTuple):
    """The sequences of one call, at least one, as their boundaries need them."""

    own: Tensor
    """`[N]` int64: slot, 0 for a padded sequence."""
    real: Tensor
    """`[N]` bool: not padded."""
    chunks: Tensor
    """`[N]` int64."""
    first: Tensor
    """`[N, HV, V, K]`: states before the call."""
    starts: Tensor
    """`[N+1]` int64: where each sequence's checkpoints begin in the library's order."""
    checkpoints: Owners
    """Whose each checkpoint is; as many as the tokens could hold."""

    @classmethod
    def of(cls, pool: Tensor, indices: Tensor, offsets: Tensor, tokens: int) -> Spans:
        """Reads the pool, which must hold a slot."""
        lengths, real = offsets.to(torch.int64).diff(), inside(indices, pool.shape[0])
        own = torch.where(real, indices, 0).to(torch.int64)
        starts = torch.nn.functional.pad((lengths // CHUNK).cumsum(0), (1, 0))
        checkpoints = owners(starts, max(tokens // CHUNK, 1))
        return cls(own, real, (lengths + CHUNK - 1) // CHUNK, pool[own], starts, checkpoints)

    def arguments(self, into: Tensor, rows: Tensor) -> dict[str, Any]:
        """The library's arguments that store checkpoint i in `into[rows[i]]`."""
        if into.shape[0] == 0:
            return {}
        return {
            "state_checkpoints": into, "checkpoint_cu_starts": self.starts, "checkpoint_every_n_tokens": CHUNK,
            "checkpoint_state_indices": rows,
        }  # fmt: skip


class ChunkStates:
    """The state that enters each chunk; `entering [total, HV, V, K]` is complete after the call."""

    def __init__(self, spans: Spans, pool: Tensor, total: int | None) -> None:
        self._begins = spans.chunks.cumsum(0) - spans.chunks
        total = int(spans.chunks.sum()) if total is None else total  # waits for the device, as the contract says
        self.entering = pool.new_zeros((total, *pool.shape[1:]))
        whose = spans.checkpoints
        kept = whose.owned & spans.real[whose.owner] & (whose.place + 1 < spans.chunks[whose.owner])
        rows = torch.where(kept, self._begins[whose.owner] + whose.place + 1, -1)
        self.arguments = spans.arguments(self.entering, rows)
        store(spans.first, _places(self._begins, spans.real & (spans.chunks > 0), self.entering), self.entering)

    def at(self, chunks: Tensor) -> Tensor:
        """`[N, HV, V, K]`: each sequence's state entering chunk `chunks [N]`, anything where there is none."""
        return self.entering[(self._begins + chunks).clamp(0, self.entering.shape[0] - 1)]


class Snapshots:
    """Of each sequence the state that enters one chunk, moved into a slot after the call."""

    def __init__(self, spans: Spans, pool: Tensor, chunks: Tensor, slots: Tensor) -> None:
        wanted = spans.real & (chunks >= 0) & (chunks <= spans.chunks) & inside(slots, pool.shape[0])
        self._spans, self._chunks, self._kept = spans, chunks, spans.first
        self._places = _places(slots, wanted, pool)
        self._last = (chunks == spans.chunks) & spans.real
        whose = spans.checkpoints
        kept = whose.owned & wanted[whose.owner] & (whose.place + 1 == chunks[whose.owner]) & ~self._last[whose.owner]
        self.arguments = spans.arguments(self._kept, torch.where(kept, whose.owner, -1))

    def finish(self, pool: Tensor, states: ChunkStates | None) -> None:
        """Write the slots; with `states` the library stored those and not ours."""
        kept = self._kept
        if states is not None and states.entering.shape[0]:
            inner = (self._chunks > 0) & (self._chunks < self._spans.chunks)
            kept = torch.where(inner.view(-1, 1, 1, 1), states.at(self._chunks), kept)
        kept = torch.where(self._last.view(-1, 1, 1, 1), pool[self._spans.own], kept)
        store(kept, self._places, pool)


class Boundaries:
    """Both together, for one call; nothing where neither is asked for."""

    def __init__(
        self, pool: Tensor, indices: Tensor, offsets: Tensor, tokens: int, *, chunk_states: bool,
        lengths: Sequence[int] | None, snapshot_chunks: Tensor | None, snapshot_slots: Tensor | None,
    ) -> None:  # fmt: skip
        self._states: ChunkStates | None = None
        self._snapshots: Snapshots | None = None
        self._nothing: Tensor | None = None
        self.arguments: dict[str, Any] = {}
        total = None if lengths is None else sum(-(-length // CHUNK) for length in lengths)
        if indices.shape[0] == 0 or pool.shape[0] == 0 or not (chunk_states or snapshot_chunks is not None):
            if chunk_states:
                self._nothing = pool.new_zeros((1, _chunk_count(offsets, total), *pool.shape[1:]))
            return
        spans = Spans.of(pool, indices, offsets, tokens)
        if snapshot_chunks is not None and snapshot_slots is not None:
            self._snapshots = Snapshots(spans, pool, snapshot_chunks, snapshot_slots)
            self.arguments = self._snapshots.arguments
        if chunk_states:
            self._states = ChunkStates(spans, pool, total)
            self.arguments = self._states.arguments

    def finish(self, pool: Tensor) -> Tensor | None:
        """After the call: write the snapshots, return the chunk states `[1, total, HV, V, K]` if asked for."""
        if self._snapshots is not None:
            self._snapshots.finish(pool, self._states)
        return self._nothing if self._states is None else self._states.entering.unsqueeze(0)


def _chunk_count(offsets: Tensor, total: int | None) -> int:
    return int(((offsets.diff() + (CHUNK - 1)) // CHUNK).sum()) if total is None else total


def _places(rows: Tensor, kept: Tensor, into: Tensor) -> Tensor:
    """`[N]` int64: element offset of each named row, -1 where it isn't kept."""
    return torch.where(kept, rows.to(torch.int64) * into.stride(0), -1)
