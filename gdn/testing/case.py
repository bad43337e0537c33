"""One situation in which an operation can be called, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from typing import Any
from typing import Final
from typing import Literal
from typing import NamedTuple

from gdn.config import GdnConfig
from gdn.types import DType

Gates = Literal["usual", "none", "slow", "strong", "forgetting"]


class Heads(NamedTuple):
    """Numbers of key and value heads, and their dims."""

    HK: int
    HV: int
    K: int
    V: int

    @property
    def dim(self) -> int:
        """Columns of packed rows."""
        return 2 * self.HK * self.K + self.HV * self.V

    def config(self, activation: DType, state: DType, **changes: Any) -> GdnConfig:
        """A config of these heads and dtypes."""
        fields: dict[str, Any] = {
            "num_k_heads": self.HK,
            "num_v_heads": self.HV,
            "head_k_dim": self.K,
            "head_v_dim": self.V,
            "activation_dtype": activation,
            "state_dtype": state,
        }
        return GdnConfig(**{**fields, **changes})


_HEADS: Final = Heads(2, 4, 32, 48)


@dataclass(frozen=True)
class Case:
    """What a call looks like; each operation reads the fields that concern it."""

    name: str = "plain"
    heads: Heads = _HEADS
    lengths: tuple[int, ...] = (1, 1, 1)
    """Tokens of each request; decode-like operations read only how many requests there are."""
    slots: tuple[int, ...] | None = None
    """Slot of each request; None: scattered ones. Some may lie outside the pool."""
    pool_slots: int | None = None
    activation: DType = "float32"
    state: DType = "float32"
    parameters: Literal["float32", "activation"] = "float32"
    """Dtype of A_log and dt_bias."""
    index: Literal["int32", "int64"] = "int32"
    views: bool = False
    """Inputs are slices of wider tensors that begin at odd offsets; indices are columns of a matrix."""
    slot_gap: int = 0
    """Elements between two slots of a pool."""
    reserved: int = 0
    """Scratch slots that the pool of states holds after those of requests, as a state contract may ask."""
    tail: int = 0
    """Token rows after the last sequence."""
    gates: Gates = "usual"
    scale: float | None = None
    out: bool = False
    """The caller gives `out`."""
    offsets: bool = False
    """decode gets query_start_loc; requests of length 0 own no row."""
    drafts: int = 4
    buffer: bool = True
    """verify and conv_update get buffers for what holds after each draft."""
    rows_outside: bool = False
    """The first two requests name buffer rows that don't exist."""
    tree: bool = False
    chunk_states: bool = False
    snapshots: tuple[int, ...] | None = None
    """Chunk of each sequence to snapshot, -1 for none."""
    host_lengths: bool = False
    ring: int = 4
    cursors: tuple[int, ...] | None = None
    forced: tuple[int, ...] | None = None
    width: int = 4
    bias: bool = True
    act: str | None = "silu"
    history: Literal["all", "none", "mixed"] = "all"
    """Which sequences of conv_extend have an initial state."""
    conv_state: DType | None = None
    """None: the activation dtype."""
    wide_window: int = 0
    """Columns of conv states beyond W-1."""

    def but(self, name: str = "", **changes: Any) -> Case:
        """The same case with some fields changed, under a longer name."""
        return replace(self, name=f"{self.name}-{name}" if name else self.name, **changes)

    def config(self, **changes: Any) -> GdnConfig:
        """A config whose triple serves this case."""
        fields = {"conv_kernel_size": self.width, "strided_state": self.slot_gap > 0, **changes}
        return self.heads.config(self.activation, self.state, **fields)
