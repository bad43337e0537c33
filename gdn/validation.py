"""Argument checks of every operation: rank, shape, dtype, device, head ratio. Values are not read (see `gdn.checked`).

Backends call these through `gdn.signature`, so that a repeated signature costs next to nothing. Each raises
`gdn.InputError` naming the argument, what was expected and what was got, before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import torch

from gdn._arguments import FLOATS
from gdn._arguments import Arguments
from gdn._arguments import refuse

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = ("silu", "swish", None)


def check_decode(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
    cache_indices: Tensor, query_start_loc: Tensor | None, out: Tensor | None,
) -> None:  # fmt: skip
    """Arguments of `gdn.ops.Decode`, in order, without `scale`."""
    arguments = Arguments()
    _qkv(arguments, q, k, v, "B")
    _gates(arguments, a, b, A_log, dt_bias, "B", v.dtype)
    _pool(arguments, ssm_states)
    if query_start_loc is None:
        arguments.indices("cache_indices", cache_indices, "B")
    else:
        arguments.indices("cache_indices", cache_indices, "N")
        _offsets(arguments, query_start_loc)
    _out(arguments, out, "1 B HV V", v.dtype)


def check_packed_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor, cache_indices: Tensor,
    num_v_heads: int | None, head_v_dim: int | None, out: Tensor | None,
) -> None:  # fmt: skip
    """Arguments of `gdn.ops.PackedDecode`, in order, without `scale`."""
    _packed(
        Arguments(), mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, num_v_heads, head_v_dim, out
    )  # fmt: skip


def check_replay_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor, cache_indices: Tensor,
    replayssm_d: Tensor, replayssm_k: Tensor, replayssm_g: Tensor, replayssm_write_pos: Tensor,
    replayssm_force_flush: Tensor | None, num_v_heads: int | None, head_v_dim: int | None, out: Tensor | None,
) -> None:  # fmt: skip
    """Arguments of `gdn.ops.ReplayDecode`, without `scale`."""
    arguments = Arguments()
    _packed(arguments, mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, num_v_heads, head_v_dim, out)
    arguments.tensor("replayssm_d", replayssm_d, "slots HV L V", FLOATS, inner=3)
    arguments.tensor("replayssm_k", replayssm_k, "slots HK L K", (replayssm_d.dtype,), inner=3)
    arguments.tensor("replayssm_g", replayssm_g, "slots HV L", (torch.float32,), inner=2)
    if arguments.sizes["L"] < 1:
        refuse("replayssm_d", "a ring of L >= 1 positions", f"L={arguments.sizes['L']}")
    arguments.tensor("replayssm_write_pos", replayssm_write_pos, "B", (torch.int32,))
    if replayssm_force_flush is not None:
        arguments.tensor("replayssm_force_flush", replayssm_force_flush, "B", (torch.int32,))


def check_extend(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ssm_states: Tensor, cache_indices: Tensor,
    query_start_loc: Tensor, out: Tensor | None, snapshot_chunks: Tensor | None, snapshot_slots: Tensor | None,
) -> None:  # fmt: skip
    """Tensors of `gdn.ops.Extend`."""
    arguments = Arguments()
    _qkv(arguments, q, k, v, "T")
    arguments.tensor("g", g, "1 T HV", (torch.float32,))
    arguments.tensor("beta", beta, "1 T HV", (torch.float32,))
    _pool(arguments, ssm_states)
    arguments.indices("cache_indices", cache_indices, "N")
    _offsets(arguments, query_start_loc)
    _out(arguments, out, "1 T HV V", v.dtype)
    if (snapshot_chunks is None) != (snapshot_slots is None):
        given = "snapshot_chunks" if snapshot_slots is None else "snapshot_slots"
        refuse("snapshot_chunks, snapshot_slots", "both or neither", f"only {given}")
    arguments.optional_indices("snapshot_chunks", snapshot_chunks, "N")
    arguments.optional_indices("snapshot_slots", snapshot_slots, "N")


def check_seq_lens(seq_lens_cpu: Sequence[int] | None, query_start_loc: Tensor) -> None:
    """Lengths given on the host: one for each sequence. Not part of a signature, so called apart."""
    if seq_lens_cpu is not None and len(seq_lens_cpu) != query_start_loc.shape[0] - 1:
        refuse("seq_lens_cpu", f"{query_start_loc.shape[0] - 1} lengths", f"{len(seq_lens_cpu)}")


def check_verify(
    A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, ssm_states: Tensor,
    cache_indices: Tensor, query_start_loc: Tensor, intermediate_states_buffer: Tensor | None,
    intermediate_state_indices: Tensor | None, cache_steps: int, retrieve_parent_token: Tensor | None,
    out: Tensor | None,
) -> None:  # fmt: skip
    """Arguments of `gdn.ops.Verify`, in order, without `scale`."""
    arguments = Arguments()
    if isinstance(cache_steps, bool) or not isinstance(cache_steps, int) or cache_steps < 1:
        refuse("cache_steps", "an int >= 1", repr(cache_steps))
    arguments.sizes["cache_steps"] = cache_steps
    _qkv(arguments, q, k, v, "T")
    _gates(arguments, a, b, A_log, dt_bias, "T", v.dtype)
    _pool(arguments, ssm_states)
    arguments.indices("cache_indices", cache_indices, "N")
    _offsets(arguments, query_start_loc)
    if intermediate_states_buffer is not None:
        arguments.tensor(
            "intermediate_states_buffer", intermediate_states_buffer, "rows >=cache_steps HV V K", FLOATS, inner=3
        )
        arguments.indices("intermediate_state_indices", intermediate_state_indices, "N")
    else:
        arguments.optional_indices("intermediate_state_indices", intermediate_state_indices, "N")
    arguments.optional_indices("retrieve_parent_token", retrieve_parent_token, "N >=cache_steps")
    _out(arguments, out, "1 T HV V", v.dtype)


def check_conv_extend(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor, query_start_loc: Tensor,
    cache_indices: Tensor, has_initial_state: Tensor | None, activation: str | None,
) -> None:  # fmt: skip
    """Arguments of `gdn.ops.ConvExtend`, in order, without `seq_lens_cpu`."""
    arguments = Arguments()
    arguments.tensor("x", x, "dim T", FLOATS)
    _taps(arguments, weight, bias, activation)
    arguments.tensor("conv_states", conv_states, "slots dim >=history", FLOATS)
    arguments.indices("cache_indices", cache_indices, "N")
    _offsets(arguments, query_start_loc)
    if has_initial_state is not None:
        arguments.tensor("has_initial_state", has_initial_state, "N", (torch.bool,))


def check_conv_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None,
    conv_state_indices: Tensor | None, intermediate_conv_window: Tensor | None,
    intermediate_state_indices: Tensor | None, retrieve_next_token: Tensor | None,
    retrieve_next_sibling: Tensor | None, retrieve_parent_token: Tensor | None,
) -> None:  # fmt: skip
    """Arguments of `gdn.ops.ConvUpdate`, in order."""
    arguments = Arguments()
    if isinstance(x, torch.Tensor) and x.dim() == 2:
        arguments.tensor("x", x, "B dim", FLOATS)
        arguments.sizes["D"] = 1
    else:
        arguments.tensor("x", x, "B dim D", FLOATS)
    _taps(arguments, weight, bias, activation)
    arguments.tensor("conv_state", conv_state, "slots dim >=history", FLOATS)
    if conv_state_indices is not None:
        arguments.indices("conv_state_indices", conv_state_indices, "B")
    if intermediate_conv_window is not None:
        arguments.tensor("intermediate_conv_window", intermediate_conv_window, "rows >=D dim history", FLOATS)
    arguments.optional_indices("intermediate_state_indices", intermediate_state_indices, "B")
    if (retrieve_next_token is None) != (retrieve_next_sibling is None):
        given = "retrieve_next_token" if retrieve_next_sibling is None else "retrieve_next_sibling"
        refuse("retrieve_next_token, retrieve_next_sibling", "both or neither", f"only {given}")
    if retrieve_parent_token is not None and retrieve_next_token is None:
        refuse("retrieve_parent_token", "None without retrieve_next_token: it is written from the links", "a tensor")
    arguments.optional_indices("retrieve_next_token", retrieve_next_token, "B D")
    arguments.optional_indices("retrieve_next_sibling", retrieve_next_sibling, "B D")
    arguments.optional_indices("retrieve_parent_token", retrieve_parent_token, "B D")


def check_gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> None:
    """Arguments of `gdn.ops.Gating`."""
    arguments = Arguments()
    arguments.tensor("a", a, "T HV", FLOATS)
    arguments.tensor("b", b, "T HV", FLOATS)
    arguments.tensor("A_log", A_log, "HV", FLOATS)
    arguments.tensor("dt_bias", dt_bias, "HV", FLOATS)


def check_qkv_split(mixed_qkv: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> None:
    """Argument of `gdn.ops.QkvSplit`, with the heads that it is bound to."""
    arguments = Arguments()
    arguments.sizes["dim"] = 2 * key_heads * key_dim + value_heads * value_dim
    arguments.tensor("mixed_qkv", mixed_qkv, "T dim", FLOATS)


def _qkv(arguments: Arguments, q: Any, k: Any, v: Any, tokens: str) -> None:
    arguments.tensor("q", q, f"1 {tokens} HK K", FLOATS)
    arguments.tensor("k", k, f"1 {tokens} HK K", (q.dtype,))
    arguments.tensor("v", v, f"1 {tokens} HV V", (q.dtype,))
    arguments.heads()


def _gates(arguments: Arguments, a: Any, b: Any, A_log: Any, dt_bias: Any, rows: str, activation: Any) -> None:
    arguments.tensor("a", a, f"{rows} HV", FLOATS)
    arguments.tensor("b", b, f"{rows} HV", FLOATS)
    parameters = dict.fromkeys((torch.float32, activation))
    arguments.tensor("A_log", A_log, "HV", parameters)
    arguments.tensor("dt_bias", dt_bias, "HV", parameters)


def _pool(arguments: Arguments, ssm_states: Any) -> None:
    arguments.tensor("ssm_states", ssm_states, "slots HV V K", FLOATS, inner=3)


def _offsets(arguments: Arguments, query_start_loc: Any) -> None:
    """N + 1 boundaries, where N is known."""
    arguments.sizes["N+1"] = arguments.sizes["N"] + 1
    arguments.indices("query_start_loc", query_start_loc, "N+1")


def _out(arguments: Arguments, out: Any, shape: str, activation: Any) -> None:
    if out is not None:
        arguments.tensor("out", out, shape, (activation,), contiguous=True)


def _packed(
    arguments: Arguments, mixed_qkv: Any, a: Any, b: Any, A_log: Any, dt_bias: Any, ssm_states: Any,
    cache_indices: Any, num_v_heads: int | None, head_v_dim: int | None, out: Any,
) -> None:  # fmt: skip
    arguments.tensor("mixed_qkv", mixed_qkv, "B dim", FLOATS)
    _pool(arguments, ssm_states)
    sizes = arguments.sizes
    for name, given, symbol in (("num_v_heads", num_v_heads, "HV"), ("head_v_dim", head_v_dim, "V")):
        if given is not None and given != sizes[symbol]:
            refuse(name, f"{sizes[symbol]}, as in ssm_states", repr(given))
    key_columns = sizes["dim"] - sizes["HV"] * sizes["V"]
    width = 2 * sizes["K"]  # not divmod, which sizes of a traced graph lack
    key_heads = key_columns // width if width and key_columns % width == 0 else 0
    if key_heads < 1 or sizes["HV"] % key_heads:
        pool = f"HV={sizes['HV']}, V={sizes['V']}, K={sizes['K']}"
        refuse("mixed_qkv", f"2*HK*K + HV*V columns with {pool} and HV a multiple of HK", f"{sizes['dim']} columns")
    sizes["HK"] = key_heads
    _gates(arguments, a, b, A_log, dt_bias, "B", mixed_qkv.dtype)
    arguments.indices("cache_indices", cache_indices, "B")
    _out(arguments, out, "1 B HV V", mixed_qkv.dtype)


def _taps(arguments: Arguments, weight: Any, bias: Any, activation: str | None) -> None:
    arguments.tensor("weight", weight, "dim W", FLOATS)
    if arguments.sizes["W"] < 1:
        refuse("weight", "at least one tap", "W=0")
    arguments.sizes["history"] = arguments.sizes["W"] - 1
    if bias is not None:
        arguments.tensor("bias", bias, "dim", FLOATS)
    if activation not in ACTIVATIONS:
        refuse("activation", '"silu", "swish" or None', repr(activation))
