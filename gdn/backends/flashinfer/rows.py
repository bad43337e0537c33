"""What the library leaves: rows of nobody become zero, outputs and states go to the places named for them.

On a GPU each function is one small Triton kernel that moves only what it must; elsewhere plain torch does the same, and
Triton isn't imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gdn.backends.flashinfer.launched import launched
from gdn.backends.flashinfer.slots import dense_rows
from gdn.backends.flashinfer.slots import inside
from gdn.backends.flashinfer.slots import owners
from gdn.signature import planned

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.backends.flashinfer.launched import Launched

_KERNELS = "gdn.backends.flashinfer._rows_kernel"
_ROWS = 16
_COLUMNS = 1024
_STATE_COLUMNS = 4096


def silence(out: Tensor, offsets: Tensor, indices: Tensor, usable: int) -> None:
    """Zero the rows of `out [T, ...]`, contiguous, that lie in no sequence or in one without a slot.

    Args:
        out: written in place.
        offsets: `[N+1]`, N >= 1.
        indices: `[N]`, slot of each sequence.
        usable: slots that exist.
    """
    if not out.is_cuda:
        found = owners(offsets, out.shape[0])
        out[~(found.owned & inside(indices, usable)[found.owner])] = 0
        return
    silence_on_gpu(out, offsets, indices, usable)


def silence_on_gpu(out: Tensor, offsets: Tensor, indices: Tensor, usable: int) -> None:
    """`silence` by its kernel."""
    plan = _silence_plan(out, offsets, indices)
    plan.launch(*plan.grid, out, offsets, indices, usable, *plan.numbers)


def silence_each(out: Tensor, indices: Tensor, usable: int) -> None:
    """Zero the rows of `out [N, ...]`, contiguous, whose index `[N]` names no slot below `usable`."""
    if not out.is_cuda:
        out[~inside(indices, usable)] = 0
        return
    silence_each_on_gpu(out, indices, usable)


def silence_each_on_gpu(out: Tensor, indices: Tensor, usable: int) -> None:
    """`silence_each` by its kernel."""
    plan = _silence_each_plan(out, indices)
    plan.launch(*plan.grid, out, indices, usable, *plan.numbers)


def spread(given: Tensor, offsets: Tensor, indices: Tensor, kept: int, usable: int, out: Tensor) -> None:
    """Dense outputs to their packed rows; zeros where there is none.

    Args:
        given: `[N, D, HV, V]`, contiguous.
        offsets: `[N+1]`.
        indices: `[N]`, slot of each request.
        kept: drafts of a request that count, at most D.
        usable: slots that exist.
        out: `[T, HV, V]`, contiguous, written in place.
    """
    if not out.is_cuda:
        whose = owners(offsets, out.shape[0])
        dense = whose.owner * given.shape[1] + whose.place.clamp(0, given.shape[1] - 1)
        torch.index_select(given.flatten(0, 1), 0, dense, out=out)
        out.masked_fill_((whose.place >= kept).view(-1, 1, 1), 0)
        silence(out, offsets, indices, usable)
        return
    spread_on_gpu(given, offsets, indices, kept, usable, out)


def spread_on_gpu(given: Tensor, offsets: Tensor, indices: Tensor, kept: int, usable: int, out: Tensor) -> None:
    """`spread` by its kernel."""
    plan = _spread_plan(given, offsets, indices, kept, out)
    plan.launch(*plan.grid, given, offsets, indices, out, usable, *plan.numbers)


def store_drafts(
    states: Tensor, offsets: Tensor, indices: Tensor, rows: Tensor, kept: int, usable: int, buffer: Tensor
) -> None:
    """The state after each draft to its request's row of the buffer.

    Args:
        states: `[N, D, HV, V, K]`, contiguous.
        offsets: `[N+1]`.
        indices: `[N]`, slot of each request.
        rows: `[N]`, row of each request, no row twice; outside the buffer stores nothing.
        kept: drafts of a request that count, at most D.
        usable: slots that exist.
        buffer: `[rows, >= kept, HV, V, K]`, each state dense; written in place.
    """
    if not buffer.is_cuda:
        _, own = dense_rows(offsets, states.shape[1], 1)
        own = own & (inside(indices, usable) & inside(rows, buffer.shape[0]))[:, None]
        own[:, kept:] = False
        store(states.flatten(0, 1), _places(buffer, rows, own), buffer)
        return
    store_drafts_on_gpu(states, offsets, indices, rows, kept, usable, buffer)


def store_drafts_on_gpu(
    states: Tensor, offsets: Tensor, indices: Tensor, rows: Tensor, kept: int, usable: int, buffer: Tensor
) -> None:
    """`store_drafts` by its kernel."""
    plan = _store_drafts_plan(states, offsets, indices, rows, kept, buffer)
    plan.launch(*plan.grid, states, offsets, indices, rows, buffer, usable, *plan.numbers)


def store(values: Tensor, places: Tensor, into: Tensor) -> None:
    """Copy `values[i]` to the element offset `places[i]` of `into`, converted to its dtype; a negative one stores none.

    Args:
        values: `[M, ...]`, contiguous.
        places: `[M]` int64, distinct where not negative.
        into: written in place; as dense as one value from each place on.
    """
    if values.shape[0] == 0:
        return
    if not into.is_cuda:
        flat = values.flatten(1).to(into.dtype)
        for value, place in zip(flat, places.tolist(), strict=True):
            if place >= 0:
                torch.as_strided(into, value.shape, (1,), into.storage_offset() + place).copy_(value)
        return
    store_on_gpu(values, places, into)


def store_on_gpu(values: Tensor, places: Tensor, into: Tensor) -> None:
    """`store` by its kernel."""
    plan = _store_plan(values, places, into)
    plan.launch(*plan.grid, values, places, into, *plan.numbers)


def _places(buffer: Tensor, rows: Tensor, own: Tensor) -> Tensor:
    """`[N * D]`: where each draft's state goes, as an offset into the buffer, or -1."""
    step = torch.arange(own.shape[1], device=own.device)
    place = rows.to(torch.int64)[:, None] * buffer.stride(0) + step * buffer.stride(1)
    return torch.where(own, place, -1).flatten()


