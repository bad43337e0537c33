"""Checks of values that the operations themselves never read back: slots, offsets, parents, gates, cursors.

For tests and bug reports (`ResolvedTriple.checked`): every call waits for the device. An index outside the pool is
inert in the operations; here everything but -1 is refused, since it is nearly always a mistake.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

from gdn import ops
from gdn._arguments import refuse
from gdn.types import CHUNK

Values = dict[str, Any]


def checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, the operation `name`, behind its value checks.

    Raises:
        InputError: when called with values that make no sense, before `function` runs.
    """
    protocol, checks = _OPERATIONS[name]
    full = inspect.signature(protocol.__call__)
    signature = full.replace(parameters=list(full.parameters.values())[1:])

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for check in checks:
            check(bound.arguments)
        return function(*args, **kwargs)

    return call


def _written_slots(values: Values) -> None:
    """Slots exist, or are -1; no two rows write the same one."""
    _slots("cache_indices", values["cache_indices"], values["ssm_states"].shape[0], distinct=True)


def _read_slots(values: Values) -> None:
    _slots("cache_indices", values["cache_indices"], values["ssm_states"].shape[0], distinct=False)


def _conv_slots(values: Values) -> None:
    _slots("cache_indices", values["cache_indices"], values["conv_states"].shape[0], distinct=True)


def _conv_update_slots(values: Values) -> None:
    if values["conv_state_indices"] is not None:
        _slots("conv_state_indices", values["conv_state_indices"], values["conv_state"].shape[0], distinct=True)


def _slots(name: str, indices: Any, count: int, *, distinct: bool) -> list[int]:
    real = [index for index in indices.tolist() if index != -1]
    for index in real:
        if not 0 <= index < count:
            refuse(name, f"-1 or a slot in [0, {count})", str(index))
    if distinct and (twice := _first_repeated(real)) is not None:
        refuse(name, "no slot named by two rows", f"slot {twice} twice")
    return real


def _first_repeated(values: list[int]) -> int | None:
    return next((value for value in values if values.count(value) > 1), None)


def _offsets(values: Values) -> None:
    """Offsets start at 0, never decrease and end within the tokens; host lengths agree with them."""
    if values["query_start_loc"] is None:
        return
    offsets = values["query_start_loc"].tolist()
    tokens = values["x"].shape[1] if "x" in values else values["v"].shape[1]
    if offsets[0] != 0:
        refuse("query_start_loc", "0 as its first value", str(offsets[0]))
    lengths = [after - before for before, after in itertools.pairwise(offsets)]
    if any(length < 0 for length in lengths):
        refuse("query_start_loc", "values that never decrease", str(offsets))
    if offsets[-1] > tokens:
        refuse("query_start_loc", f"a last value of at most T={tokens}", str(offsets[-1]))
    given = values.get("seq_lens_cpu")
    if given is not None and list(given) != lengths:
        refuse("seq_lens_cpu", f"the lengths {lengths} of query_start_loc", str(list(given)))


def _lengths(values: Values) -> list[int]:
    offsets = values["query_start_loc"].tolist()
    return [after - before for before, after in itertools.pairwise(offsets)]


def _one_token_each(values: Values) -> None:
    if values["query_start_loc"] is not None and (longest := max(_lengths(values), default=0)) > 1:
        refuse("query_start_loc", "at most one token for each request of decode", f"a length of {longest}")


def _gates(values: Values) -> None:
    """g is a log decay (<= 0) and beta a share of 1: the linear decay exp(g) passed as g would let the state grow."""
    g, beta = values["g"], values["beta"]
    if g.numel() and not bool((g <= 0).all()):
        refuse("g", "log decays, all <= 0", f"a maximum of {g.max().item():.4g}")
    if beta.numel() and not bool(((beta >= 0) & (beta <= 1)).all()):
        refuse("beta", "values in [0, 1]", f"values from {beta.min().item():.4g} to {beta.max().item():.4g}")


