"""Compile before the first request what a config will need."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from functools import partial
from typing import Any
from typing import NamedTuple

import torch

from gdn.backends.cutedsl import decode
from gdn.backends.cutedsl import verify
from gdn.backends.cutedsl.tuning import DECODE
from gdn.backends.cutedsl.tuning import VERIFY
from gdn.backends.cutedsl.tuning import Table
from gdn.config import GdnConfig
from gdn.device import DeviceInfo

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Dtypes(NamedTuple):
    """Of arguments that a config doesn't name."""

    index: torch.dtype = torch.int32
    parameters: torch.dtype = torch.float32


def warmup(config: GdnConfig, device: DeviceInfo, *, dtypes: Dtypes | None = None) -> int:
    """Compile, or load, decode and packed decode and, where the config asks for drafts, verify with and without a
    buffer.

    Returns how many signatures were prepared. A call with other dtypes of indices or parameters, or with keys that are
    not dense, still compiles at its first use.
    """
    plans = list(variants(config, device, dtypes or Dtypes()))
    for plan in plans:
        plan()
    return len(plans)


def variants(config: GdnConfig, device: DeviceInfo, dtypes: Dtypes) -> Iterator[Callable[[], Any]]:
    """One preparation for each block size of each operation."""
    HV, drafts = config.num_v_heads, config.max_draft_tokens
    size = _DTYPES[_state(config)].itemsize
    for requests in _batches(DECODE[size], HV, config.deterministic):
        q, k, v, a, b, A_log, dt_bias, states, indices = _tensors(config, requests, requests, dtypes)
        mixed = q.new_empty(requests, q[0, 0].numel() * 2 + v[0, 0].numel())
        plan = partial(decode.plan, config.deterministic, device.sm)
        yield partial(plan, q, k, v, a, b, A_log, dt_bias, states, indices, None, None)
        packed = partial(decode.packed_plan, config.deterministic, device.sm)
        yield partial(packed, mixed, a, b, A_log, dt_bias, states, indices, None, None, None)
    for requests in _batches(VERIFY[size], HV, config.deterministic) if drafts else ():
        q, k, v, a, b, A_log, dt_bias, states, indices = _tensors(config, requests, requests * drafts, dtypes)
        buffer = states.new_empty(requests, drafts, *states.shape[1:])
        offsets, parents = indices.new_empty(requests + 1), indices.new_empty(requests, drafts)
        plan = partial(verify.plan, config.deterministic, device.sm, A_log, dt_bias, q, k, v, a, b, states, indices)
        for kept in (buffer, None):
            rows = None if kept is None else indices
            yield partial(plan, offsets, kept, rows, drafts, parents if config.tree_drafts else None, None)


def _state(config: GdnConfig) -> str:
    return "float32" if config.state_dtype == "auto" else config.state_dtype


def _batches(table: Table, HV: int, fixed: bool) -> list[int]:
    """A number of requests for each row of a table that any number reaches."""
    bounds = [0, *(most // HV for most, _ in table if most is not None)]
    return [1] if fixed else sorted({bound + 1 for bound in bounds})


def _tensors(config: GdnConfig, requests: int, tokens: int, dtypes: Dtypes) -> tuple[torch.Tensor, ...]:
    """Without memory: a plan reads only dtypes, shapes and strides."""
    HK, HV, K, V = config.num_k_heads, config.num_v_heads, config.head_k_dim, config.head_v_dim
    make = partial(torch.empty, device="meta")
    activation = _DTYPES[config.activation_dtype]
    q, k = (make(1, tokens, HK, K, dtype=activation) for _ in range(2))
    a, b = (make(tokens, HV, dtype=activation) for _ in range(2))
    A_log, dt_bias = (make(HV, dtype=dtypes.parameters) for _ in range(2))
    states = make(requests, HV, V, K, dtype=_DTYPES[_state(config)])
    v = make(1, tokens, HV, V, dtype=activation)
    return q, k, v, a, b, A_log, dt_bias, states, make(requests, dtype=dtypes.index)
