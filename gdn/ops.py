"""The operations' contract: signatures, shapes, in-place rules. Backends implement it, servers call it.

Symbols: T packed tokens; N (or B) requests; D draft tokens per request; HK key/query heads; HV value heads
(HV % HK == 0); K, V head dims; W conv width; dim = 2*HK*K + HV*V. One value head's state is a [V, K] matrix with K
contiguous. Value head j uses q/k head j // (HV // HK).

Recurrence, per value head and token, in fp32 (Gated Delta Networks, Yang et al. 2024, arXiv:2412.06464):

    g = -exp(A_log) * softplus(a + dt_bias)         softplus(x) = x above 20
    beta = sigmoid(b)
    q, k <- x / sqrt(sum(x^2) + 1e-6);  q <- q * scale,  scale = K**-0.5 by default
    S <- exp(g) S;  d = beta (v - S k);  S <- S + d k^T;  o = S q

Padding, one rule everywhere: a slot index < 0 or >= num_slots reads no state, writes no state and gives output rows of
zeros. Output rows outside every sequence are zeros too. A row index of a verify buffer outside the buffer stores
nothing.

Legal everywhere: zero-length and one-token sequences, no sequence at all, any slot stride, int32 and int64 indices,
index views aligned to their element only, pools beyond 2^31 elements, q/k/v/mixed_qkv views with any strides, A_log
and dt_bias in fp32 or the activation dtype. Two real rows of one call that name the same written slot are undefined.

No operation synchronises the host, except `extend` with `return_chunk_states=True` on an accelerator when
`seq_lens_cpu` is not given: the number of chunks is then read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import NamedTuple
from typing import Protocol

if TYPE_CHECKING:
    from torch import Tensor


class ExtendResult(NamedTuple):
    """What `extend` returns.

    Attributes:
        output: `[1, T, HV, V]` in the activation dtype.
        final_state: None where the pool holds it, which is so for every built-in backend.
        chunk_states: `[1, sum(ceil(len/64)), HV, V, K]` in the pool's dtype, or None. Entry c of a sequence is the
            state that enters its chunk c.
    """

    output: Tensor
    final_state: Tensor | None = None
    chunk_states: Tensor | None = None


class Decode(Protocol):
    """One token per request; `ssm_states` is updated in place."""

    def __call__(
        self,
        q: Tensor,  # [1, B, HK, K]
        k: Tensor,  # [1, B, HK, K]
        v: Tensor,  # [1, B, HV, V]
        a: Tensor,  # [B, HV]
        b: Tensor,  # [B, HV]
        *,
        A_log: Tensor,  # [HV]
        dt_bias: Tensor,  # [HV]
        ssm_states: Tensor,  # [slots, HV, V, K]
        cache_indices: Tensor,  # [B]
        query_start_loc: Tensor
        | None = None,  # [B+1]; request n owns row query_start_loc[n], or none if its length is 0
        scale: float | None = None,
        out: Tensor | None = None,  # [1, B, HV, V], contiguous
    ) -> Tensor: ...  # [1, B, HV, V]


class PackedDecode(Protocol):
    """Decode over the convolution's output, rows `[all q | all k | all v]`."""

    def __call__(
        self,
        mixed_qkv: Tensor,  # [B, dim]
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        ssm_states: Tensor,
        cache_indices: Tensor,
        num_v_heads: int | None = None,  # checked against the pool where given
        head_v_dim: int | None = None,
        scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...


class ReplayDecode(Protocol):
    """Packed decode over a checkpoint state and a ring of the last updates (ReplaySSM).

    With m = write_pos[row] entries in the ring, G_j the inclusive prefix sum of replayssm_g and G the whole sum, the
    live state is S = e^G S0 + sum_j e^(G - G_j) d_j k_j^T. A row flushes iff m == L-1 or its force_flush is not 0:
    the pool gets the updated state and the ring is left as it is. Otherwise d, normalised k and g are appended at
    position m and the pool is untouched. The caller advances the cursor: 0 after a flush, else m + 1.
    The rings are addressed by slot, write_pos and force_flush by row.
    """

    def __call__(
        self,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        ssm_states: Tensor,
        cache_indices: Tensor,
        replayssm_d: Tensor,  # [slots, HV, L, V]
        replayssm_k: Tensor,  # [slots, HK, L, K]
        replayssm_g: Tensor,  # [slots, HV, L] fp32
        replayssm_write_pos: Tensor,  # [B] int32
        replayssm_force_flush: Tensor | None = None,  # [B] int32
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...


class Extend(Protocol):
    """Chunked prefill; each sequence continues from its slot's state, which ends as its final state.

    `snapshot_chunks[i] = c >= 0` writes the state entering chunk c of sequence i (c == number of chunks: the final
    state) into `ssm_states[snapshot_slots[i]]`, rounded once from fp32; -1 writes none.
    """

    def __call__(
        self,
        q: Tensor,  # [1, T, HK, K], not normalised
        k: Tensor,
        v: Tensor,  # [1, T, HV, V]
        g: Tensor,  # [1, T, HV] fp32, log decay
        beta: Tensor,  # [1, T, HV] fp32
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,  # [N]
        query_start_loc: Tensor,  # [N+1]
        scale: float | None = None,
        out: Tensor | None = None,
        return_chunk_states: bool = False,
        snapshot_chunks: Tensor | None = None,  # [N] int32
        snapshot_slots: Tensor | None = None,  # [N] int32
        seq_lens_cpu: Sequence[int] | None = None,  # lengths on the host, where the caller has them
    ) -> ExtendResult: ...


class Verify(Protocol):
    """Draft tokens of each request from its slot's state; the pool is not written.

    The state after draft t goes to `intermediate_states_buffer[intermediate_state_indices[n], t]`; with no buffer
    none is stored. With `retrieve_parent_token` draft t > 0 starts from the state after draft parent[t] < t, draft 0
    from the slot's state.
    """

    def __call__(
        self,
        A_log: Tensor,
        dt_bias: Tensor,
        q: Tensor,  # [1, T, HK, K]
        k: Tensor,
        v: Tensor,
        a: Tensor,  # [T, HV]
        b: Tensor,  # [T, HV]
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,  # [N]
        query_start_loc: Tensor,  # [N+1], each length <= cache_steps
        intermediate_states_buffer: Tensor | None,  # [rows, >=D, HV, V, K]
        intermediate_state_indices: Tensor | None,  # [N]
        cache_steps: int,
        retrieve_parent_token: Tensor | None = None,  # [N, D]
        scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...  # [1, T, HV, V]


class ConvExtend(Protocol):
    """Causal depthwise convolution over packed sequences; `conv_states` ends as the last W-1 inputs of each.

    y[c, t] = act(bias[c] + sum_i weight[c, i] * x[c, t - (W-1) + i]). Inputs before a sequence come from its slot
    (oldest first) where `has_initial_state`, else are zeros. Products and sums in fp32. Only the first W-1 columns of
    `conv_states` are used.
    """

    def __call__(
        self,
        x: Tensor,  # [dim, T], any strides
        weight: Tensor,  # [dim, W]
        bias: Tensor | None,  # [dim]
        *,
        conv_states: Tensor,  # [slots, dim, >=W-1]
        query_start_loc: Tensor,  # [N+1]
        cache_indices: Tensor,  # [N]
        has_initial_state: Tensor | None,  # [N] bool; None: every sequence has one
        activation: str | None = "silu",  # "silu", "swish" or None
        seq_lens_cpu: Sequence[int] | None = None,
    ) -> Tensor: ...  # [dim, T], laid out like x


class ConvUpdate(Protocol):
    """One or D steps of the convolution per request.

    Without drafts (`x [B, dim]`) and for a chain (`x [B, dim, D]`) the slot ends as the last W-1 inputs. With
    `intermediate_conv_window` the window after each step t is stored at
    `[intermediate_state_indices[n], t]`. With `retrieve_next_token` and `retrieve_next_sibling` `[B, D]` (-1: none)
    tap j of draft t reads its j-th ancestor, past the root the slot's columns from the newest; the parents found are
    written to `retrieve_parent_token` (the root's is 0), and the slot is not written.
    """

    def __call__(
        self,
        x: Tensor,  # [B, dim] or [B, dim, D]
        conv_state: Tensor,  # [slots, dim, >=W-1]
        weight: Tensor,  # [dim, W]
        bias: Tensor | None = None,
        *,
        activation: str | None = "silu",
        conv_state_indices: Tensor | None = None,  # [B]; None: row n is slot n
        intermediate_conv_window: Tensor | None = None,  # [rows, D, dim, W-1]
        intermediate_state_indices: Tensor | None = None,  # [B]; None: row n is buffer row n
        retrieve_next_token: Tensor | None = None,
        retrieve_next_sibling: Tensor | None = None,
        retrieve_parent_token: Tensor | None = None,
    ) -> Tensor: ...  # as x


class Gating(Protocol):
    """Log decay and write strength: g `[1, T, HV]` and beta `[1, T, HV]`, both fp32; beta is never rounded."""

    def __call__(self, A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]: ...


class QkvSplit(Protocol):
    """Contiguous q, k `[1, T, HK, K]` and v `[1, T, HV, V]` from `mixed_qkv [T, dim]` with any strides."""

    def __call__(self, mixed_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...
