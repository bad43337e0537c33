"""What each operator takes, in order, and what it writes: `(x!)` marks mutated arguments. No argument has a default."""

from __future__ import annotations

from typing import Final

_PACKED: Final = (
    "str plan, Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor(x!) ssm_states, "
    "Tensor cache_indices, "
)
_VERIFY: Final = (
    "(str plan, Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor ssm_states, "
    "Tensor cache_indices, Tensor query_start_loc, Tensor(x!)? intermediate_states_buffer, "
    "Tensor? intermediate_state_indices, int cache_steps, Tensor? retrieve_parent_token, float? scale, "
    "Tensor(y!) out) -> ()"
)

SCHEMAS: Final[dict[str, str]] = {
    "decode": (
        "(str plan, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, "
        "Tensor(x!) ssm_states, Tensor cache_indices, Tensor? query_start_loc, float? scale, Tensor(y!) out) -> ()"
    ),
    "packed_decode": f"({_PACKED}int? num_v_heads, int? head_v_dim, float? scale, Tensor(y!) out) -> ()",
    "replay_decode": (
        f"({_PACKED}Tensor(d!) replayssm_d, Tensor(k!) replayssm_k, Tensor(g!) replayssm_g, "
        "Tensor replayssm_write_pos, Tensor? replayssm_force_flush, int? num_v_heads, int? head_v_dim, float? scale, "
        "Tensor(y!) out) -> ()"
    ),
    "extend": (
        "(str plan, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(x!) ssm_states, Tensor cache_indices, "
        "Tensor query_start_loc, float? scale, Tensor(y!) out, bool return_chunk_states, Tensor? snapshot_chunks, "
        "Tensor? snapshot_slots, int[]? seq_lens_cpu) -> Tensor"
    ),
    "verify": _VERIFY,
    "tree_verify": _VERIFY,
    "conv_extend": (
        "(str plan, Tensor x, Tensor weight, Tensor? bias, Tensor(x!) conv_states, Tensor query_start_loc, "
        "Tensor cache_indices, Tensor? has_initial_state, str? activation, int[]? seq_lens_cpu) -> Tensor"
    ),
    "conv_update": (
        "(str plan, Tensor x, Tensor(x!) conv_state, Tensor weight, Tensor? bias, str? activation, "
        "Tensor? conv_state_indices, Tensor(y!)? intermediate_conv_window, Tensor? intermediate_state_indices, "
        "Tensor? retrieve_next_token, Tensor? retrieve_next_sibling, Tensor(z!)? retrieve_parent_token) -> Tensor"
    ),
    "gating": "(str plan, Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
    "qkv_split": (
        "(str plan, Tensor mixed_qkv, int key_heads, int value_heads, int key_dim, int value_dim)"
        " -> (Tensor, Tensor, Tensor)"
    ),
}
"""By operation. The chunk states of extend are empty where they aren't asked for."""
