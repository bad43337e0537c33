"""One dense batch of draft chains through each of the library's verify kernels. None of them writes the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.backends.flashinfer.staging import Drafts


class Chains(NamedTuple):
    """Fresh, contiguous tensors, but for the pool."""

    drafts: Drafts
    A_log: Tensor
    """`[HV]` fp32, like dt_bias."""
    dt_bias: Tensor
    pool: Tensor
    scale: float | None


Run = Callable[[Chains, "Tensor | None"], "Tensor"]
"""Chains and `[N, D, HV, V, K]` for the states after each draft, or None -> outputs `[N, D, HV, V]`."""


def fp32_run(mtp: Callable[..., Any]) -> Run:
    """For fp32 pools."""

    def run(chains: Chains, states: Tensor | None) -> Tensor:
        given = chains.drafts
        out = torch.empty_like(given.v)
        mtp(
            given.q, given.k, given.v, chains.pool, given.slots, chains.A_log, given.a, chains.dt_bias, given.b,
            scale=chains.scale, output=out, intermediate_states_buffer=states, disable_state_update=True,
            use_qk_l2norm=True,
        )  # fmt: skip
        return out

    return run


def half_run(recurrent: Callable[..., Any]) -> Run:
    """For bf16 pools: decode with D > 1."""

    def run(chains: Chains, states: Tensor | None) -> Tensor:
        given = chains.drafts
        out = torch.empty_like(given.v)
        recurrent(
            given.q, given.k, given.v, None, chains.A_log, given.a, chains.dt_bias, given.b, scale=chains.scale,
            output=out, use_qk_l2norm=True, initial_state=chains.pool, initial_state_indices=given.slots,
            intermediate_states_buffer=states, disable_state_update=True, backend="flashinfer",
        )  # fmt: skip
        return out

    return run


def tensor_core_run(hidden: Callable[..., Any]) -> Run:
    """For bf16 pools, outputs only."""

    def run(chains: Chains, states: Tensor | None) -> Tensor:
        assert states is None
        given = chains.drafts
        out = torch.empty_like(given.v)
        hidden(
            chains.A_log, given.a, chains.dt_bias, q=given.q, k=given.k, v=given.v, b=given.b,
            initial_state_source=chains.pool, initial_state_indices=given.slots, disable_state_update=True,
            use_qk_l2norm_in_kernel=True, scale=chains.scale, output=out,
        )  # fmt: skip
        return out

    return run
