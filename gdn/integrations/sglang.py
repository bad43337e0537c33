"""SGLang: an object with its GDN kernel dispatcher's interface, over a resolved triple. Imports nothing of SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

from gdn.errors import ConfigError
from gdn.errors import InputError
from gdn.triple import ResolvedTriple

if TYPE_CHECKING:
    from torch import Tensor


class GdnKernelDispatcher:
    """What `GDNAttnBackend.kernel_dispatcher` must be: `packed_decode`, `decode`, `extend`, `target_verify`.

    Shapes, dtypes and in-place rules are those of `gdn.ops`; bad arguments raise `gdn.InputError`. What SGLang passes
    for features that gdn doesn't serve is refused where it is set, never dropped.

    Attributes:
        triple: what was resolved.
        supports_packed_decode: whether `packed_decode` computes; where it doesn't, it returns None.
        extend_uses_state_checkpoints: False: chunk states come back as `extend` computes them, every 64 tokens.
    """

    uses_state_checkpoints = False
    supports_fused_chain_verify = False
    supports_strided_target_verify_qkv = True
    supports_track_state_snapshot = False
    extend_uses_state_checkpoints = False
    verify_kernel_is_flashinfer = False

    def __init__(self, triple: ResolvedTriple) -> None:
        self.triple = triple
        self.supports_packed_decode = triple.packed_decode is not None
        self.decode_kernel = self.extend_kernel = self.verify_kernel = self.tree_verify_kernel = self

    def packed_decode(
        self,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        scale: float,
        ssm_states: Tensor,
        cache_indices: Tensor,
        num_v_heads: int,
        head_v_dim: int,
        replayssm_d: Tensor | None = None,
        replayssm_k: Tensor | None = None,
        replayssm_g: Tensor | None = None,
        replayssm_write_pos: Tensor | None = None,
        replayssm_force_flush: Tensor | None = None,
    ) -> Tensor | None:
        """`[1, B, HV, V]`, or None where nobody decodes packed rows. With a ring: `gdn.ops.ReplayDecode`.

        Raises:
            ConfigError: a ring is given, and the triple was resolved without `replay_window`.
        """
        packed, replay = self.triple.packed_decode, self.triple.replay_decode
        if replayssm_d is None or replayssm_k is None or replayssm_g is None or replayssm_write_pos is None:
            if packed is None:
                return None
            return packed(
                mixed_qkv, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=ssm_states, cache_indices=cache_indices,
                num_v_heads=num_v_heads, head_v_dim=head_v_dim, scale=scale,
            )  # fmt: skip
        if replay is None:
            raise ConfigError("SGLang passes a ReplaySSM ring and nobody serves it: resolve with replay_window=L")
        return replay(
            mixed_qkv, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=ssm_states, cache_indices=cache_indices,
            replayssm_d=replayssm_d, replayssm_k=replayssm_k, replayssm_g=replayssm_g,
            replayssm_write_pos=replayssm_write_pos, replayssm_force_flush=replayssm_force_flush,
            num_v_heads=num_v_heads, head_v_dim=head_v_dim, scale=scale,
        )  # fmt: skip

    def decode(
        self,
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
        query_start_loc: Tensor,
    ) -> Tensor:
        """See `gdn.ops.Decode`. Rows that graph replay pads with empty segments come out as zeros."""
        return self.triple.decode(
            q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=ssm_states, cache_indices=cache_indices,
            query_start_loc=query_start_loc,
        )  # fmt: skip

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        output: Tensor | None = None,
        layer_id: int | None = None,
        extend_prefix_lens: Tensor | None = None,
        inplace_update: bool = True,
        track_state: Tensor | None = None,
        track_chunk_idx: Tensor | None = None,
        state_checkpoint_cu_starts: Tensor | None = None,
        num_state_checkpoints: int | None = None,
        state_checkpoint_every_n_tokens: int | None = None,
    ) -> tuple[Tensor, None, Tensor | None]:
        """Output `[1, T, HV, V]`, None (the pool holds the final states), and the state entering each chunk.

        Chunk states are there where the triple was resolved with `state_checkpoints`; they take one wait for the
        device. `output`, `layer_id` and `extend_prefix_lens` are hints that change no result.

        Raises:
            InputError: checkpoints, snapshots or a frozen pool are asked for.
        """
        for name, value, unset in (
            ("inplace_update", inplace_update, True),
            ("track_state", track_state, None),
            ("track_chunk_idx", track_chunk_idx, None),
            ("state_checkpoint_cu_starts", state_checkpoint_cu_starts, None),
            ("num_state_checkpoints", num_state_checkpoints or None, None),
            ("state_checkpoint_every_n_tokens", state_checkpoint_every_n_tokens or None, None),
        ):
            if value is not unset:
                raise InputError(f"{name}: expected {unset}, gdn's extend has no such feature for SGLang")
        result = self.triple.extend(
            q, k, v, g, beta, ssm_states=ssm_states, cache_indices=cache_indices, query_start_loc=query_start_loc,
            return_chunk_states=self.triple.config.state_checkpoints,
        )  # fmt: skip
        return result.output, None, result.chunk_states

    def target_verify(
        self,
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
        stable_rows: bool = False,
    ) -> Tensor:
        """See `gdn.ops.Verify`; trees go to the backend of `tree_verify`.

        SGLang passes index tables longer than the batch: their first N entries count. `stable_rows` says how it
        numbers buffer rows, which are taken as given.
        """
        requests = query_start_loc.shape[0] - 1
        rows = None if intermediate_state_indices is None else intermediate_state_indices[:requests]
        return self.triple.verify(
            A_log, dt_bias, q, k, v, a, b, ssm_states=ssm_states, cache_indices=cache_indices[:requests],
            query_start_loc=query_start_loc, intermediate_states_buffer=intermediate_states_buffer,
            intermediate_state_indices=rows, cache_steps=cache_steps, retrieve_parent_token=retrieve_parent_token,
        )  # fmt: skip

    def target_verify_supports_strided_qkv(self, retrieve_parent_token: Any) -> bool:
        """True: every operation takes any strides."""
        return True
