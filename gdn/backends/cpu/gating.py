"""Gating: log decay and write strength of every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdn.backends.cpu.gates import log_decay
from gdn.backends.cpu.gates import write_strength
from gdn.signature import validated
from gdn.validation import check_gating

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import Gating

_check = validated(check_gating)


def gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """See `gdn.ops.Gating`."""
    _check(A_log, a, b, dt_bias)
    return log_decay(A_log, a, dt_bias).unsqueeze(0), write_strength(b).unsqueeze(0)


def factory(context: BindContext) -> Gating:
    """Gating serves every config alike."""
    return gating
