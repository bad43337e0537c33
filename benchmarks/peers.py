"""Calls into other libraries' Gated DeltaNet kernels, each where its package can be imported. Nothing else needs them.

Every builder takes this project's arguments of one operation and returns a function without arguments, or None where
the library is absent. What differs from this project's contract is said beside each.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]


def _load(module: str, name: str) -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        _absent[f"{module}:{name}"] = f"{type(error).__name__}: {error}"
        return None


_absent: dict[str, str] = {}


def absent() -> dict[str, str]:
    """What could not be imported, and why."""
    return dict(_absent)


def sglang_packed_decode(mixed_qkv, a, b, A_log, dt_bias, pool, indices, scale) -> Call | None:
    function = _load(
        "sglang.kernels.ops.attention.fla.fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode"
    )
    if function is None:
        return None
    rows, heads, value = mixed_qkv.shape[0], pool.shape[1], pool.shape[2]
    out = mixed_qkv.new_empty(rows, 1, heads, value)
    return lambda: function(
        mixed_qkv=mixed_qkv, a=a, b=b, A_log=A_log, dt_bias=dt_bias, scale=scale, initial_state=pool, out=out,
        ssm_state_indices=indices(), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def sglang_verify(A_log, dt_bias, q, k, v, a, b, pool, indices, offsets, buffer, rows, steps) -> Call | None:
    function = _load(
        "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent", "fused_sigmoid_gating_delta_rule_update"
    )
    if function is None:
        return None
    return lambda: function(
        A_log=A_log, a=a, dt_bias=dt_bias, softplus_beta=1.0, softplus_threshold=20.0, q=q, k=k, v=v, b=b,
        initial_state_source=pool, initial_state_indices=indices(), cu_seqlens=offsets, use_qk_l2norm_in_kernel=True,
        disable_state_update=True, intermediate_states_buffer=buffer, intermediate_state_indices=rows,
        cache_steps=steps,
    )  # fmt: skip


def sglang_replay_decode(mixed_qkv, a, b, A_log, dt_bias, pool, indices, ring, cursor, scale) -> Call | None:
    function = _load(
        "sglang.kernels.ops.attention.linear.fused_recurrent_linear_replayssm",
        "fused_recurrent_linear_replayssm_decode",
    )
    if function is None:
        return None
    d, k, g = ring
    out = mixed_qkv.new_empty(mixed_qkv.shape[0], 1, pool.shape[1], pool.shape[2])
    return lambda: function(
        mixed_qkv, a, b, A_log, dt_bias, scale, pool, d, k, g, out, indices(), cursor, use_qk_l2norm_in_kernel=True
    )


def sglang_extend(q, k, v, g, beta, pool, indices, offsets) -> Call | None:
    function = _load("sglang.kernels.ops.attention.fla.chunk", "chunk_gated_delta_rule")
    if function is None:
        return None
    return lambda: function(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=pool, initial_state_indices=indices(), cu_seqlens=offsets,
        head_first=False, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def fla_extend(q, k, v, g, beta, pool, indices, offsets) -> Call | None:
    """Without a pool: the states are gathered before and scattered after, outside the call that is timed."""
    function = _load("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    if function is None:
        return None
    state = pool[indices().long()].float().transpose(-1, -2).contiguous()
    long_offsets = offsets.long()
    return lambda: function(
        q, k, v, g, beta, initial_state=state, output_final_state=True, cu_seqlens=long_offsets,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def flashinfer_decode(q, k, v, a, b, A_log, dt_bias, pool, indices, scale) -> Call | None:
    """q, k `[B, 1, HK, K]`: one token per request, in place in the pool."""
    function = _load("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose")
    if function is None:
        return None
    batched = [x.transpose(0, 1) for x in (q, k, v)]
    gates = [x.unsqueeze(1) for x in (a, b)]
    out = torch.empty_like(batched[2])
    log, bias = A_log.float(), dt_bias.float()
    return lambda: function(
        *batched, None, log, gates[0], bias, gates[1], scale=scale, output=out, initial_state=pool,
        initial_state_indices=indices(), backend="flashinfer",
    )  # fmt: skip


def flashinfer_verify(A_log, dt_bias, q, k, v, a, b, pool, indices, buffer, steps) -> Call | None:
    """A chain; the buffer's rows are the batch's positions. fp32 pools only."""
    function = _load("flashinfer.gdn_decode", "gated_delta_rule_mtp")
    if function is None:
        return None
    rows = q.shape[1] // steps
    shaped = [x.reshape(rows, steps, *x.shape[2:]) for x in (q, k, v)]
    gates = [x.reshape(rows, steps, -1) for x in (a, b)]
    out = torch.empty_like(shaped[2])
    log, bias = A_log.float(), dt_bias.float()
    if pool.dtype != torch.float32:
        recurrent = _load("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose")
        return lambda: recurrent(
            *shaped, None, log, gates[0], bias, gates[1], output=out, initial_state=pool,
            initial_state_indices=indices(), intermediate_states_buffer=buffer, disable_state_update=True,
            backend="flashinfer",
        )  # fmt: skip
    return lambda: function(
        *shaped, pool, indices(), log, gates[0], bias, gates[1], output=out, intermediate_states_buffer=buffer,
        disable_state_update=True,
    )  # fmt: skip


def flashinfer_extend(
    q, k, v, g, beta, pool, indices, offsets, longest, use_cp="auto", prepared=False
) -> Call | None:  # fmt: skip
    """By its own passes over raw q and k and log gates; `prepared` does these before the call that is timed."""
    function = _load("flashinfer.gdn_prefill", "chunk_gated_delta_rule")
    if function is None:
        return None

    out = torch.empty_like(v[0])
    shared = {
        "initial_state": pool, "output_final_state": True, "cu_seqlens": offsets, "output": out, "output_state": pool,
        "max_seqlen": longest, "use_cp": use_cp, "backend": "flashinfer",
    }  # fmt: skip
    if prepared:
        inputs = _unit(q[0]), _unit(k[0]), v[0].contiguous(), g[0].exp(), beta[0].contiguous()
        return lambda: function(*inputs, **shared, state_indices=indices())
    raw = [x[0].contiguous() for x in (q, k, v, g, beta)]
    domain = {"use_qk_l2norm_in_kernel": True, "gate_domain": "log"}
    return lambda: function(*raw, **shared, **domain, state_indices=indices())


def _unit(x: torch.Tensor) -> torch.Tensor:
    return (x.float() / (x.float().square().sum(-1, keepdim=True) + 1e-6).sqrt()).to(x.dtype).contiguous()


def sglang_conv_update(x, conv_state, weight, bias, indices) -> Call | None:
    function = _load("sglang.kernels.ops.mamba.causal_conv1d_triton", "causal_conv1d_update")
    if function is None:
        return None
    return lambda: function(x, conv_state, weight, bias, "silu", conv_state_indices=indices())


def sglang_conv_extend(x, weight, bias, conv_states, offsets, indices, has_initial_state, lengths) -> Call | None:
    function = _load("sglang.kernels.ops.mamba.causal_conv1d_triton", "causal_conv1d_fn")
    if function is None:
        return None
    return lambda: function(
        x, weight, bias, conv_states=conv_states, query_start_loc=offsets, seq_lens_cpu=lengths,
        cache_indices=indices(), has_initial_state=has_initial_state, activation="silu",
    )  # fmt: skip
