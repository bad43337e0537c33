"""How far a result may be from the fp64 reference: one table, each entry with its reason.

The error of a quantity is the worst relative L2 error over its groups: one token's outputs, or one head's state of one
slot (see `gdn.testing.compare`). Stored 16-bit values carry half a unit in the last place each, which in relative L2
comes to 1.7e-3 for bf16 and 2.1e-4 for fp16; the entries leave room for twice that.
"""

from __future__ import annotations

from typing import Final
from typing import Literal

from gdn.testing.case import Case
from gdn.types import DType

Quantity = Literal["output", "state"]

_STORED: Final[dict[DType, float]] = {"float32": 0.0, "float16": 4.5e-4, "bfloat16": 3.6e-3}
"""Rounding of one stored tensor."""

_STEP: Final = 1e-5
"""fp32 sums of at most 256 products, and of one token's gates: a wrong epsilon shows at 1e-2, a beta rounded to bf16 at
1e-3, both on an fp32 pool."""

_CHUNK: Final[dict[DType, float]] = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 1.2e-2}
"""extend: products of a chunk in the activation dtype with fp32 sums. fp32 still tells an off-by-one chunk or a rounded
beta; the published kernels measure 4e-3 to 5e-3 in bf16 over whole tensors, single tokens and heads twice that."""

_CONV: Final = 2e-6
"""At most 8 fp32 products, plus SiLU in fp32, whose relative error near -20 is the larger part."""

_GATE: Final = 5e-6
"""A few fp32 functions in a row."""


def smallest_row(operation: str, activation: DType) -> float:
    """Below this share of the mean norm a row's error is measured against that share.

    A small row is the difference of larger terms. Where these are products of rounded operands (extend in 16 bits), its
    error is that of an average row; where all arithmetic is fp32, a tenth of one tells a fault from rounding.
    """
    return 1.0 if operation == "extend" and activation != "float32" else 0.1


def tolerance(operation: str, quantity: Quantity, case: Case) -> float:
    """The largest allowed error."""
    if operation == "qkv_split":
        return 0.0
    if operation == "gating":
        return _GATE
    if operation in ("conv_extend", "conv_update"):
        stored = case.activation if quantity == "output" else case.conv_state or case.activation
        return _CONV + _STORED[stored]
    arithmetic = _CHUNK[case.activation] if operation == "extend" else _STEP
    stored = case.activation if quantity == "output" else case.state
    allowed = arithmetic + _STORED[stored]
    if operation == "replay_decode":
        return allowed + 3 * _STORED[case.state]  # the ring's d and k were rounded too
    if operation == "tree_verify":
        return allowed + 3 * _STORED[case.state]  # a node may start from its parent's stored state
    return allowed
