"""Copy and clear pool entries of all layers at once, without a host sync on any accelerator.

A pair whose target is the spare slot moves nothing that anyone reads: this is how padding is expressed.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING
from typing import Final

if TYPE_CHECKING:
    from torch import Tensor

_HAS_TRITON: Final = importlib.util.find_spec("triton") is not None


def move_rows(target: Tensor, to: Tensor, source: Tensor, origin: Tensor) -> None:
    """`target[:, to[n]] = source[:, origin[n]]` for every pair n whose `to` is not the last row of `target`.

    Args:
        target: `[layers, rows, *entry]`, entries contiguous; its last row is the spare one.
        to: `[N]` int64 in `[0, rows)`, distinct but for the spare row.
        source: `[layers, any, *entry]`, entries contiguous. A row that is also written counts as undefined.
        origin: `[N]` int64, inside `source`.
    """
    if target.is_cuda and _HAS_TRITON:
        from gdn.serving._move_kernel import launch

        launch(target, to, source, origin)
        return
    to, origin = _real(target, to, origin)
    target.index_copy_(1, to, source.index_select(1, origin))


def clear_rows(target: Tensor, rows: Tensor) -> None:
    """`target[:, rows[n]] = 0`, whatever was there; the last row of `target` may be left as it is."""
    if target.is_cuda and _HAS_TRITON:
        from gdn.serving._move_kernel import launch

        launch(target, rows)
        return
    target.index_fill_(1, _real(target, rows)[0], 0.0)


def _real(target: Tensor, to: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """The pairs without those of the spare row on a CPU, where to look costs no sync; elsewhere all of them."""
    if to.device.type != "cpu":
        return to, *others
    kept = to != target.shape[1] - 1
    return tuple(index[kept] for index in (to, *others))
