"""Every operation in fp64, written from the formulas of `gdn.ops`, one token at a time.

Same signatures as the operations. Tensors given as pools, buffers or `out` are written in place in their own dtype, so
give fp64 copies of them to see results that were never rounded (`gdn.testing.compare` does).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from typing import Final

from gdn.testing.reference.convolution import conv_extend
from gdn.testing.reference.convolution import conv_update
from gdn.testing.reference.projection import gating
from gdn.testing.reference.projection import qkv_split
from gdn.testing.reference.recurrence import decode
from gdn.testing.reference.recurrence import extend
from gdn.testing.reference.recurrence import packed_decode
from gdn.testing.reference.recurrence import verify
from gdn.testing.reference.replay import replay_decode

REFERENCE: Final[dict[str, Callable[..., Any]]] = {
    "decode": decode,
    "packed_decode": packed_decode,
    "replay_decode": replay_decode,
    "extend": extend,
    "verify": verify,
    "tree_verify": verify,
    "conv_extend": conv_extend,
    "conv_update": conv_update,
    "gating": gating,
}
"""By operation; `qkv_split` needs the heads it is bound to (`gdn.testing.reference.qkv_split(config)`)."""

__all__ = [
    "REFERENCE",
    "conv_extend",
    "conv_update",
    "decode",
    "extend",
    "gating",
    "packed_decode",
    "qkv_split",
    "replay_decode",
    "verify",
]
