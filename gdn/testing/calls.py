"""Turn a case into the arguments of one operation: fresh random values, NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any
from typing import Final

import torch

from gdn.testing.case import Case
from gdn.testing.reference.projection import log_decay
from gdn.testing.tensors import CANARY
from gdn.testing.tensors import DTYPES
from gdn.testing.tensors import TensorFactory

if TYPE_CHECKING:
    from torch import Tensor

WRITTEN: Final = frozenset({
    "ssm_states", "out", "intermediate_states_buffer", "replayssm_d", "replayssm_k", "replayssm_g", "conv_states",
    "conv_state", "intermediate_conv_window", "retrieve_parent_token",
})  # fmt: skip
"""Arguments that an operation may write."""


@dataclass(frozen=True)
class Call:
    """One call of an operation."""

    operation: str
    case: Case
    arguments: dict[str, Any]

    def copy(self) -> Call:
        """The same call over copies of what it writes, strides and gaps included."""
        return Call(
            self.operation,
            self.case,
            {name: _clone(value) if name in WRITTEN else value for name, value in self.arguments.items()},
        )


def _clone(value: Any) -> Any:
    """A copy with the same strides, over a copy of all memory that the tensor's storage holds."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = torch.as_strided(value, (value.untyped_storage().nbytes() // value.element_size(),), (1,), 0).clone()
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())


def build_call(operation: str, case: Case, *, seed: int, device: Any = "cpu") -> Call:
    """The arguments of `operation` in the situation `case`."""
    return Call(operation, case, _BUILDERS[operation](case, TensorFactory(seed, device, views=case.views)))


class _Requests:
    """Who takes part: slots, which rows are real, where tokens begin."""

    def __init__(self, case: Case, make: TensorFactory, lengths: tuple[int, ...]) -> None:
        self.count = len(lengths)
        self.lengths = lengths
        self.pool_slots = case.pool_slots if case.pool_slots is not None else self.count + 3
        self.slots = case.slots if case.slots is not None else tuple(make.permutation(self.pool_slots)[: self.count])
        self.real = [0 <= slot < self.pool_slots for slot in self.slots]
        self.offsets = [0]
        for length in lengths:
            self.offsets.append(self.offsets[-1] + length)
        self.tokens = self.offsets[-1] + case.tail
        self.index = case.index

    def real_rows(self) -> Tensor:
        """`[T]` bool: rows of real requests."""
        rows = torch.zeros(self.tokens, dtype=torch.bool)
        for request, real in enumerate(self.real):
            rows[self.offsets[request] : self.offsets[request + 1]] = real
        return rows


def _poisoned(values: Tensor, real: Tensor) -> Tensor:
    """NaN in the rows that belong to nobody."""
    return torch.where(real.view(-1, *[1] * (values.dim() - 1)), values, torch.nan)


