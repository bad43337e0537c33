"""Decode: one token for each request."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import NamedTuple

import torch

from gdn.serving.batch import Batch
from gdn.serving.operations import bound
from gdn.serving.operations import head_views
from gdn.serving.operations import needed
from gdn.serving.parameters import LayerParams
from gdn.serving.pool import StatePool
from gdn.triple import ResolvedTriple

if TYPE_CHECKING:
    from torch import Tensor


class _Plan(NamedTuple):
    """What all layers of one step share.

    Attributes:
        owner: the step that made it.
        rows: `[N]` int64 storage rows of the requests.
        snapshots: `[N]` int64 storage rows of their snapshots, or None.
        write_pos, force_flush: `[N]` int32 of the replay ring, or None.
    """

    owner: DecodeStep
    rows: Tensor
    snapshots: Tensor | None
    write_pos: Tensor | None
    force_flush: Tensor | None


class DecodeStep:
    """Convolution, then packed decode where bound, else split and decode; with a ring, replay decode."""

    def __init__(self, triple: ResolvedTriple, pool: StatePool) -> None:
        config = triple.config
        self._pool = pool
        self._layers = [pool.layer(index) for index in range(pool.num_layers)]
        self._heads = config.num_k_heads, config.head_k_dim, config.head_v_dim
        self._conv_update = needed(triple, pool, "conv_update")
        self._decode = needed(triple, pool, "decode")
        self._packed = bound(triple, pool, "packed_decode")
        self._replay = None if pool.ring is None else needed(triple, pool, "replay_decode")
        self._last = pool.num_layers - 1

    def __call__(
        self, layer: LayerParams, batch: Batch, mixed_qkv: Tensor, a: Tensor, b: Tensor, out: Tensor | None
    ) -> Tensor:
        index, slots = layer.layer_id, batch.slots
        state = self._layers[index]
        plan = None
        if self._replay is not None or batch.snapshot_slots is not None:
            plan = self._plan_of(batch, index)
        mixed = self._conv_update(
            x=mixed_qkv, conv_state=state.conv, weight=layer.conv_weight, bias=layer.bias,
            activation=layer.activation, conv_state_indices=slots,
        )  # fmt: skip
        result: Tensor
        if self._replay is not None and plan is not None:
            result = self._replay(
                mixed, a, b, A_log=layer.A_log, dt_bias=layer.dt_bias, ssm_states=state.recurrent, cache_indices=slots,
                replayssm_d=state.replay_d, replayssm_k=state.replay_k, replayssm_g=state.replay_g,
                replayssm_write_pos=plan.write_pos, replayssm_force_flush=plan.force_flush, out=out,
            )  # fmt: skip
        elif self._packed is not None:
            result = self._packed(
                mixed, a, b, A_log=layer.A_log, dt_bias=layer.dt_bias, ssm_states=state.recurrent, cache_indices=slots,
                out=out,
            )  # fmt: skip
        else:
            q, k, v = head_views(mixed, *self._heads)
            result = self._decode(
                q, k, v, a, b, A_log=layer.A_log, dt_bias=layer.dt_bias, ssm_states=state.recurrent,
                cache_indices=slots, out=out,
            )  # fmt: skip
        if plan is not None and index == self._last:
            self._close(plan)
        return result

    def _plan_of(self, batch: Batch, index: int) -> _Plan:
        plan = batch.plan
        if index == 0 or not isinstance(plan, _Plan) or plan.owner is not self:
            plan = batch.plan = self._open(batch)
        return plan

    def _open(self, batch: Batch) -> _Plan:
        pool, rows = self._pool, self._pool.rows_of(batch.slots)
        snapshots = write_pos = force_flush = None
        if batch.snapshot_slots is not None:
            snapshots = pool.rows_of(batch.snapshot_slots).masked_fill(rows == pool.spare, pool.spare)
        if pool.ring is not None:
            write_pos = pool.ring.cursors.index_select(0, rows)
            flush = torch.zeros_like(rows, dtype=torch.bool) if snapshots is None else snapshots != pool.spare
            force_flush = flush.int()
        return _Plan(self, rows, snapshots, write_pos, force_flush)

    def _close(self, plan: _Plan) -> None:
        """After the last layer: advance the cursors, then take the snapshots of all layers."""
        if self._pool.ring is not None and plan.write_pos is not None and plan.force_flush is not None:
            self._pool.ring.advance(plan.rows, plan.write_pos, plan.force_flush)
        if plan.snapshots is not None:
            self._pool.move(plan.rows, plan.snapshots)
