"""The state pool: everything that outlives a forward pass, for all layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import NamedTuple
from typing import get_args

import torch

from gdn.config import GdnConfig
from gdn.errors import ConfigError
from gdn.serving.allocator import SlotAllocator
from gdn.serving.drafts import DraftBuffers
from gdn.serving.moves import clear_rows
from gdn.serving.moves import move_rows
from gdn.serving.ring import ReplayRing
from gdn.serving.storage import Layout
from gdn.serving.storage import allocate
from gdn.serving.storage import bytes_of
from gdn.types import StateContract

if TYPE_CHECKING:
    from torch import Tensor

Slots = int | Sequence[int] | torch.Tensor
"""Slots as a caller names them. Those outside the pool are padding: nothing is read or written for them."""


class LayerState(NamedTuple):
    """One layer's views of the pool, as the operations take them.

    Attributes:
        conv: `[slots, dim, W-1]`.
        recurrent: `[slots, HV, V, K]`.
        windows: `[max_requests, D, dim, W-1]`, windows after each draft, or None.
        steps: `[max_requests, D, HV, V, K]`, states after each draft, or None.
        replay_d, replay_k, replay_g: the ring (see `gdn.ops.ReplayDecode`), or None.
    """

    conv: Tensor
    recurrent: Tensor
    windows: Tensor | None = None
    steps: Tensor | None = None
    replay_d: Tensor | None = None
    replay_k: Tensor | None = None
    replay_g: Tensor | None = None


class StatePool:
    """Conv states, recurrent states, verify buffers and the replay ring of `num_layers` layers.

    Slots 0 .. num_slots-1 belong to the caller: `acquire` and `release` hand them out, or the server's own allocator
    does. No method synchronises the host on an accelerator, given tensors; each can be captured in a CUDA graph.

    Args:
        config: geometry, dtypes, `max_draft_tokens`, `replay_window`.
        num_slots: slots that can hold requests or snapshots. Reserved slots of the contract and one spare slot, which
            takes the writes of padded rows, come on top.
        device: where.
        num_layers: layers that share the slots; their ids are 0 .. num_layers-1.
        max_requests: rows of the verify buffers, D states each; 0: verify isn't used.
        layout: "slot_major", or "page_major" where all layers of a slot must be contiguous.
        contract: `triple.state`; None: `config.state_dtype`, no alignment, no reserved slots.
        conv_dtype: element type of the windows; None: the activation dtype.

    Attributes:
        conv: `[layers, slots+, dim, W-1]`, windows; `slots+` counts the reserved slots and the spare one, the last.
        recurrent: `[layers, slots+, HV, V, K]`, states.
        ring: the replay ring, or None.
        drafts: the verify buffers, or None.
        spare: the spare slot.
        allocator: who holds which slot.
        config, contract, num_slots, num_layers, layout, device: as given.

    Raises:
        ConfigError: a size or a layout that makes no sense, or `state_dtype="auto"` with no contract.
    """

    def __init__(
        self,
        config: GdnConfig,
        num_slots: int,
        device: torch.device | str,
        *,
        num_layers: int = 1,
        max_requests: int = 0,
        layout: Layout = "slot_major",
        contract: StateContract | None = None,
        conv_dtype: torch.dtype | None = None,
    ) -> None:
        if layout not in get_args(Layout):
            raise ConfigError(f"layout: expected one of {', '.join(get_args(Layout))}, got {layout!r}")
        if num_slots < 1 or num_layers < 1 or max_requests < 0:
            sizes = f"num_slots={num_slots}, num_layers={num_layers}, max_requests={max_requests}"
            raise ConfigError(f"expected num_slots >= 1, num_layers >= 1 and max_requests >= 0, got {sizes}")
        if contract is None:
            if config.state_dtype == "auto":
                raise ConfigError('state_dtype="auto": give the pool contract=triple.state')
            contract = StateContract(dtype=config.state_dtype)
        self.config = config
        self.contract = contract
        self.num_slots = num_slots
        self.num_layers = num_layers
        self.layout = layout
        self.device = torch.device(device)
        self.allocator = SlotAllocator(num_slots)

        dtype: torch.dtype = getattr(torch, contract.dtype)
        conv_dtype = getattr(torch, config.activation_dtype) if conv_dtype is None else conv_dtype
        assert conv_dtype is not None
        self.spare = contract.slots(num_slots)
        rows = self.spare + 1
        state = (config.num_v_heads, config.head_v_dim, config.head_k_dim)
        window = (config.conv_dim, config.conv_kernel_size - 1)
        self.conv = allocate(num_layers, rows, window, conv_dtype, self.device, layout=layout)
        self.recurrent = allocate(
            num_layers, rows, state, dtype, self.device, layout=layout, alignment=contract.alignment
        )  # fmt: skip
        self.ring = ReplayRing(config, num_layers, rows, dtype, self.device) if config.replay_window else None
        self.drafts = None
        if max_requests and config.max_draft_tokens:
            self.drafts = DraftBuffers(
                config, num_layers, max_requests, dtype, conv_dtype, self.device, contract.alignment
            )  # fmt: skip
        self._layers = [self._views(layer) for layer in range(num_layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of everything that the pool allocated."""
        parts = sum(part.nbytes for part in (self.ring, self.drafts) if part is not None)
        return bytes_of(self.conv, self.recurrent) + parts

    def layer(self, index: int) -> LayerState:
        """Views of one layer. They stay valid, and the same objects, for the pool's life."""
        return self._layers[index]

    def acquire(self) -> int:
        """A free slot; it still holds its last tenant's state. Raises `gdn.SlotError` where there is none."""
        return self.allocator.acquire()

    def release(self, slot: int) -> None:
        """Give a slot back. Raises `gdn.SlotError` where nobody holds it."""
        self.allocator.release(slot)

    def reset(self, slots: Slots) -> None:
        """Make slots fresh: zero windows and states, empty rings, whatever they hold."""
        self.clear(self.rows_of(slots))

    def copy(self, source: Slots, target: Slots) -> None:
        """`target[n]` becomes a copy of `source[n]` in all layers: a snapshot taken, or resumed from.

        Runs in the order of the current stream, so after the forward passes launched before it there. A source whose
        replay ring holds updates is brought up to date first. Where either slot lies outside the pool, nothing moves.
        """
        origin, to = self.rows_of(source), self.rows_of(target)
        to = to.masked_fill(origin == self.spare, self.spare)
        self.fold(origin)
        self.move(origin, to)

    def commit(self, slots: Slots, steps: Tensor, *, rows: Tensor | None = None) -> None:
        """Each request's accepted draft becomes its slot's state: recurrent state and conv window, all layers.

        Args:
            slots: `[N]`, where to.
            steps: `[N]` integers, the draft whose state and window to take; one outside 0 .. D-1 moves nothing.
            rows: `[N]` integers, the requests' rows of the verify buffers; None: request n owns row n.

        Raises:
            ConfigError: the pool has no verify buffers.
        """
        drafts = self.require_drafts()
        to = self.rows_of(slots)
        rows = drafts.rows[: to.shape[0]] if rows is None else rows
        origin, exists = drafts.find(rows, steps)
        to = to.masked_fill(~exists, self.spare)
        move_rows(self.recurrent, to, drafts.recurrent.flatten(1, 2), origin)
        move_rows(self.conv, to, drafts.windows.flatten(1, 2), origin)
        if self.ring is not None:
            self.ring.forget(to)

    def clear(self, rows: Tensor) -> None:
        """`reset` for `rows [N]` (from `rows_of`)."""
        clear_rows(self.conv, rows)
        clear_rows(self.recurrent, rows)
        if self.ring is not None:
            self.ring.forget(rows)

    def fold(self, rows: Tensor) -> None:
        """Bring the recurrent states of `rows [N]` (from `rows_of`) up to date where a replay ring lags behind."""
        if self.ring is not None:
            self.ring.fold(self.recurrent, rows)

    def move(self, origin: Tensor, to: Tensor) -> None:
        """Copy entries of `rows_of` form whose rings are empty, in all layers."""
        move_rows(self.recurrent, to, self.recurrent, origin)
        move_rows(self.conv, to, self.conv, origin)
        if self.ring is not None:
            self.ring.forget(to)

    def rows_of(self, slots: Slots) -> Tensor:
        """`[N]` int64 storage rows of slots; padding becomes the spare row."""
        if not isinstance(slots, torch.Tensor):
            listed = [slots] if isinstance(slots, int) else list(slots)
            slots = torch.tensor(listed, dtype=torch.int64).to(self.device, non_blocking=True)
        return slots.masked_fill((slots < 0) | (slots >= self.num_slots), self.spare).long()

    def require_drafts(self) -> DraftBuffers:
        """The verify buffers.

        Raises:
            ConfigError: there are none.
        """
        if self.drafts is None:
            asked = f"max_draft_tokens={self.config.max_draft_tokens}"
            raise ConfigError(f"the pool has no verify buffers: build it with max_requests >= 1 and {asked} >= 1")
        return self.drafts

    def _views(self, layer: int) -> LayerState:
        conv, recurrent = self.conv[layer, : self.spare], self.recurrent[layer, : self.spare]
        steps = windows = d = k = g = None
        if self.drafts is not None:
            windows, steps = self.drafts.windows[layer], self.drafts.recurrent[layer]
        if self.ring is not None:
            d, k, g = (part[layer, : self.spare] for part in (self.ring.d, self.ring.k, self.ring.g))
        return LayerState(conv, recurrent, windows, steps, d, k, g)
