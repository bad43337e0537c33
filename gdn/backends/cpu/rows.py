"""Which rows of a call are real, read on the host: slots, token spans, and the zero rows of the output."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from gdn.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Iterator

    from torch import Tensor

PADDED = -1
"""Stands for every index that names no row of its table."""


def host_indices(indices: Tensor, limit: int) -> list[int]:
    """The indices as integers, with `PADDED` in place of those outside `[0, limit)`."""
    return [index if 0 <= index < limit else PADDED for index in indices.tolist()]


def select_slots(pool: Tensor, slots: list[int]) -> Tensor | None:
    """A view of the slots where they are evenly spaced and ascending, so that no gather is needed; else None."""
    if not slots:
        return pool[:0]
    step = slots[1] - slots[0] if len(slots) > 1 else 1
    if step < 1 or any(second - first != step for first, second in itertools.pairwise(slots)):
        return None
    return pool[slots[0] : slots[-1] + 1 : step]


def token_spans(query_start_loc: Tensor, tokens: int) -> list[tuple[int, int]]:
    """First and past-the-end token row of each sequence.

    Raises:
        InputError: the boundaries decrease or leave `[0, tokens]`.
    """
    bounds: list[int] = query_start_loc.tolist()
    spans = list(itertools.pairwise(bounds))
    if any(begin < 0 or begin > end or end > tokens for begin, end in spans):
        raise InputError(f"query_start_loc: expected non-decreasing values in [0, {tokens}], got {bounds}")
    return spans


def decode_rows(cache_indices: Tensor, query_start_loc: Tensor | None, tokens: int, slots: int) -> dict[int, int]:
    """Slot of each token row that decodes a real request; a request of length 0 owns no row."""
    request_slots = host_indices(cache_indices, slots)
    if query_start_loc is None:
        return {row: slot for row, slot in enumerate(request_slots) if slot != PADDED}
    spans = token_spans(query_start_loc, tokens)
    return {
        begin: slot for (begin, end), slot in zip(spans, request_slots, strict=True) if slot != PADDED and begin < end
    }


def zero_other_rows(out: Tensor, written: Iterable[tuple[int, int]]) -> None:
    """Zero the rows of `out` along dim 0 that lie outside the ascending spans `written`."""
    for begin, end in _gaps(written, out.shape[0]):
        out[begin:end].zero_()


def _gaps(spans: Iterable[tuple[int, int]], total: int) -> Iterator[tuple[int, int]]:
    at = 0
    for begin, end in spans:
        if at < begin:
            yield at, begin
        at = max(at, end)
    if at < total:
        yield at, total
