"""One dense batch of draft chains through each of the library's verify kernels. None of them writes the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Chains(NamedTuple):
    """Fresh, contiguous tensors, but for the pool."""

    q: Tensor
    """`[N, D, HK, K]`, like k."""
    k: Tensor
    v: Tensor
    """`[N, D, HV, V]`."""
    a: Tensor
    """`[N, D, HV]`, like b."""
    b: Tensor
    A_log: Tensor
    """`[HV]` fp32, like dt_bias."""
    dt_bias: Tensor
    pool: Tensor
    slots: Tensor
    """`[N]` int32, every one inside the pool: what padded requests read is thrown away."""
    scale: float | None


Run = Callable[[Chains, "Tensor | None"], "Tensor"]
"""Chains and `[N, D, HV, V, K]` for the states after each draft, or None -> outputs `[N, D, HV, V]`."""


def fp32_run(mtp: Callable[..., Any]) -> Run:
    """For fp32 pools."""

    def run(chains: Chains, states: Tensor | None) -> Tensor:
        out = torch.empty_like(chains.v)
        mtp(
            chains.q, chains.k, chains.v, chains.pool, chains.slots, chains.A_log, chains.a, chains.dt_bias, chains.b,
            scale=chains.scale, output=out, intermediate_states_buffer=states, disable_state_update=True,
            use_qk_l2norm=True,
        )  # fmt: skip
        return out

    return run


def half_run(recurrent: Callable[..., Any]) -> Run:
    """For bf16 pools: decode with D > 1."""

    def run(chains: Chains, states: Tensor | None) -> Tensor:
        out = torch.empty_like(chains.v)
        recurrent(
            chains.q, chains.k, chains.v, None, chains.A_log, chains.a, chains.dt_bias, chains.b, scale=chains.scale,
            output=out, use_qk_l2norm=True, initial_state=chains.pool, initial_state_indices=chains.slots,
            intermediate_states_buffer=states, disable_state_update=True, backend="flashinfer",
        )  # fmt: skip
        return out

    return run


def tensor_core_run(hidden: Callable[..., Any]) -> Run:
    """For bf16 pools, outputs only."""

    def run(chains: Chains, states: Tensor | None) -> Tensor:
        assert states is None
        out = torch.empty_like(chains.v)
        hidden(
            chains.A_log, chains.a, chains.dt_bias, q=chains.q, k=chains.k, v=chains.v, b=chains.b,
            initial_state_source=chains.pool, initial_state_indices=chains.slots, disable_state_update=True,
            use_qk_l2norm_in_kernel=True, scale=chains.scale, output=out,
        )  # fmt: skip
        return out

    return run