@planned
def _silence_plan(out: Tensor, offsets: Tensor, indices: Tensor) -> Launched:
    tokens, sequences = out.shape[0], indices.shape[0]
    constants = {
        "WIDTH": out[0].numel(), "ROWS": _ROWS, "COLUMNS": _COLUMNS, "HALVINGS": sequences.bit_length(),
    }  # fmt: skip
    numbers = (tokens, sequences, offsets.stride(0), indices.stride(0))
    return launched(f"{_KERNELS}:silence_kernel", constants, (-(-tokens // _ROWS), 1), numbers)


@planned
def _silence_each_plan(out: Tensor, indices: Tensor) -> Launched:
    count = out.shape[0]
    constants = {"WIDTH": out[0].numel(), "ROWS": _ROWS, "COLUMNS": _COLUMNS}
    return launched(f"{_KERNELS}:silence_each_kernel", constants, (-(-count // _ROWS), 1), (count, indices.stride(0)))


@planned
def _spread_plan(given: Tensor, offsets: Tensor, indices: Tensor, kept: int, out: Tensor) -> Launched:
    tokens, sequences, width = out.shape[0], indices.shape[0], out[0].numel()
    constants = {
        "KEPT": kept, "STEPS": given.shape[1], "WIDTH": width, "COLUMNS": _COLUMNS, "HALVINGS": sequences.bit_length(),
    }  # fmt: skip
    numbers = (tokens, sequences, offsets.stride(0), indices.stride(0))
    return launched(f"{_KERNELS}:spread_kernel", constants, (tokens, -(-width // _COLUMNS)), numbers)


@planned
def _store_drafts_plan(
    states: Tensor, offsets: Tensor, indices: Tensor, rows: Tensor, kept: int, buffer: Tensor
) -> Launched:
    batch, steps, size = *states.shape[:2], states[0, 0].numel()
    constants = {"KEPT": kept, "STEPS": steps, "SIZE": size, "COLUMNS": _STATE_COLUMNS}
    numbers = (buffer.shape[0], offsets.stride(0), indices.stride(0), rows.stride(0), *buffer.stride()[:2])
    return launched(f"{_KERNELS}:store_drafts_kernel", constants, (batch * steps, -(-size // _STATE_COLUMNS)), numbers)


@planned
def _store_plan(values: Tensor, places: Tensor, into: Tensor) -> Launched:
    size = values[0].numel()
    return launched(
        f"{_KERNELS}:store_kernel", {"COLUMNS": _STATE_COLUMNS}, (values.shape[0], -(-size // _STATE_COLUMNS)), (size,)
    )
