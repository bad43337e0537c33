"""Verify: D draft tokens for each request, a chain or a tree, and the commit of what was accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import NamedTuple

from gdn.errors import InputError
from gdn.serving.batch import Batch
from gdn.serving.operations import Function
from gdn.serving.operations import head_views
from gdn.serving.operations import needed
from gdn.serving.parameters import LayerParams
from gdn.serving.pool import StatePool
from gdn.triple import ResolvedTriple

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.serving.drafts import DraftBuffers


class _Plan(NamedTuple):
    """What all layers of one step share: `function` verifies `steps` drafts for each of `requests`; tensors as the
    operations take them, `parents` None for chains.
    """

    owner: VerifyStep
    function: Function
    tokens: int
    requests: int
    steps: int
    rows: Tensor
    offsets: Tensor
    next_token: Tensor
    next_sibling: Tensor
    parents: Tensor | None


class VerifyStep:
    """Convolution over the drafts and verify. States and windows go to the verify buffers; the pool keeps its own."""

    def __init__(self, triple: ResolvedTriple, pool: StatePool) -> None:
        config = triple.config
        self._pool = pool
        self._layers = [pool.layer(index) for index in range(pool.num_layers)]
        self._heads = config.num_k_heads, config.head_k_dim, config.head_v_dim
        self._value_shape = config.num_v_heads, config.head_v_dim
        self._conv_update = needed(triple, pool, "conv_update")
        self._chain = needed(triple, pool, "verify")
        self._tree = None if triple.tree_verify is None else needed(triple, pool, "tree_verify")

    def __call__(
        self, layer: LayerParams, batch: Batch, mixed_qkv: Tensor, a: Tensor, b: Tensor, out: Tensor | None
    ) -> Tensor:
        index, tokens = layer.layer_id, mixed_qkv.shape[0]
        plan = batch.plan
        if index == 0 or not isinstance(plan, _Plan) or plan.owner is not self or plan.tokens != tokens:
            plan = batch.plan = self._open(batch, tokens)
        if not plan.requests:
            return mixed_qkv.new_empty((1, 0, *self._value_shape)) if out is None else out
        state, slots = self._layers[index], batch.slots
        mixed = self._conv_update(
            x=mixed_qkv.view(plan.requests, plan.steps, -1).transpose(1, 2), conv_state=state.conv,
            weight=layer.conv_weight, bias=layer.bias, activation=layer.activation, conv_state_indices=slots,
            intermediate_conv_window=state.windows, intermediate_state_indices=plan.rows,
            retrieve_next_token=plan.next_token, retrieve_next_sibling=plan.next_sibling,
            retrieve_parent_token=plan.parents,
        ).transpose(1, 2).reshape(tokens, -1)  # fmt: skip
        q, k, v = head_views(mixed, *self._heads)
        result: Tensor = plan.function(
            layer.A_log, layer.dt_bias, q, k, v, a, b,
            ssm_states=state.recurrent, cache_indices=slots, query_start_loc=plan.offsets,
            intermediate_states_buffer=state.steps, intermediate_state_indices=plan.rows, cache_steps=plan.steps,
            retrieve_parent_token=plan.parents, out=out,
        )  # fmt: skip
        return result

    def commit(self, batch: Batch, accepted: Tensor, nodes: Tensor | None) -> None:
        """See `GdnAttention.commit`."""
        crossings = _crossings(batch, accepted, nodes)
        self._pool.commit(batch.slots, _node_at(nodes, accepted - 1), rows=batch.rows)
        if batch.snapshot_slots is not None and crossings is not None:
            padded = self._pool.rows_of(batch.slots) == self._pool.spare
            self._pool.commit(batch.snapshot_slots, crossings.masked_fill(padded, -1), rows=batch.rows)

    def _open(self, batch: Batch, tokens: int) -> _Plan:
        drafts, requests = self._pool.require_drafts(), batch.slots.shape[0]
        steps = _steps(drafts, batch, tokens) if requests else 1
        tables = drafts.tables[steps]
        rows = drafts.rows[:requests] if batch.rows is None else batch.rows
        following, siblings, parents = batch.retrieve_next_token, batch.retrieve_next_sibling, None
        function = self._chain
        if following is None or siblings is None:
            # A chain goes as the tree it is: with links the convolution leaves the pool's window alone.
            following, siblings = tables.next_token[:requests], tables.next_sibling[:requests]
        elif self._tree is None:
            raise InputError("retrieve_next_token: expected None, no backend of this triple verifies trees")
        else:
            parents, function = tables.parents[:requests], self._tree
        if self._pool.ring is not None:
            self._pool.fold(self._pool.rows_of(batch.slots))
        offsets = tables.offsets[: requests + 1]
        return _Plan(self, function, tokens, requests, steps, rows, offsets, following, siblings, parents)


def _steps(drafts: DraftBuffers, batch: Batch, tokens: int) -> int:
    """D of a call: the same number of tokens for each request, padding included."""
    requests, room = batch.slots.shape[0], drafts.rows.shape[0]
    if requests > room:
        raise InputError(f"slots: expected at most max_requests={room} requests, got {requests}")
    steps, rest = divmod(tokens, requests)
    if rest or steps not in drafts.tables:
        limit = f"{requests} requests times 1 to max_draft_tokens={drafts.steps} drafts"
        raise InputError(f"mixed_qkv: expected rows for {limit}, got {tokens}")
    return steps


def _crossings(batch: Batch, accepted: Tensor, nodes: Tensor | None) -> Tensor | None:
    """`[N]`, the draft after which each request stands at a multiple of the snapshot interval, -1 for none; the last
    one where there are several. None without a plan.
    """
    if batch.snapshot_slots is None or not batch.snapshot_interval:
        return None
    if batch.positions is None:
        raise InputError("positions: expected [N] tokens behind each request for snapshot_interval, got None")
    boundary = (batch.positions + accepted) // batch.snapshot_interval * batch.snapshot_interval
    return _node_at(nodes, boundary - batch.positions - 1).masked_fill(boundary <= batch.positions, -1)


def _node_at(nodes: Tensor | None, depth: Tensor) -> Tensor:
    """The draft at a depth of each accepted path, negative depths as they are; in a chain the depth itself."""
    if nodes is None:
        return depth
    found = nodes.gather(1, depth.clamp(0, nodes.shape[1] - 1).long().unsqueeze(1)).squeeze(1)
    return found.masked_fill(depth < 0, -1)
