"""The door of the serving layer: one layer's attention for each kind of step, and the commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gdn.errors import ConfigError
from gdn.serving.batch import Batch
from gdn.serving.decode import DecodeStep
from gdn.serving.extend import ExtendStep
from gdn.serving.parameters import LayerParams
from gdn.serving.pool import StatePool
from gdn.serving.verify import VerifyStep
from gdn.triple import ResolvedTriple

if TYPE_CHECKING:
    from torch import Tensor


class GdnAttention:
    """Convolution, gating, split, recurrence, snapshots: what lies between a layer's projections, on any backend.

    Each forward method serves one layer; a step calls it for the layers in the order of their ids, with one batch. What
    the layers of a step share is derived at layer 0, and what happens once per step (cursors of the replay ring, decode
    snapshots) at the last. No method synchronises the host, and after one warm-up each can be captured in a CUDA graph:
    refresh the batch in place, replay.

    Arguments that the forward methods share:
        layer: the layer's parameters.
        batch: the step's plan.
        mixed_qkv: `[T, dim]`, rows `[all q | all k | all v]` before the convolution, activation dtype, any row stride.
        a, b: `[T, HV]`, gates before softplus and sigmoid.
        out: `[1, T, HV, V]`, contiguous, or None.

    Each returns `[1, T, HV, V]` in the activation dtype. Rows of padded requests, and rows after the last request, are
    zeros. Errors are those of the operations (`gdn.InputError`).

    Args:
        triple: what `gdn.resolve` returned.
        pool: a pool for the same geometry and state contract.

    Raises:
        ConfigError: the pool doesn't fit the triple, or nobody serves an operation that the layer needs.
    """

    def __init__(self, triple: ResolvedTriple, pool: StatePool) -> None:
        _check_fit(triple, pool)
        self.triple = triple
        self.pool = pool
        self._decode = DecodeStep(triple, pool)
        self._extend = ExtendStep(triple, pool)
        self._verify = VerifyStep(triple, pool)

    def forward_decode(
        self, layer: LayerParams, batch: Batch, mixed_qkv: Tensor, a: Tensor, b: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """One token for each request: T = N, row n is request n.

        Reads `slots` and `snapshot_slots` of the batch. With a replay ring the state in the pool may lag behind; it is
        current for requests that take a snapshot.
        """
        return self._decode(layer, batch, mixed_qkv, a, b, out)

    def forward_extend(
        self, layer: LayerParams, batch: Batch, mixed_qkv: Tensor, a: Tensor, b: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """Any number of tokens for each request, 0 included: whole prompts, parts of prompts, single tokens.

        Reads `slots`, `query_start_loc`, `has_initial_state`, `seq_lens_cpu`, `snapshot_slots` and `snapshot_lengths`
        of the batch.
        """
        return self._extend(layer, batch, mixed_qkv, a, b, out)

    def forward_verify(
        self, layer: LayerParams, batch: Batch, mixed_qkv: Tensor, a: Tensor, b: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """D draft tokens for each request: T = N * D with 1 <= D <= max_draft_tokens, request n from row n * D on.

        Neither windows nor states of the pool change until `commit`. Requests with fewer drafts are filled up to D.
        Reads `slots`, `rows`, `retrieve_next_token` and `retrieve_next_sibling` of the batch. In a tree draft 0 is the
        root and parents come before children.
        """
        return self._verify(layer, batch, mixed_qkv, a, b, out)

    def commit(self, batch: Batch, accepted: Tensor, nodes: Tensor | None = None) -> None:
        """Take over what was accepted of the last verify, for all layers: state and window after the last token.

        Where the tokens of a request cross a multiple of `batch.snapshot_interval`, the state at that multiple also
        goes to its `snapshot_slots`.

        Args:
            batch: the batch of the verify.
            accepted: `[N]` integers, accepted drafts of each request, 0 to D; 0 leaves it as it was.
            nodes: `[N, D]` integers, for trees: the draft at each depth of the accepted path. None: a chain.

        Raises:
            InputError: `snapshot_interval` without `positions`.
        """
        self._verify.commit(batch, accepted, nodes)


def _check_fit(triple: ResolvedTriple, pool: StatePool) -> None:
    geometry = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size", "replay_window")
    for name in geometry:
        ours, theirs = getattr(triple.config, name), getattr(pool.config, name)
        if ours != theirs:
            raise ConfigError(f"pool: expected {name}={ours}, as the triple was resolved for, got {theirs}")
    needs, has = triple.state, pool.contract
    if has.dtype != needs.dtype or has.layout != needs.layout:
        raise ConfigError(f"pool: expected {needs.dtype}/{needs.layout} states, got {has.dtype}/{has.layout}")
    if has.reserved_slots < needs.reserved_slots:
        raise ConfigError(
            f"pool: expected {needs.reserved_slots} reserved slots, got {has.reserved_slots}; "
            "build it with contract=triple.state"
        )
    strides = [pool.recurrent.stride(axis) * pool.recurrent.itemsize for axis in (0, 1)]
    if any(step % needs.alignment for step in (pool.recurrent.data_ptr(), *strides)):
        raise ConfigError(
            f"pool: expected states aligned to {needs.alignment} bytes; build it with contract=triple.state"
        )
    if torch.device(triple.device.torch_device).type != pool.device.type:
        raise ConfigError(f"pool: expected device {triple.device.torch_device}, got {pool.device}")
