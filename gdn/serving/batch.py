"""What one forward pass works on: slots, token boundaries, draft tree, snapshot plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import TYPE_CHECKING
from typing import Any
from typing import Final

import torch

from gdn.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

_PADDING: Final = {
    "slots": -1,
    "snapshot_slots": -1,
    "snapshot_lengths": -1,
    "rows": -1,
    "positions": 0,
    "retrieve_next_token": -1,
    "retrieve_next_sibling": -1,
    "has_initial_state": True,
}
"""The value of a request that isn't there, by field."""

_WITHOUT_DEFAULT: Final = ("slots", "query_start_loc", "has_initial_state", "positions", "rows")
"""Fields whose values only the caller knows: `refresh` must get them where the batch has them."""


@dataclass(slots=True, eq=False, kw_only=True)
class Batch:
    """Plan of one forward pass over N requests, on the device. The same batch goes to every layer, in order of ids.

    Integer fields are int32 or int64. A request whose slot lies outside the pool is padding. Which kind of step it is
    says the method that gets the batch, never the lengths.

    Attributes:
        slots: `[N]`.
        query_start_loc: `[N+1]`, token boundaries of an extend.
        has_initial_state: `[N]` bool: the request continues from what its slot holds. False: it starts from zero,
            whatever the slot holds. None: all continue. For extend.
        seq_lens_cpu: lengths of an extend on the host, where they are known there.
        snapshot_slots: `[N]`, slots that get a copy of the request's window and state; -1: none. For decode: after the
            step. For extend: at `snapshot_lengths`. For commit: where the accepted tokens cross `snapshot_interval`.
        snapshot_lengths: `[N]`, tokens of this extend after which to take the snapshot, rounded down to a multiple of
            64; 0 is the state before the call; negative, or beyond the request's tokens: none.
        snapshot_interval: tokens between two prefix snapshots of a commit, more than the drafts of a verify; 0: none.
        positions: `[N]`, tokens behind each request before this verify; needed with `snapshot_interval`.
        rows: `[N]`, rows of the verify buffers; None: request n owns row n.
        retrieve_next_token: `[N, D]`, first child of each draft, -1 for none; None: drafts form a chain.
        retrieve_next_sibling: `[N, D]`, next sibling of each draft, -1 for none.
    """

    slots: Tensor
    query_start_loc: Tensor | None = None
    has_initial_state: Tensor | None = None
    seq_lens_cpu: Sequence[int] | None = None
    snapshot_slots: Tensor | None = None
    snapshot_lengths: Tensor | None = None
    snapshot_interval: int = 0
    positions: Tensor | None = None
    rows: Tensor | None = None
    retrieve_next_token: Tensor | None = None
    retrieve_next_sibling: Tensor | None = None
    plan: Any = field(default=None, init=False, repr=False)
    """What the serving layer derived from the fields at the first layer."""

    def __post_init__(self) -> None:
        if (self.retrieve_next_token is None) != (self.retrieve_next_sibling is None):
            raise InputError("retrieve_next_token, retrieve_next_sibling: expected both or neither, got one")
        if self.snapshot_lengths is not None and self.snapshot_slots is None:
            raise InputError("snapshot_slots: expected [N] slots for snapshot_lengths, got None")

    def refresh(self, **values: Tensor | Sequence[Any]) -> None:
        """Write another step's values into this batch's tensors, in place: what a captured graph reads.

        Each value holds entries of n <= N requests; the rest become padding. Tensors that get no value become padding
        altogether, so no plan of an earlier step survives. Values may be tensors of any device or sequences.

        Raises:
            InputError: a field that this batch was built without, a value without which the step would be wrong
                (slots, query_start_loc, has_initial_state, positions, rows), or one with more than N requests. Nothing
                has been written then.
        """
        tensors = {name: value for name in _TENSORS if (value := getattr(self, name)) is not None}
        if unknown := values.keys() - tensors.keys():
            raise InputError(f"{', '.join(sorted(unknown))}: this batch was built without")
        if missing := [name for name in _WITHOUT_DEFAULT if name in tensors and name not in values]:
            raise InputError(f"{', '.join(missing)}: expected a value for each refresh of this batch, got none")
        given = {name: torch.as_tensor(value) for name, value in values.items()}
        for name, value in given.items():
            room = tensors[name].shape
            if value.numel() == 0:
                given[name] = value = tensors[name][:0]
            if value.dim() != len(room) or value.shape[0] > room[0] or value.shape[1:] != room[1:]:
                raise InputError(f"{name}: expected up to {list(room)}, got {list(value.shape)}")
        if "query_start_loc" in given and given["query_start_loc"].shape[0] < 1:
            raise InputError("query_start_loc: expected at least the boundary 0, got none")
        for name, tensor in tensors.items():
            _refill(name, tensor, given.get(name))
        self.seq_lens_cpu = None
        self.plan = None


_TENSORS: Final = ("query_start_loc", *_PADDING)


def _refill(name: str, tensor: Tensor, value: Tensor | None) -> None:
    count = 0 if value is None else value.shape[0]
    if value is not None:
        tensor[:count].copy_(value, non_blocking=True)
    if name == "query_start_loc":
        tensor[count:].copy_(tensor[count - 1].expand(tensor.shape[0] - count))
    else:
        tensor[count:].fill_(_PADDING[name])