def _snapshots(values: Values) -> None:
    if values["snapshot_chunks"] is None:
        return
    count = values["ssm_states"].shape[0]
    own = values["cache_indices"].tolist()
    rows = zip(values["snapshot_chunks"].tolist(), values["snapshot_slots"].tolist(), _lengths(values), strict=True)
    targets = []
    for sequence, (chunk, slot, length) in enumerate(rows):
        chunks = -(-length // CHUNK)
        if not -1 <= chunk <= chunks:
            refuse("snapshot_chunks", f"-1 or a chunk in [0, {chunks}] for sequence {sequence}", str(chunk))
        if chunk >= 0:
            if not 0 <= slot < count:
                refuse("snapshot_slots", f"a slot in [0, {count}) for sequence {sequence}", str(slot))
            if slot in own:
                refuse("snapshot_slots", "slots that hold no sequence of this call", f"slot {slot}")
            targets.append(slot)
    if (twice := _first_repeated(targets)) is not None:
        refuse("snapshot_slots", "no slot named twice", f"slot {twice} twice")


def _drafts(values: Values) -> None:
    """No request has more drafts than cache_steps; parents come before their children; buffer rows are distinct."""
    lengths, steps = _lengths(values), values["cache_steps"]
    if max(lengths, default=0) > steps:
        refuse("query_start_loc", f"lengths of at most cache_steps={steps}", str(max(lengths)))
    if values["intermediate_states_buffer"] is not None:
        rows = values["intermediate_states_buffer"].shape[0]
        real = [
            row for row, length in zip(values["intermediate_state_indices"].tolist(), lengths, strict=True) if length
        ]
        _rows("intermediate_state_indices", real, rows)
    if values["retrieve_parent_token"] is not None:
        for request, (parents, length) in enumerate(
            zip(values["retrieve_parent_token"].tolist(), lengths, strict=True)
        ):
            for draft in range(1, length):
                if not 0 <= parents[draft] < draft:
                    where = f"for draft {draft} of request {request}"
                    refuse("retrieve_parent_token", f"an earlier draft {where}", str(parents[draft]))


def _rows(name: str, real: list[int], count: int) -> None:
    """-1 stands for a padded request, which stores nothing."""
    kept = [row for row in real if row != -1]
    for row in kept:
        if not 0 <= row < count:
            refuse(name, f"-1 or a row in [0, {count})", str(row))
    if (twice := _first_repeated(kept)) is not None:
        refuse(name, "no row named twice", f"row {twice} twice")


def _cursors(values: Values) -> None:
    window = values["replayssm_d"].shape[2]
    pairs = zip(values["replayssm_write_pos"].tolist(), values["cache_indices"].tolist(), strict=True)
    for position, slot in pairs:
        if slot != -1 and not 0 <= position < window:
            refuse("replayssm_write_pos", f"positions in [0, L={window})", str(position))


def _links(values: Values) -> None:
    """Children and siblings come after the draft that links them."""
    for name in ("retrieve_next_token", "retrieve_next_sibling"):
        if values[name] is None:
            continue
        for request, links in enumerate(values[name].tolist()):
            for draft, link in enumerate(links):
                if link != -1 and not draft < link < len(links):
                    refuse(name, f"-1 or a later draft for draft {draft} of request {request}", str(link))


_OPERATIONS: dict[str, tuple[Any, tuple[Callable[[Values], None], ...]]] = {
    "decode": (ops.Decode, (_offsets, _one_token_each, _written_slots)),
    "packed_decode": (ops.PackedDecode, (_written_slots,)),
    "replay_decode": (ops.ReplayDecode, (_written_slots, _cursors)),
    "extend": (ops.Extend, (_offsets, _written_slots, _gates, _snapshots)),
    "verify": (ops.Verify, (_offsets, _read_slots, _drafts)),
    "tree_verify": (ops.Verify, (_offsets, _read_slots, _drafts)),
    "conv_extend": (ops.ConvExtend, (_offsets, _conv_slots)),
    "conv_update": (ops.ConvUpdate, (_conv_update_slots, _links)),
    "gating": (ops.Gating, ()),
    "qkv_split": (ops.QkvSplit, ()),
}
