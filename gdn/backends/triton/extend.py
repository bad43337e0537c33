"""Extend: chunked prefill in two kernels, with the chunk table found on the device."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gdn._triton_launch import ALIGNMENT_MASK
from gdn._triton_launch import Launch
from gdn.backends.triton._extend_prepare_kernel import prepare_kernel
from gdn.backends.triton._extend_state_kernel import state_kernel
from gdn.backends.triton._plan import template
from gdn.backends.triton.dots import chunk_precision
from gdn.backends.triton.extend_tuning import ExtendTile
from gdn.backends.triton.extend_tuning import narrow_tile
from gdn.backends.triton.extend_tuning import takes_narrow
from gdn.backends.triton.extend_tuning import wide_tile
from gdn.ops import ExtendResult
from gdn.signature import planned
from gdn.types import CHUNK
from gdn.validation import check_extend
from gdn.validation import check_seq_lens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.device import DeviceInfo
    from gdn.ops import Extend

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_DEFAULT_SHARED_MEMORY = 64 << 10


class Kernels(NamedTuple):
    """Both kernels, and the programs of the second."""

    prepare: Launch
    walk: Launch
    programs: int


class Plan(NamedTuple):
    """What one signature needs to launch."""

    aligned: Kernels
    unaligned: Kernels
    """For q, k or v whose first element isn't aligned to 16 bytes."""
    chunk_programs: int
    out: Tensor
    matrix: Tensor
    factors: Tensor
    """Templates of the output and of what the first kernel leaves to the second."""
    scale: float
    prepare_numbers: tuple[int, ...]
    walk_numbers: tuple[int, ...]


def factory(context: BindContext) -> Extend:
    """One tile for every batch where the config asks for equal bits, else the fastest."""
    plans = planned(partial(_plan, context.config.deterministic, context.device))

    def extend(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor, cache_indices: Tensor,
        query_start_loc: Tensor, scale: float | None = None, out: Tensor | None = None,
        return_chunk_states: bool = False, snapshot_chunks: Tensor | None = None, snapshot_slots: Tensor | None = None,
        seq_lens_cpu: Sequence[int] | None = None,
    ) -> ExtendResult:  # fmt: skip
        """See `gdn.ops.Extend`. Takes scratch of 272*HV bytes a token in 16-bit dtypes."""
        plan = plans(
            q, k, v, g, beta, ssm_states, cache_indices, query_start_loc, out, snapshot_chunks, snapshot_slots,
            bool(return_chunk_states),
        )  # fmt: skip
        check_seq_lens(seq_lens_cpu, query_start_loc)
        if out is None:
            out = torch.empty_like(plan.out)
        entering, starts = None, None
        if return_chunk_states:
            entering, starts = _chunk_states(ssm_states, query_start_loc, seq_lens_cpu)
        if plan.aligned.programs == 0:
            return ExtendResult(out.zero_(), None, entering)
        solve, attend = torch.empty_like(plan.matrix), torch.empty_like(plan.matrix)
        factors = torch.empty_like(plan.factors)
        aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & ALIGNMENT_MASK == 0
        kernels = plan.aligned if aligned else plan.unaligned
        kernels.prepare(
            plan.chunk_programs, 1, 1,
            q, k, g, beta, query_start_loc, solve, attend, factors, plan.scale if scale is None else scale,
            *plan.prepare_numbers,
        )  # fmt: skip
        kernels.walk(
            kernels.programs, 1, 1,
            q, k, v, solve, attend, factors, ssm_states, cache_indices, query_start_loc, snapshot_chunks,
            snapshot_slots, starts, entering, out, *plan.walk_numbers,
        )  # fmt: skip
        return ExtendResult(out, None, entering)

    return extend


def _chunk_states(pool: Tensor, query_start_loc: Tensor, lengths: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """The buffer of chunk states, zeros, and each sequence's first entry in it."""
    counts = (query_start_loc.diff() + (CHUNK - 1)) // CHUNK
    ends = counts.cumsum(0)
    if lengths is not None:
        total = sum(-(-length // CHUNK) for length in lengths)
    else:
        total = int(ends[-1]) if ends.numel() else 0
    return pool.new_zeros((1, total, *pool.shape[1:])), ends - counts


def _plan(
    fixed: bool, device: DeviceInfo | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, out: Tensor | None,
    snapshot_chunks: Tensor | None, snapshot_slots: Tensor | None, chunk_states: bool,
) -> Plan:  # fmt: skip
    check_extend(q, k, v, g, beta, ssm_states, cache_indices, query_start_loc, out, snapshot_chunks, snapshot_slots)
    slots, value_heads, value_dim, key_dim = ssm_states.shape
    tokens, key_heads, sequences = v.shape[1], k.shape[2], cache_indices.shape[0]
    constants = {
        "HK": key_heads,
        "RATIO": value_heads // key_heads,
        "K": key_dim,
        "BK": max(triton.next_power_of_2(key_dim), 16),
        "PRECISION": chunk_precision(v.dtype, device),
    }
    walk_constants = {
        **constants,
        "V": value_dim,
        "SNAPSHOTS": snapshot_chunks is not None,
        "CHUNK_STATES": chunk_states,
        "MOST_CHUNKS": tokens // CHUNK + 1 if _INTERPRETED else 0,
    }
    heads = sequences * value_heads
    unaligned = _kernels(constants, walk_constants, wide_tile(v.dtype, key_dim, value_dim), heads, tl.float32)
    aligned = unaligned
    if v.dtype == torch.bfloat16 and takes_narrow(key_dim, (q, k, v)):
        shared_memory = (device and device.shared_memory_bytes) or _DEFAULT_SHARED_MEMORY
        tile = narrow_tile(None if fixed else heads, value_dim, shared_memory)
        aligned = _kernels(constants, walk_constants, tile, heads, tl.bfloat16)
    chunks = tokens // CHUNK + sequences if tokens else 0
    snapshot_strides = (0, 0)
    if snapshot_chunks is not None and snapshot_slots is not None:
        snapshot_strides = (snapshot_chunks.stride(0), snapshot_slots.stride(0))
    return Plan(
        aligned,
        unaligned,
        chunks * value_heads,
        template(tuple(v.shape), v.dtype, v.device),
        template((chunks, value_heads, CHUNK, CHUNK), v.dtype, v.device),
        template((chunks, value_heads, 4, CHUNK), torch.float32, v.device),
        key_dim**-0.5,
        (
            tokens, sequences, *q.stride()[1:], *k.stride()[1:], *g.stride()[1:], *beta.stride()[1:],
            query_start_loc.stride(0),
        ),
        (
            slots, tokens, sequences, *q.stride()[1:], *k.stride()[1:], *v.stride()[1:], ssm_states.stride(0),
            cache_indices.stride(0), query_start_loc.stride(0), *snapshot_strides,
        ),
    )  # fmt: skip


def _kernels(
    constants: dict[str, Any], walk_constants: dict[str, Any], tile: ExtendTile, heads: int, operand: tl.dtype
) -> Kernels:
    """The kernels over `heads` states, the second with operands of this dtype."""
    walk_constants = {**walk_constants, "BV": tile.rows, "STAGES": tile.stages, "OPERAND": operand}
    return Kernels(
        Launch(prepare_kernel, constants, num_warps=tile.prepare_warps),
        Launch(state_kernel, walk_constants, num_warps=tile.warps, num_stages=tile.stages),
        heads * triton.cdiv(walk_constants["V"], tile.rows),
    )
