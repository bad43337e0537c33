"""Masked writes: rows of nobody become zero, states go to the places named for them, nothing else is touched.

On a GPU each is one small Triton kernel that moves only what it must; elsewhere plain torch does the same, and Triton
isn't imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch

from gdn.backends.flashinfer.slots import inside
from gdn.backends.flashinfer.slots import owners
from gdn.errors import BackendRefused

if TYPE_CHECKING:
    from torch import Tensor

_COLUMNS = 1024


def check_kernels() -> None:
    """Called at bind time.

    Raises:
        BackendRefused: there is a GPU and no Triton to build the kernels with.
    """
    if torch.cuda.is_available():
        try:
            importlib.import_module("gdn.backends.flashinfer._rows_kernel")
        except ImportError as error:
            raise BackendRefused(f"the kernels that mask rows need triton: {error}") from error


def silence(out: Tensor, offsets: Tensor, indices: Tensor, usable: int) -> None:
    """Zero the rows of `out [T, ...]`, contiguous, that lie in no sequence or in one without a slot.

    Args:
        out: written in place.
        offsets: `[N+1]`, N >= 1.
        indices: `[N]`, slot of each sequence.
        usable: slots that exist.
    """
    tokens = out.shape[0]
    if not out.is_cuda:
        found = owners(offsets, tokens)
        out[~(found.owned & inside(indices, usable)[found.owner])] = 0
        return
    silence_on_gpu(out, offsets, indices, usable)


def silence_on_gpu(out: Tensor, offsets: Tensor, indices: Tensor, usable: int) -> None:
    """`silence` by its kernel."""
    from gdn.backends.flashinfer._rows_kernel import silence_kernel

    tokens, sequences = out.shape[0], indices.shape[0]
    rows = 16
    with torch.cuda.device_of(out):
        silence_kernel[(-(-tokens // rows),)](
            out, offsets, indices, tokens, sequences, usable, offsets.stride(0), indices.stride(0),
            WIDTH=out[0].numel(), ROWS=rows, COLUMNS=_COLUMNS, HALVINGS=sequences.bit_length(),
        )  # fmt: skip


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
    from gdn.backends.flashinfer._rows_kernel import store_kernel

    size = values[0].numel()
    with torch.cuda.device_of(into):
        store_kernel[(values.shape[0], -(-size // _COLUMNS))](values, places, into, size, COLUMNS=_COLUMNS)