def _tokens(case: Case, make: TensorFactory, real: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v `[T, heads, dim]` and a, b `[T, HV]`, fp32. Every fifth q and k is so short that the epsilon counts."""
    HK, HV, K, V = case.heads
    count = real.shape[0]
    short = torch.where(torch.arange(count) % 5 == 3, 1e-3, 1.0).view(-1, 1, 1)
    q, k, v = make.normal(count, HK, K) * short, make.normal(count, HK, K) * short, make.normal(count, HV, V)
    parts = (q, k, v, make.normal(count, HV), make.normal(count, HV) * 2)
    return tuple(_poisoned(part, real) for part in parts)  # type: ignore[return-value]


_RATES: Final = {"usual": (-2.0, 0.5), "none": (-80.0, -70.0), "slow": (-9.0, -7.0), "strong": (2.5, 3.5)}


def _parameters(case: Case, make: TensorFactory) -> dict[str, Tensor]:
    dtype = DTYPES[case.activation if case.parameters == "activation" else "float32"]
    low, high = _RATES.get(case.gates, (-2.0, 0.5))
    heads = case.heads.HV
    return {
        "A_log": make.placed(make.uniform(low, high, heads), dtype),
        "dt_bias": make.placed(make.normal(heads), dtype),
    }


def _state_pool(case: Case, make: TensorFactory, requests: _Requests) -> Tensor:
    """NaN in every slot that no real request names."""
    heads = case.heads
    pool = make.pool(
        requests.pool_slots + case.reserved, (heads.HV, heads.V, heads.K), case.slot_gap, DTYPES[case.state], torch.nan
    )  # fmt: skip
    for slot, real in zip(requests.slots, requests.real, strict=True):
        if real:
            pool[slot].copy_(make.normal(heads.HV, heads.V, heads.K) * 0.5)
    return pool


def _out(case: Case, make: TensorFactory, *shape: int) -> dict[str, Tensor]:
    if not case.out:
        return {}
    return {"out": make.placed(torch.full(shape, torch.nan), DTYPES[case.activation])}


def _decode(case: Case, make: TensorFactory) -> dict[str, Any]:
    lengths = tuple(min(length, 1) for length in case.lengths) if case.offsets else (1,) * len(case.lengths)
    requests = _Requests(case if case.offsets else case.but(tail=0), make, lengths)
    real = requests.real_rows()
    q, k, v, a, b = _tokens(case, make, real)
    activation = DTYPES[case.activation]
    q, k, v = make.columns((q, k, v), activation)
    a, b = make.columns((a, b), activation)
    arguments: dict[str, Any] = {"q": q[None], "k": k[None], "v": v[None], "a": a, "b": b}
    arguments |= _parameters(case, make)
    arguments["ssm_states"] = _state_pool(case, make, requests)
    arguments["cache_indices"] = make.indices(requests.slots, case.index)
    if case.offsets:
        arguments["query_start_loc"] = make.indices(requests.offsets, case.index)
    heads = case.heads
    return arguments | {"scale": case.scale} | _out(case, make, 1, requests.tokens, heads.HV, heads.V)


def _packed_decode(case: Case, make: TensorFactory) -> dict[str, Any]:
    requests = _Requests(case.but(tail=0), make, (1,) * len(case.lengths))
    q, k, v, a, b = _tokens(case, make, requests.real_rows())
    rows = torch.cat([part.flatten(1) for part in (q, k, v)], dim=1)
    activation = DTYPES[case.activation]
    (mixed_qkv,) = make.columns((rows,), activation)
    a, b = make.columns((a, b), activation)
    arguments: dict[str, Any] = {"mixed_qkv": mixed_qkv, "a": a, "b": b}
    arguments |= _parameters(case, make)
    arguments["ssm_states"] = _state_pool(case, make, requests)
    arguments["cache_indices"] = make.indices(requests.slots, case.index)
    heads = case.heads
    named = {"num_v_heads": heads.HV, "head_v_dim": heads.V} if case.out else {}
    return arguments | named | {"scale": case.scale} | _out(case, make, 1, requests.count, heads.HV, heads.V)


def _replay_decode(case: Case, make: TensorFactory) -> dict[str, Any]:
    arguments = _packed_decode(case, make)
    (HK, HV, K, V), L = case.heads, case.ring
    slots = arguments["ssm_states"].shape[0]
    count, state = len(case.lengths), DTYPES[case.state]
    named = arguments["cache_indices"].tolist()
    cursors = case.cursors if case.cursors is not None else tuple(row % L for row in range(count))
    rings = (torch.full((slots, HV, L, V), torch.nan), torch.full((slots, HK, L, K), torch.nan))
    decays = torch.full((slots, HV, L), torch.nan)
    for slot, cursor in zip(named, cursors, strict=True):
        if 0 <= slot < slots:
            rings[0][slot, :, :cursor] = make.normal(HV, cursor, V) * 0.5
            rings[1][slot, :, :cursor] = torch.nn.functional.normalize(make.normal(HK, cursor, K), dim=-1)
            decays[slot, :, :cursor] = -make.uniform(0.0, 1.0, HV, cursor)
            if case.gates == "forgetting":
                decays[slot, :, :cursor][:, 1::3] = -torch.inf
    arguments["replayssm_d"] = make.placed(rings[0], state)
    arguments["replayssm_k"] = make.placed(rings[1], state)
    arguments["replayssm_g"] = make.placed(decays, torch.float32)
    arguments["replayssm_write_pos"] = torch.tensor(cursors, dtype=torch.int32, device=make.device)
    if case.forced is not None:
        arguments["replayssm_force_flush"] = torch.tensor(case.forced, dtype=torch.int32, device=make.device)
    return arguments


def _extend(case: Case, make: TensorFactory) -> dict[str, Any]:
    snapshots = case.snapshots
    requests = _Requests(case, make, case.lengths)
    if case.pool_slots is None and snapshots is not None:
        requests.pool_slots += requests.count
    real = requests.real_rows()
    q, k, v, a, b = _tokens(case, make, real)
    activation, heads = DTYPES[case.activation], case.heads
    q, k, v = make.columns((q, k, v), activation)
    parameters = _parameters(case, make)
    g = _poisoned(log_decay(parameters["A_log"].cpu(), a.nan_to_num(), parameters["dt_bias"].cpu()).float(), real)
    if case.gates == "none":
        g = torch.where(g.isnan(), g, 0.0)
    if case.gates == "forgetting":
        g = torch.where((torch.arange(requests.tokens) % 7 == 2).unsqueeze(1) & ~g.isnan(), -torch.inf, g)
    g, beta = make.columns((g, torch.sigmoid(b)), torch.float32)
    arguments: dict[str, Any] = {"q": q[None], "k": k[None], "v": v[None], "g": g[None], "beta": beta[None]}
    arguments["ssm_states"] = _state_pool(case, make, requests)
    arguments["cache_indices"] = make.indices(requests.slots, case.index)
    arguments["query_start_loc"] = make.indices(requests.offsets, case.index)
    if case.chunk_states:
        arguments["return_chunk_states"] = True
    if snapshots is not None:
        free = [slot for slot in range(requests.pool_slots) if slot not in requests.slots]
        arguments["snapshot_chunks"] = make.indices(snapshots, "int32")
        arguments["snapshot_slots"] = make.indices(free[: requests.count], "int32")
    if case.host_lengths:
        arguments["seq_lens_cpu"] = list(case.lengths)
    return arguments | {"scale": case.scale} | _out(case, make, 1, requests.tokens, heads.HV, heads.V)


def _verify(case: Case, make: TensorFactory) -> dict[str, Any]:
    requests = _Requests(case, make, tuple(min(length, case.drafts) for length in case.lengths))
    q, k, v, a, b = _tokens(case, make, requests.real_rows())
    activation, heads, drafts = DTYPES[case.activation], case.heads, case.drafts
    q, k, v = make.columns((q, k, v), activation)
    a, b = make.columns((a, b), activation)
    arguments: dict[str, Any] = dict(_parameters(case, make))
    arguments |= {"q": q[None], "k": k[None], "v": v[None], "a": a, "b": b}
    arguments["ssm_states"] = _state_pool(case, make, requests)
    arguments["cache_indices"] = make.indices(requests.slots, case.index)
    arguments["query_start_loc"] = make.indices(requests.offsets, case.index)
    rows = requests.count + 2
    buffer = make.placed(torch.full((rows, drafts + 1, heads.HV, heads.V, heads.K), CANARY), DTYPES[case.state])
    arguments["intermediate_states_buffer"] = buffer if case.buffer else None
    order = _buffer_rows(case, make, rows, requests.count)
    arguments["intermediate_state_indices"] = make.indices(order, case.index) if case.buffer else None
    arguments["cache_steps"] = drafts
    if case.tree:
        parents = [[0, *(int(make.uniform(0, t, 1).item()) for t in range(1, drafts))] for _ in range(requests.count)]
        table = torch.tensor(parents, dtype=DTYPES[case.index]).reshape(requests.count, drafts)
        if case.views:
            table = table.repeat_interleave(2, dim=1)
            arguments["retrieve_parent_token"] = table.to(make.device)[:, ::2]
        else:
            arguments["retrieve_parent_token"] = table.to(make.device)
    return arguments | {"scale": case.scale} | _out(case, make, 1, requests.tokens, heads.HV, heads.V)


def _weights(case: Case, make: TensorFactory, dim: int) -> dict[str, Any]:
    dtype = DTYPES[case.activation if case.parameters == "activation" else "float32"]
    weight = make.placed(make.normal(dim, case.width) * 0.5, dtype)
    return {"weight": weight, "bias": make.placed(make.normal(dim), dtype) if case.bias else None}


def _conv_pool(case: Case, make: TensorFactory, requests: _Requests, dim: int) -> Tensor:
    columns = case.width - 1 + case.wide_window
    dtype = DTYPES[case.conv_state or case.activation]
    pool = make.pool(requests.pool_slots, (dim, columns), case.slot_gap, dtype, torch.nan)
    for slot, real in zip(requests.slots, requests.real, strict=True):
        if real:
            pool[slot, :, : case.width - 1].copy_(make.normal(dim, case.width - 1))
    return pool


def _conv_extend(case: Case, make: TensorFactory) -> dict[str, Any]:
    dim = case.heads.dim
    requests = _Requests(case, make, case.lengths)
    rows = _poisoned(make.normal(requests.tokens, dim), requests.real_rows())
    (x,) = make.columns((rows,), DTYPES[case.activation])
    pool = _conv_pool(case, make, requests, dim)
    known = [case.history == "all" or (case.history == "mixed" and row % 2 == 0) for row in range(requests.count)]
    for row, slot in enumerate(requests.slots):
        if requests.real[row] and not known[row]:
            pool[slot].fill_(torch.nan)
    flags = None if case.history == "all" else torch.tensor(known, dtype=torch.bool, device=make.device)
    arguments = {"x": x.t(), **_weights(case, make, dim), "conv_states": pool, "has_initial_state": flags}
    arguments["query_start_loc"] = make.indices(requests.offsets, case.index)
    arguments["cache_indices"] = make.indices(requests.slots, case.index)
    if case.host_lengths:
        arguments["seq_lens_cpu"] = list(case.lengths)
    return arguments | {"activation": case.act}


def _conv_update(case: Case, make: TensorFactory) -> dict[str, Any]:
    dim, drafts = case.heads.dim, case.drafts
    requests = _Requests(case, make, (drafts,) * len(case.lengths))
    real = torch.tensor(requests.real, dtype=torch.bool)
    rows = _poisoned(make.normal(requests.count, drafts, dim), real)
    (x,) = make.columns((rows,), DTYPES[case.activation])
    x = x.transpose(1, 2)
    arguments: dict[str, Any] = {"x": x[..., 0] if drafts == 1 and not case.buffer else x}
    arguments["conv_state"] = _conv_pool(case, make, requests, dim)
    arguments |= _weights(case, make, dim)
    arguments["conv_state_indices"] = make.indices(requests.slots, case.index)
    arguments["activation"] = case.act
    if case.buffer:
        buffer_rows = requests.count + 2
        window = torch.full((buffer_rows, drafts, dim, case.width - 1), CANARY)
        arguments["intermediate_conv_window"] = make.placed(window, DTYPES[case.conv_state or case.activation])
        order = _buffer_rows(case, make, buffer_rows, requests.count)
        arguments["intermediate_state_indices"] = make.indices(order, case.index)
    if case.tree:
        links = [_random_links(drafts, make) for _ in range(requests.count)]
        for position, name in enumerate(("retrieve_next_token", "retrieve_next_sibling")):
            table = [pair[position] for pair in links]
            dtype = DTYPES[case.index]
            arguments[name] = torch.tensor(table, dtype=dtype).reshape(requests.count, drafts).to(make.device)
        arguments["retrieve_parent_token"] = torch.full_like(arguments["retrieve_next_token"], 77)
    return arguments


def _buffer_rows(case: Case, make: TensorFactory, rows: int, count: int) -> list[int]:
    """Distinct rows of a buffer; in a case of rows outside, the first two requests name -1 and the row past the end."""
    order = make.permutation(rows)[:count]
    return [-1, rows, *order[2:]][:count] if case.rows_outside else order


def _random_links(drafts: int, make: TensorFactory) -> tuple[list[int], list[int]]:
    """First child and next sibling of every draft of a random tree."""
    child, sibling, last = [-1] * drafts, [-1] * drafts, [-1] * drafts
    for draft in range(1, drafts):
        parent = int(make.uniform(0, draft, 1).item())
        if child[parent] < 0:
            child[parent] = draft
        else:
            sibling[last[parent]] = draft
        last[parent] = draft
    return child, sibling


def _gating(case: Case, make: TensorFactory) -> dict[str, Any]:
    count = sum(case.lengths)
    a, b = make.normal(count, case.heads.HV) * 5, make.normal(count, case.heads.HV) * 5
    a, b = make.columns((a, b), DTYPES[case.activation])
    return {"a": a, "b": b, **_parameters(case, make)}


def _qkv_split(case: Case, make: TensorFactory) -> dict[str, Any]:
    (mixed,) = make.columns((make.normal(sum(case.lengths), case.heads.dim),), DTYPES[case.activation])
    return {"mixed_qkv": mixed}


_BUILDERS: Final[dict[str, Callable[[Case, TensorFactory], dict[str, Any]]]] = {
    "decode": _decode,
    "packed_decode": _packed_decode,
    "replay_decode": _replay_decode,
    "extend": _extend,
    "verify": lambda case, make: _verify(case.but(tree=False), make),
    "tree_verify": lambda case, make: _verify(case.but(tree=True), make),
    "conv_extend": _conv_extend,
    "conv_update": _conv_update,
    "gating": _gating,
    "qkv_split": _qkv_split,
}
