"""Compilable functions of the recurrent operations; see `gdn.torch_ops.callables`."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any
from typing import Final

import torch
from torch.compiler import is_compiling

from gdn.config import GdnConfig
from gdn.ops import Decode
from gdn.ops import Extend
from gdn.ops import ExtendResult
from gdn.ops import PackedDecode
from gdn.ops import ReplayDecode
from gdn.ops import Verify

if TYPE_CHECKING:
    from torch import Tensor


def _decode(bound: Decode, plan: str, config: GdnConfig) -> Decode:
    def decode(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor | None = None,
        scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `gdn.ops.Decode`."""
        if not is_compiling():
            return bound(
                q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=ssm_states, cache_indices=cache_indices,
                query_start_loc=query_start_loc, scale=scale, out=out,
            )  # fmt: skip
        out = _like(v) if out is None else out
        torch.ops.gdn.decode(
            plan, q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, scale, out
        )
        return out

    return decode


def _packed_decode(bound: PackedDecode, plan: str, config: GdnConfig) -> PackedDecode:
    def packed_decode(
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        ssm_states: Tensor,
        cache_indices: Tensor,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `gdn.ops.PackedDecode`."""
        if not is_compiling():
            return bound(
                mixed_qkv, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=ssm_states, cache_indices=cache_indices,
                num_v_heads=num_v_heads, head_v_dim=head_v_dim, scale=scale, out=out,
            )  # fmt: skip
        out = _packed_out(mixed_qkv, ssm_states) if out is None else out
        torch.ops.gdn.packed_decode(
            plan, mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, num_v_heads, head_v_dim, scale, out
        )
        return out

    return packed_decode


def _replay_decode(bound: ReplayDecode, plan: str, config: GdnConfig) -> ReplayDecode:
    def replay_decode(
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        ssm_states: Tensor,
        cache_indices: Tensor,
        replayssm_d: Tensor,
        replayssm_k: Tensor,
        replayssm_g: Tensor,
        replayssm_write_pos: Tensor,
        replayssm_force_flush: Tensor | None = None,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `gdn.ops.ReplayDecode`."""
        if not is_compiling():
            return bound(
                mixed_qkv, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=ssm_states, cache_indices=cache_indices,
                replayssm_d=replayssm_d, replayssm_k=replayssm_k, replayssm_g=replayssm_g,
                replayssm_write_pos=replayssm_write_pos, replayssm_force_flush=replayssm_force_flush,
                num_v_heads=num_v_heads, head_v_dim=head_v_dim, scale=scale, out=out,
            )  # fmt: skip
        out = _packed_out(mixed_qkv, ssm_states) if out is None else out
        torch.ops.gdn.replay_decode(
            plan, mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, replayssm_d, replayssm_k, replayssm_g,
            replayssm_write_pos, replayssm_force_flush, num_v_heads, head_v_dim, scale, out,
        )  # fmt: skip
        return out

    return replay_decode


def _extend(bound: Extend, plan: str, config: GdnConfig) -> Extend:
    def extend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        scale: float | None = None,
        out: Tensor | None = None,
        return_chunk_states: bool = False,
        snapshot_chunks: Tensor | None = None,
        snapshot_slots: Tensor | None = None,
        seq_lens_cpu: Sequence[int] | None = None,
    ) -> ExtendResult:
        """See `gdn.ops.Extend`."""
        if not is_compiling():
            return bound(
                q, k, v, g, beta, ssm_states=ssm_states, cache_indices=cache_indices, query_start_loc=query_start_loc,
                scale=scale, out=out, return_chunk_states=return_chunk_states, snapshot_chunks=snapshot_chunks,
                snapshot_slots=snapshot_slots, seq_lens_cpu=seq_lens_cpu,
            )  # fmt: skip
        out = _like(v) if out is None else out
        lengths = None if seq_lens_cpu is None else list(seq_lens_cpu)
        chunk_states = torch.ops.gdn.extend(
            plan, q, k, v, g, beta, ssm_states, cache_indices, query_start_loc, scale, out, return_chunk_states,
            snapshot_chunks, snapshot_slots, lengths,
        )  # fmt: skip
        return ExtendResult(out, None, chunk_states if return_chunk_states else None)

    return extend


def _verifying(operator: Callable[..., Any]) -> Callable[[Verify, str, GdnConfig], Verify]:
    def make(bound: Verify, plan: str, config: GdnConfig) -> Verify:
        def verify(
            A_log: Tensor,
            dt_bias: Tensor,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            a: Tensor,
            b: Tensor,
            *,
            ssm_states: Tensor,
            cache_indices: Tensor,
            query_start_loc: Tensor,
            intermediate_states_buffer: Tensor | None,
            intermediate_state_indices: Tensor | None,
            cache_steps: int,
            retrieve_parent_token: Tensor | None = None,
            scale: float | None = None,
            out: Tensor | None = None,
        ) -> Tensor:
            """See `gdn.ops.Verify`."""
            if not is_compiling():
                return bound(
                    A_log, dt_bias, q, k, v, a, b, ssm_states=ssm_states, cache_indices=cache_indices,
                    query_start_loc=query_start_loc, intermediate_states_buffer=intermediate_states_buffer,
                    intermediate_state_indices=intermediate_state_indices, cache_steps=cache_steps,
                    retrieve_parent_token=retrieve_parent_token, scale=scale, out=out,
                )  # fmt: skip
            out = _like(v) if out is None else out
            operator(
                plan, A_log, dt_bias, q, k, v, a, b, ssm_states, cache_indices, query_start_loc,
                intermediate_states_buffer, intermediate_state_indices, cache_steps, retrieve_parent_token, scale, out,
            )  # fmt: skip
            return out

        return verify

    return make


def _like(v: Tensor) -> Tensor:
    """An output, contiguous whatever the strides of v."""
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


def _packed_out(mixed_qkv: Tensor, ssm_states: Tensor) -> Tensor:
    return mixed_qkv.new_empty((1, mixed_qkv.shape[0], ssm_states.shape[1], ssm_states.shape[2]))


RECURRENT: Final[dict[str, Callable[..., Callable[..., Any]]]] = {
    "decode": _decode,
    "packed_decode": _packed_decode,
    "replay_decode": _replay_decode,
    "extend": _extend,
    "verify": _verifying(lambda *args: torch.ops.gdn.verify(*args)),
    "tree_verify": _verifying(lambda *args: torch.ops.gdn.tree_verify(*args)),
}
"""By operation."""
