"""The bound operations of a triple as the serving layer calls them, over pools whose slots may be apart in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any
from typing import Final

import torch

from gdn.capabilities import CapabilityRow
from gdn.errors import ConfigError
from gdn.registry import get_registry
from gdn.serving.pool import StatePool
from gdn.serving.storage import with_spare
from gdn.triple import ResolvedTriple
from gdn.types import Operation

if TYPE_CHECKING:
    from torch import Tensor

Function = Callable[..., Any]

_POOLS_OF: Final[dict[Operation, tuple[str, ...]]] = {
    "decode": ("ssm_states",),
    "packed_decode": ("ssm_states",),
    "replay_decode": ("ssm_states", "replayssm_d", "replayssm_k", "replayssm_g"),
    "extend": ("ssm_states",),
    "verify": ("ssm_states",),
    "tree_verify": ("ssm_states",),
    "conv_extend": ("conv_states",),
    "conv_update": ("conv_state",),
}
"""The arguments that are addressed by slot."""
_READ_ONLY: Final = ("verify", "tree_verify")


def bound(triple: ResolvedTriple, pool: StatePool, operation: Operation) -> Function | None:
    """The triple's function for pool views of `pool`, or None where nobody serves the operation.

    Where the views' slots are apart and the manifest row takes only dense ones, the function gathers and scatters.
    """
    function: Function | None = getattr(triple, operation)
    pools = _POOLS_OF.get(operation)
    if function is None or pools is None or not _is_strided(pool, operation) or _takes_strides(triple, operation):
        return function
    if operation == "extend":
        return _gathered_extend(function)
    index = "conv_state_indices" if operation == "conv_update" else "cache_indices"
    return gathered(function, pools, index, writes=operation not in _READ_ONLY)


def needed(triple: ResolvedTriple, pool: StatePool, operation: Operation) -> Function:
    """As `bound`, for an operation that the serving layer can't do without.

    Raises:
        ConfigError: nobody serves it.
    """
    function = bound(triple, pool, operation)
    if function is None:
        reasons = "; ".join(f"{r.backend}: {r.message}" for r in triple.report.rejected if r.operation == operation)
        raise ConfigError(f"no backend of this triple serves {operation}: {reasons}")
    return function


def chosen_row(triple: ResolvedTriple, operation: Operation) -> CapabilityRow | None:
    """The manifest row behind a bound operation; None for a triple that no report describes."""
    name, index = triple.report.chosen.get(operation), triple.report.rows.get(operation)
    for manifest in get_registry().manifests:
        if manifest.name == name and index is not None:
            return manifest.capabilities[index]
    return None


def _is_strided(pool: StatePool, operation: Operation) -> bool:
    state = pool.layer(0)
    return not (state.conv if operation.startswith("conv") else state.recurrent).is_contiguous()


def _takes_strides(triple: ResolvedTriple, operation: Operation) -> bool:
    row = chosen_row(triple, operation)
    return row is None or row.strided_state


def gathered(function: Function, pools: tuple[str, ...], index: str, *, writes: bool) -> Function:
    """`function` over dense copies of the slots that a call names; they are scattered back where it writes them."""

    def call(*args: Any, **arguments: Any) -> Any:
        views = {name: arguments[name] for name in pools}
        rows, local = _local(arguments[index], views[pools[0]].shape[0])
        dense = {name: with_spare(view).index_select(0, rows) for name, view in views.items()}
        result = function(*args, **{**arguments, **dense, index: local})
        if writes:
            for name, view in views.items():
                with_spare(view).index_copy_(0, rows, dense[name])
        return result

    return call


def _gathered_extend(extend: Function) -> Function:
    """As `gathered`, with N more dense slots behind the first N for the snapshots."""

    def call(*args: Any, **arguments: Any) -> Any:
        view, snapshot_slots = arguments["ssm_states"], arguments.get("snapshot_slots")
        rows, local = _local(arguments["cache_indices"], view.shape[0])
        count = rows.shape[0]
        if snapshot_slots is not None:
            chunks = arguments["snapshot_chunks"]
            kept, local_snapshots = _local(snapshot_slots.masked_fill(chunks < 0, -1), view.shape[0], first=count)
            rows, arguments = torch.cat((rows, kept)), {**arguments, "snapshot_slots": local_snapshots}
        dense = with_spare(view).index_select(0, rows)
        result = extend(*args, **{**arguments, "ssm_states": dense, "cache_indices": local})
        with_spare(view).index_copy_(0, rows, dense)
        return result

    return call


def _local(indices: Tensor, slots: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """`[N]` int64 rows of a pool with its spare row at `slots`, and the same requests' rows `first + n` of a copy."""
    padded = (indices < 0) | (indices >= slots)
    positions = torch.arange(first, first + indices.shape[0], dtype=torch.int32, device=indices.device)
    return indices.masked_fill(padded, slots).long(), positions.masked_fill(padded, -1)


def head_views(mixed_qkv: Tensor, key_heads: int, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views q, k `[1, T, HK, K]` and v `[1, T, HV, V]` of rows `[T, dim]` whose columns are contiguous."""
    tokens, dim = mixed_qkv.shape
    keys = key_heads * key_dim
    q, k, v = mixed_qkv.split_with_sizes((keys, keys, dim - 2 * keys), 1)
    shape = (1, tokens, key_heads, key_dim)
    return q.view(shape), k.view(shape), v.view(1, tokens, (dim - 2 * keys) // value_dim, value_dim)
