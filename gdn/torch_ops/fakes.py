"""What each operator would do to shapes: the checks of the operation, then empty results. Backends need no fakes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any
from typing import Final

import torch

from gdn import validation
from gdn.types import CHUNK

if TYPE_CHECKING:
    from torch import Tensor


def _writing(check: Callable[..., None]) -> Callable[..., None]:
    """An operator that only writes; its last arguments are the scale, which has no check, and out."""

    def fake(plan: str, *args: Any) -> None:
        *arguments, _scale, out = args
        check(*arguments, out)

    return fake


def _extend(
    plan: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ssm_states: Tensor, cache_indices: Tensor,
    query_start_loc: Tensor, scale: float | None, out: Tensor, return_chunk_states: bool,
    snapshot_chunks: Tensor | None, snapshot_slots: Tensor | None, seq_lens_cpu: Sequence[int] | None,
) -> Tensor:  # fmt: skip
    validation.check_extend(
        q, k, v, g, beta, ssm_states, cache_indices, query_start_loc, out, snapshot_chunks, snapshot_slots
    )
    validation.check_seq_lens(seq_lens_cpu, query_start_loc)
    chunks: Any = 0
    if return_chunk_states and seq_lens_cpu is not None:
        chunks = sum(-(-length // CHUNK) for length in seq_lens_cpu)
    elif return_chunk_states:
        chunks = torch.library.get_ctx().new_dynamic_size()
    return ssm_states.new_empty((1, chunks, *ssm_states.shape[1:]))


def _conv_extend(
    plan: str, x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor, query_start_loc: Tensor,
    cache_indices: Tensor, has_initial_state: Tensor | None, activation: str | None,
    seq_lens_cpu: Sequence[int] | None,
) -> Tensor:  # fmt: skip
    validation.check_conv_extend(
        x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation
    )
    validation.check_seq_lens(seq_lens_cpu, query_start_loc)
    return torch.empty_like(x)


def _conv_update(plan: str, x: Tensor, *args: Any) -> Tensor:
    validation.check_conv_update(x, *args)
    return torch.empty_like(x)


def _gating(plan: str, A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    validation.check_gating(A_log, a, b, dt_bias)
    shape = (1, *a.shape)
    return a.new_empty(shape, dtype=torch.float32), a.new_empty(shape, dtype=torch.float32)


def _qkv_split(
    plan: str, mixed_qkv: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    validation.check_qkv_split(mixed_qkv, key_heads, value_heads, key_dim, value_dim)
    tokens = mixed_qkv.shape[0]
    q, k = (mixed_qkv.new_empty((1, tokens, key_heads, key_dim)) for _ in range(2))
    return q, k, mixed_qkv.new_empty((1, tokens, value_heads, value_dim))


FAKES: Final[dict[str, Callable[..., Any]]] = {
    "decode": _writing(validation.check_decode),
    "packed_decode": _writing(validation.check_packed_decode),
    "replay_decode": _writing(validation.check_replay_decode),
    "extend": _extend,
    "verify": _writing(validation.check_verify),
    "tree_verify": _writing(validation.check_verify),
    "conv_extend": _conv_extend,
    "conv_update": _conv_update,
    "gating": _gating,
    "qkv_split": _qkv_split,
}
"""By operation."""
