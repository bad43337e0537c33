"""The ReplaySSM ring of a pool: the updates since each slot's checkpoint, and how many there are.

With m entries, g_j their log decays, d_j and k_j their updates and normalised keys, the live state is
S = e^(g_0 + .. + g_(m-1)) S0 + sum_j e^(g_(j+1) + .. + g_(m-1)) d_j k_j^T (see `gdn.ops.ReplayDecode`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gdn.serving.storage import allocate
from gdn.serving.storage import bytes_of

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.config import GdnConfig


class ReplayRing:
    """Rings of all layers over one cursor per slot.

    Attributes:
        d: `[layers, slots, HV, L, V]` in the state's dtype.
        k: `[layers, slots, HK, L, K]` in the state's dtype.
        g: `[layers, slots, HV, L]` fp32.
        cursors: `[slots]` int32, valid entries of each slot's ring, shared by the layers.
    """

    def __init__(self, config: GdnConfig, layers: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        length = config.replay_window
        self.length = length
        self.d = allocate(layers, slots, (config.num_v_heads, length, config.head_v_dim), dtype, device)
        self.k = allocate(layers, slots, (config.num_k_heads, length, config.head_k_dim), dtype, device)
        self.g = allocate(layers, slots, (config.num_v_heads, length), torch.float32, device)
        self.cursors = torch.zeros(slots, dtype=torch.int32, device=device)
        self._positions = torch.arange(length, device=device)

    @property
    def nbytes(self) -> int:
        return bytes_of(self.d, self.k, self.g, self.cursors)

    def forget(self, rows: Tensor) -> None:
        """Empty the rings of `rows [N]` int64."""
        self.cursors.index_fill_(0, rows, 0)

    def advance(self, rows: Tensor, write_pos: Tensor, force_flush: Tensor) -> None:
        """Move the cursors of `rows [N]` past the token just decoded at `write_pos [N]`: 0 after a flush."""
        flushed = (write_pos >= self.length - 1) | (force_flush != 0)
        self.cursors.index_copy_(0, rows, (write_pos + 1).masked_fill(flushed, 0))

    def fold(self, recurrent: Tensor, rows: Tensor) -> None:
        """Bring the states `recurrent [layers, slots, HV, V, K]` of `rows [N]` up to date and empty their rings."""
        beyond = self._positions >= self.cursors.index_select(0, rows).unsqueeze(1)
        for layer in range(recurrent.shape[0]):
            self._fold_layer(layer, recurrent[layer], rows, beyond)
        self.forget(rows)

    def _fold_layer(self, layer: int, recurrent: Tensor, rows: Tensor, beyond: Tensor) -> None:
        ratio = self.d.shape[2] // self.k.shape[2]
        g = self.g[layer].index_select(0, rows).masked_fill_(beyond.unsqueeze(1), 0.0)
        d = self.d[layer].index_select(0, rows).float().masked_fill_(beyond[:, None, :, None], 0.0)
        k = self.k[layer].index_select(0, rows).float().masked_fill_(beyond[:, None, :, None], 0.0)
        later = g.flip(-1).cumsum(-1).flip(-1)  # entry j: g_j + .. + g_(m-1), summed so that -inf stays harmless
        decays = torch.cat((later[..., 1:], torch.zeros_like(g[..., :1])), dim=-1).exp()
        total = later[..., :1].exp().unsqueeze(-1)
        states = recurrent.index_select(0, rows).float().mul_(total)
        keys = k.unsqueeze(2).expand(-1, -1, ratio, -1, -1).flatten(1, 2)
        states += (d * decays.unsqueeze(-1)).transpose(-1, -2) @ keys
        recurrent.index_copy_(0, rows, states.to(recurrent.dtype))
