"""Extend: any number of tokens for each request, prefill in one piece or in several, decode rows among them."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

from gdn.errors import ConfigError
from gdn.errors import InputError
from gdn.serving.batch import Batch
from gdn.serving.operations import bound
from gdn.serving.operations import chosen_row
from gdn.serving.operations import head_views
from gdn.serving.operations import needed
from gdn.serving.parameters import LayerParams
from gdn.serving.pool import StatePool
from gdn.serving.snapshots import ExtendSnapshots
from gdn.serving.snapshots import plan_snapshots
from gdn.triple import ResolvedTriple

if TYPE_CHECKING:
    from torch import Tensor


class _Plan(NamedTuple):
    """What all layers of one step share."""

    owner: ExtendStep
    snapshots: ExtendSnapshots | None


class ExtendStep:
    """Convolution, split, gating, extend, with snapshots at chunk boundaries."""

    def __init__(self, triple: ResolvedTriple, pool: StatePool) -> None:
        config = triple.config
        self._pool = pool
        self._conv = list(pool.conv)
        self._layers = [pool.layer(index) for index in range(pool.num_layers)]
        self._heads = config.num_k_heads, config.head_k_dim, config.head_v_dim
        self._conv_extend = needed(triple, pool, "conv_extend")
        self._gating = needed(triple, pool, "gating")
        self._extend = needed(triple, pool, "extend")
        self._split = bound(triple, pool, "qkv_split")
        row = chosen_row(triple, "extend")
        self._snapshots_served = row is None or row.state_checkpoints

    def __call__(
        self, layer: LayerParams, batch: Batch, mixed_qkv: Tensor, a: Tensor, b: Tensor, out: Tensor | None
    ) -> Tensor:
        index = layer.layer_id
        state, plan = self._layers[index], self._plan_of(batch, index, mixed_qkv.shape[0])
        snapshot: dict[str, Any] = {}
        if plan.snapshots is not None:
            plan.snapshots.store_windows(self._conv[index], mixed_qkv)
            snapshot = {"snapshot_chunks": plan.snapshots.chunks, "snapshot_slots": plan.snapshots.slots}
        mixed = self._conv_extend(
            x=mixed_qkv.t(), weight=layer.conv_weight, bias=layer.bias, conv_states=state.conv,
            query_start_loc=batch.query_start_loc, cache_indices=batch.slots,
            has_initial_state=batch.has_initial_state, activation=layer.activation, seq_lens_cpu=batch.seq_lens_cpu,
        ).t()  # fmt: skip
        q, k, v = head_views(mixed, *self._heads) if self._split is None else self._split(mixed)
        g, beta = self._gating(layer.A_log, a, b, layer.dt_bias)
        result = self._extend(
            q, k, v, g, beta, ssm_states=state.recurrent, cache_indices=batch.slots,
            query_start_loc=batch.query_start_loc, out=out, seq_lens_cpu=batch.seq_lens_cpu, **snapshot,
        )  # fmt: skip
        output: Tensor = result.output
        return output

    def _plan_of(self, batch: Batch, index: int, tokens: int) -> _Plan:
        plan = batch.plan
        if index == 0 or not isinstance(plan, _Plan) or plan.owner is not self:
            plan = batch.plan = self._open(batch, tokens)
        return plan

    def _open(self, batch: Batch, tokens: int) -> _Plan:
        self._check(batch)
        pool, rows = self._pool, self._pool.rows_of(batch.slots)
        continued = rows
        if batch.has_initial_state is not None:
            pool.clear(rows.masked_fill(batch.has_initial_state, pool.spare))
            continued = rows.masked_fill(~batch.has_initial_state, pool.spare)
        pool.fold(continued)
        return _Plan(self, None if batch.snapshot_slots is None else plan_snapshots(pool, batch, rows, tokens))

    def _check(self, batch: Batch) -> None:
        if batch.query_start_loc is None:
            raise InputError("query_start_loc: expected [N+1] token boundaries for an extend, got None")
        if batch.snapshot_slots is None:
            return
        if batch.snapshot_lengths is None:
            raise InputError("snapshot_lengths: expected [N] tokens of the extend for snapshot_slots, got None")
        if not self._snapshots_served:
            advice = "resolve with state_checkpoints=True"
            raise ConfigError(f"snapshot_slots: the extend of this triple takes no snapshots; {advice}")
