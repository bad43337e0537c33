"""Compilable functions of the operations around the recurrence; see `gdn.torch_ops.callables`."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any
from typing import Final

import torch
from torch.compiler import is_compiling

from gdn.config import GdnConfig
from gdn.ops import ConvExtend
from gdn.ops import ConvUpdate
from gdn.ops import Gating
from gdn.ops import QkvSplit

if TYPE_CHECKING:
    from torch import Tensor


def _conv_extend(bound: ConvExtend, plan: str, config: GdnConfig) -> ConvExtend:
    def conv_extend(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        conv_states: Tensor,
        query_start_loc: Tensor,
        cache_indices: Tensor,
        has_initial_state: Tensor | None,
        activation: str | None = "silu",
        seq_lens_cpu: Sequence[int] | None = None,
    ) -> Tensor:
        """See `gdn.ops.ConvExtend`."""
        if not is_compiling():
            return bound(
                x, weight, bias, conv_states=conv_states, query_start_loc=query_start_loc, cache_indices=cache_indices,
                has_initial_state=has_initial_state, activation=activation, seq_lens_cpu=seq_lens_cpu,
            )  # fmt: skip
        lengths = None if seq_lens_cpu is None else list(seq_lens_cpu)
        result: Tensor = torch.ops.gdn.conv_extend(
            plan, x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation, lengths
        )
        return result

    return conv_extend


def _conv_update(bound: ConvUpdate, plan: str, config: GdnConfig) -> ConvUpdate:
    def conv_update(
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        activation: str | None = "silu",
        conv_state_indices: Tensor | None = None,
        intermediate_conv_window: Tensor | None = None,
        intermediate_state_indices: Tensor | None = None,
        retrieve_next_token: Tensor | None = None,
        retrieve_next_sibling: Tensor | None = None,
        retrieve_parent_token: Tensor | None = None,
    ) -> Tensor:
        """See `gdn.ops.ConvUpdate`."""
        if not is_compiling():
            return bound(
                x, conv_state, weight, bias, activation=activation, conv_state_indices=conv_state_indices,
                intermediate_conv_window=intermediate_conv_window,
                intermediate_state_indices=intermediate_state_indices, retrieve_next_token=retrieve_next_token,
                retrieve_next_sibling=retrieve_next_sibling, retrieve_parent_token=retrieve_parent_token,
            )  # fmt: skip
        result: Tensor = torch.ops.gdn.conv_update(
            plan, x, conv_state, weight, bias, activation, conv_state_indices, intermediate_conv_window,
            intermediate_state_indices, retrieve_next_token, retrieve_next_sibling, retrieve_parent_token,
        )  # fmt: skip
        return result

    return conv_update


def _gating(bound: Gating, plan: str, config: GdnConfig) -> Gating:
    def gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """See `gdn.ops.Gating`."""
        if not is_compiling():
            return bound(A_log, a, b, dt_bias)
        g, beta = torch.ops.gdn.gating(plan, A_log, a, b, dt_bias)
        return g, beta

    return gating


def _qkv_split(bound: QkvSplit, plan: str, config: GdnConfig) -> QkvSplit:
    heads = (config.num_k_heads, config.num_v_heads, config.head_k_dim, config.head_v_dim)

    def qkv_split(mixed_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `gdn.ops.QkvSplit`."""
        if not is_compiling():
            return bound(mixed_qkv)
        q, k, v = torch.ops.gdn.qkv_split(plan, mixed_qkv, *heads)
        return q, k, v

    return qkv_split


AROUND: Final[dict[str, Callable[..., Callable[..., Any]]]] = {
    "conv_extend": _conv_extend,
    "conv_update": _conv_update,
    "gating": _gating,
    "qkv_split": _qkv_split,
}
"""By operation."""
