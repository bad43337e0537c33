"""What verify leaves behind for each request row until the commit, and the constant tables of its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import NamedTuple

import torch

from gdn.serving.storage import allocate
from gdn.serving.storage import bytes_of

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.config import GdnConfig


class DraftTables(NamedTuple):
    """Index tensors of a verify call with D drafts for each of R requests; slices of them serve fewer.

    Attributes:
        offsets: `[R+1]` int32, query_start_loc.
        next_token: `[R, D]` int32, the links of a chain: draft t is followed by t + 1.
        next_sibling: `[R, D]` int32, -1.
        parents: `[R, D]` int32, written by the convolution of a tree.
    """

    offsets: Tensor
    next_token: Tensor
    next_sibling: Tensor
    parents: Tensor


class DraftBuffers:
    """States and windows after each draft.

    Attributes:
        recurrent: `[layers, R, D, HV, V, K]` in the state's dtype.
        windows: `[layers, R, D, dim, W-1]` in the convolution state's dtype.
        rows: `[R]` int32, 0 .. R-1: request n of a batch owns row n where the batch says nothing else.
        tables: by number of drafts, 1 .. D.
    """

    def __init__(
        self, config: GdnConfig, layers: int, requests: int, dtype: torch.dtype, conv_dtype: torch.dtype,
        device: torch.device, alignment: int,
    ) -> None:  # fmt: skip
        drafts = config.max_draft_tokens
        state = (config.num_v_heads, config.head_v_dim, config.head_k_dim)
        window = (config.conv_dim, config.conv_kernel_size - 1)
        steps = allocate(layers, requests * drafts, state, dtype, device, alignment=alignment)
        self.recurrent = steps.unflatten(1, (requests, drafts))
        self.windows = allocate(layers, requests * drafts, window, conv_dtype, device).unflatten(1, (requests, drafts))
        self.rows = torch.arange(requests, dtype=torch.int32, device=device)
        self.tables = {count: _tables(requests, count, device) for count in range(1, drafts + 1)}

    @property
    def steps(self) -> int:
        """D."""
        return int(self.recurrent.shape[2])

    @property
    def nbytes(self) -> int:
        return bytes_of(self.recurrent, self.windows)

    def find(self, rows: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Where step `steps[n]` of row `rows[n]` lies in the buffers with both axes flattened, and which n exist."""
        requests = self.recurrent.shape[1]
        exists = (rows >= 0) & (rows < requests) & (steps >= 0) & (steps < self.steps)
        return (rows.long() * self.steps + steps).masked_fill(~exists, 0), exists


def _tables(requests: int, drafts: int, device: torch.device) -> DraftTables:
    offsets = torch.arange(requests + 1, dtype=torch.int32, device=device) * drafts
    following = torch.arange(1, drafts + 1, dtype=torch.int32, device=device)
    following[-1] = -1
    none = torch.full((requests, drafts), -1, dtype=torch.int32, device=device)
    return DraftTables(offsets, following.repeat(requests, 1), none, torch.zeros_like(none))
