"""Plain vocabulary: operations, dtypes, the state contract. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from typing import Literal
from typing import get_args

DType = Literal["float32", "float16", "bfloat16"]
Platform = Literal["cuda", "rocm", "npu", "cpu"]
StateLayout = Literal["vk"]

RowOperation = Literal["decode", "extend", "verify", "conv_extend", "conv_update", "gating", "qkv_split"]
"""What one manifest row declares."""

Operation = Literal[
    "decode", "extend", "verify",
    "packed_decode", "replay_decode", "tree_verify",
    "conv_extend", "conv_update", "gating", "qkv_split",
]  # fmt: skip
"""What a resolved triple can call. `packed_decode` and `replay_decode` come from decode rows, `tree_verify` from
verify rows; all others from rows of their own name."""

OPERATIONS: Final[tuple[Operation, ...]] = get_args(Operation)
CORE_OPERATIONS: Final[tuple[Operation, ...]] = ("decode", "extend", "verify")
"""The three that share one state pool and are resolved together."""

AUXILIARY_OPERATIONS: Final[tuple[Operation, ...]] = ("conv_extend", "conv_update", "gating", "qkv_split")

ROW_OPERATION: Final[dict[Operation, RowOperation]] = {
    "decode": "decode", "packed_decode": "decode", "replay_decode": "decode",
    "extend": "extend",
    "verify": "verify", "tree_verify": "verify",
    "conv_extend": "conv_extend", "conv_update": "conv_update", "gating": "gating", "qkv_split": "qkv_split",
}  # fmt: skip
"""The manifest row that declares each operation."""

DTYPE_BYTES: Final[dict[str, int]] = {"float32": 4, "float16": 2, "bfloat16": 2}

CHUNK: Final = 64
"""Tokens per chunk of extend: the grid of `chunk_states` and `snapshot_chunks`."""


@dataclass(frozen=True, slots=True)
class StateContract:
    """What the owner of the state pool must allocate so that decode, extend and verify can share it.

    Attributes:
        dtype: element type of the recurrent state.
        layout: order of the two inner axes; "vk" is `[slots, HV, V, K]` with K contiguous.
        alignment: bytes to which the address of every slot must be aligned.
        reserved_slots: slots that backends use as scratch; the pool allocates them after the last usable slot.
    """

    dtype: DType
    layout: StateLayout = "vk"
    alignment: int = 1
    reserved_slots: int = 0

    def slots(self, usable: int) -> int:
        """Slots to allocate so that `usable` of them can hold requests."""
        return usable + self.reserved_slots
