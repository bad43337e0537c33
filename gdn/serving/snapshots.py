"""Snapshots inside an extend: at which chunk of which request, and the conv window there."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import NamedTuple

import torch

from gdn.errors import InputError
from gdn.serving.batch import Batch
from gdn.serving.pool import StatePool
from gdn.types import CHUNK

if TYPE_CHECKING:
    from torch import Tensor


class ExtendSnapshots(NamedTuple):
    """The snapshots of one extend.

    Attributes:
        chunks: `[N]` int32 for `gdn.ops.Extend`, -1 for none.
        slots: `[N]`, where each snapshot goes.
        rows: `[N]` int64 storage rows of these slots, the spare one for none.
        tokens: `[N, W-1]` int64, token rows of the window at each snapshot.
        at_start: `[N, 1, 1]` bool: the snapshot is the window that the slot holds before the call.
    """

    chunks: Tensor
    slots: Tensor
    rows: Tensor
    tokens: Tensor
    at_start: Tensor

    def store_windows(self, conv: Tensor, requests: Tensor, mixed_qkv: Tensor) -> None:
        """Write the windows into `conv [slots+1, dim, W-1]` before the convolution moves on.

        Args:
            conv: one layer's windows, storage rows.
            requests: `[N]` int64 storage rows of the requests.
            mixed_qkv: `[T, dim]`, inputs of the convolution.
        """
        windows = conv.index_select(0, requests)
        if mixed_qkv.shape[0]:
            inputs = mixed_qkv.index_select(0, self.tokens.flatten()).view(*self.tokens.shape, mixed_qkv.shape[1])
            windows = torch.where(self.at_start, windows, inputs.transpose(1, 2).to(conv.dtype))
        conv.index_copy_(0, self.rows, windows)


def plan_snapshots(pool: StatePool, batch: Batch, requests: Tensor, tokens: int) -> ExtendSnapshots:
    """Where the snapshots of an extend lie.

    A snapshot after `length` tokens of the call holds the state entering chunk `length // 64`, which for a request
    that ends there is its final state, and the W-1 inputs before that token.

    Args:
        pool: the pool.
        batch: a batch with a snapshot plan.
        requests: `[N]` int64 storage rows of the requests.
        tokens: T.

    Raises:
        InputError: the batch says where to put snapshots, not when to take them.
    """
    lengths, slots, offsets = batch.snapshot_lengths, batch.snapshot_slots, batch.query_start_loc
    assert slots is not None
    assert offsets is not None
    if lengths is None:
        raise InputError("snapshot_lengths: expected [N] tokens of the extend for snapshot_slots, got None")
    taken = (lengths >= 0) & (lengths <= offsets.diff()) & (requests != pool.spare)
    chunks = (lengths.clamp(min=0) // CHUNK).masked_fill(~taken, -1)
    history = torch.arange(1 - pool.config.conv_kernel_size, 0, device=slots.device)
    boundary = offsets[:-1] + chunks * CHUNK
    return ExtendSnapshots(
        chunks=chunks.int(),
        slots=slots,
        rows=pool.rows_of(slots).masked_fill(~taken, pool.spare),
        tokens=(boundary.unsqueeze(1) + history).clamp(0, max(tokens - 1, 0)).long(),
        at_start=(chunks <= 0)[:, None, None],
    )
