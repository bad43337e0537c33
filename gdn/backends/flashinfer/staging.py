"""What the library is given: slots that exist, rows laid out as it demands, gates in its domain.

On a GPU each function is one small Triton kernel; elsewhere plain torch does the same, and Triton isn't imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import NamedTuple

import torch

from gdn.backends.flashinfer.launched import launched
from gdn.backends.flashinfer.slots import dense_rows
from gdn.backends.flashinfer.slots import gathered
from gdn.backends.flashinfer.slots import or_else
from gdn.signature import planned

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.backends.flashinfer.launched import Launched

_KERNELS = "gdn.backends.flashinfer._staging_kernel"
_ROWS = 16
_COLUMNS = 1024


def slots_or_else(indices: Tensor, usable: int, instead: int) -> Tensor:
    """`[N]` int32, fresh: the slot, or `instead` where there is none."""
    if not indices.is_cuda:
        return or_else(indices, usable, instead)
    return slots_on_gpu(indices, usable, instead)


def slots_on_gpu(indices: Tensor, usable: int, instead: int) -> Tensor:
    """`slots_or_else` by its kernel."""
    slots = indices.new_empty(indices.shape, dtype=torch.int32)
    plan = _slots_plan(indices)
    plan.launch(*plan.grid, indices, slots, usable, instead, *plan.numbers)
    return slots


class Prefill(NamedTuple):
    """Inputs of the library's prefill, contiguous."""

    q: Tensor
    """`[T, HK, K]`, like k: each row of length one, rounded to its dtype."""
    k: Tensor
    decay: Tensor
    """`[T, HV]` fp32: exp(g)."""
    slots: Tensor
    """`[N]` int32, -1 where there is none."""


def prefill_inputs(q: Tensor, k: Tensor, g: Tensor, indices: Tensor, usable: int) -> Prefill:
    """From q, k `[T, HK, K]`, g `[T, HV]` fp32 and slots `[N]`, of any strides; T and N at least one."""
    if not q.is_cuda:
        return Prefill(_unit(q), _unit(k), g.exp().contiguous(), or_else(indices, usable, -1))
    return prefill_inputs_on_gpu(q, k, g, indices, usable)


def prefill_inputs_on_gpu(q: Tensor, k: Tensor, g: Tensor, indices: Tensor, usable: int) -> Prefill:
    """`prefill_inputs` by its kernel."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    staged = Prefill(
        q.new_empty(q.shape), k.new_empty(k.shape), g.new_empty(g.shape),
        indices.new_empty(indices.shape, dtype=torch.int32),
    )  # fmt: skip
    plan = _prefill_plan(q, k, g, indices)
    plan.launch(*plan.grid, q, k, g, indices, *staged, usable, *plan.numbers)
    return staged


class Drafts(NamedTuple):
    """A dense batch of chains, contiguous."""

    q: Tensor
    """`[N, D, HK, K]`, like k."""
    k: Tensor
    v: Tensor
    """`[N, D, HV, V]`."""
    a: Tensor
    """`[N, D, HV]`, like b."""
    b: Tensor
    slots: Tensor
    """`[N]` int32, 0 where there is none: what such a request reads is thrown away."""


def drafts(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, offsets: Tensor, indices: Tensor, steps: int, usable: int
) -> Drafts:
    """Chains of `steps` drafts from packed rows `[T, ...]` of any strides; beyond a request's length any row.

    Args:
        q, k, v, a, b: `[T, HK, K]`, `[T, HV, V]`, `[T, HV]`, at least one row.
        offsets: `[N+1]`.
        indices: `[N]`, slot of each request.
        steps: of the dense batch.
        usable: slots that exist.
    """
    if not q.is_cuda:
        row, _ = dense_rows(offsets, steps, v.shape[0])
        return Drafts(*(gathered(x, row) for x in (q, k, v, a, b)), or_else(indices, usable, 0))
    return drafts_on_gpu(q, k, v, a, b, offsets, indices, steps, usable)


def drafts_on_gpu(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, offsets: Tensor, indices: Tensor, steps: int, usable: int
) -> Drafts:
    """`drafts` by its kernel."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch = indices.shape[0]
    dense = [x.new_empty((batch, steps, *x.shape[1:])) for x in (q, k, v, a, b)]
    laid = Drafts(*dense, indices.new_empty(indices.shape, dtype=torch.int32))
    plan = _drafts_plan(q, k, v, a, b, offsets, indices, steps)
    plan.launch(*plan.grid, q, k, v, a, b, offsets, indices, *laid, usable, *plan.numbers)
    return laid


def _unit(x: Tensor) -> Tensor:
    """Rows of length one, by x / sqrt(sum x^2 + 1e-6) in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype).contiguous()


@planned
def _slots_plan(indices: Tensor) -> Launched:
    count = indices.shape[0]
    grid, numbers = (-(-count // _COLUMNS), 1), (count, indices.stride(0))
    return launched(f"{_KERNELS}:slots_kernel", {"BLOCK": _COLUMNS}, grid, numbers)


@planned
def _prefill_plan(q: Tensor, k: Tensor, g: Tensor, indices: Tensor) -> Launched:
    (tokens, heads, K), sequences = q.shape, indices.shape[0]
    ratio = g.shape[1] // heads
    constants = {
        "HEADS": heads, "RATIO": ratio, "RATIO_PADDED": 1 << (ratio - 1).bit_length(), "K": K, "ROWS": _ROWS,
    }  # fmt: skip
    numbers = (tokens, sequences, *q.stride()[:2], *k.stride()[:2], *g.stride(), indices.stride(0))
    return launched(f"{_KERNELS}:prefill_kernel", constants, (-(-max(tokens, sequences) // _ROWS), heads), numbers)


@planned
def _drafts_plan(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, offsets: Tensor, indices: Tensor, steps: int
) -> Launched:
    (tokens, keys, K), (values, V) = q.shape, v.shape[1:]
    constants = {
        "STEPS": steps, "KEYS": keys, "VALUES": values, "K": K, "V": V,
        "HEADS_PADDED": 1 << (values - 1).bit_length(), "COLUMNS": _COLUMNS,
    }  # fmt: skip
    strides = [stride for x in (q, k, v, a, b) for stride in x.stride()[:2]]
    numbers = (tokens, *strides, offsets.stride(0), indices.stride(0))
    columns = -(-max(keys * K, values * V) // _COLUMNS)
    return launched(f"{_KERNELS}:drafts_kernel", constants, (indices.shape[0] * steps, columns), numbers)
