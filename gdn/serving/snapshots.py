"""Snapshots inside an extend: at which chunk of which request, and the conv window there."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import NamedTuple

import torch

from gdn.serving.batch import Batch
from gdn.serving.moves import move_rows
from gdn.serving.pool import StatePool
from gdn.types import CHUNK

if TYPE_CHECKING:
    from torch import Tensor


class ExtendSnapshots(NamedTuple):
    """The snapshots of one extend.

    Attributes:
        chunks: `[N]` int32 for `gdn.ops.Extend`, -1 for none.
        slots: `[N]`, where each snapshot goes.
        rows: `[N]` int64 storage rows of those that lie behind tokens of the call, the spare row for the others.
        tokens: `[N * (W-1)]` int64, the last tokens before each.
    """

    chunks: Tensor
    slots: Tensor
    rows: Tensor
    tokens: Tensor

    def store_windows(self, conv: Tensor, mixed_qkv: Tensor) -> None:
        """Write the windows that consist of tokens of this call.

        Args:
            conv: `[slots+1, dim, W-1]`, one layer's windows.
            mixed_qkv: `[T, dim]`, inputs of the convolution.
        """
        if mixed_qkv.shape[0]:
            inputs = mixed_qkv.index_select(0, self.tokens).view(self.rows.shape[0], conv.shape[2], conv.shape[1])
            conv.index_copy_(0, self.rows, inputs.transpose(1, 2).to(conv.dtype))


def plan_snapshots(pool: StatePool, batch: Batch, requests: Tensor, tokens: int) -> ExtendSnapshots:
    """Where the snapshots of an extend lie; takes the windows of those at its very start, for all layers.

    A snapshot after `length` tokens of the call holds the state entering chunk `length // 64`, which for a request
    that ends there is its final state, and the W-1 inputs before that token.

    Args:
        pool: the pool, fresh requests cleared.
        batch: a batch with boundaries and a snapshot plan.
        requests: `[N]` int64 storage rows of the requests.
        tokens: T.
    """
    lengths, slots, offsets = batch.snapshot_lengths, batch.snapshot_slots, batch.query_start_loc
    assert lengths is not None
    assert slots is not None
    assert offsets is not None
    taken = (lengths >= 0) & (lengths <= offsets.diff()) & (requests != pool.spare)
    chunks = (lengths.clamp(min=0) // CHUNK).masked_fill(~taken, -1)
    rows = pool.rows_of(slots)
    move_rows(pool.conv, rows.masked_fill(chunks != 0, pool.spare), pool.conv, requests)
    if pool.ring is not None:
        pool.ring.forget(rows.masked_fill(~taken, pool.spare))
    boundaries = offsets[:-1] + chunks * CHUNK
    history = torch.arange(1 - pool.config.conv_kernel_size, 0, device=slots.device)
    return ExtendSnapshots(
        chunks=chunks.int(),
        slots=slots,
        rows=rows.masked_fill(chunks < 1, pool.spare),
        tokens=(boundaries.unsqueeze(1) + history).clamp(0, max(tokens - 1, 0)).flatten().long(),
    )
