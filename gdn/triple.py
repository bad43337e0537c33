"""What `gdn.resolve` returns: the bound operations, with the report of how they were chosen."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

from gdn.config import GdnConfig
from gdn.device import DeviceInfo
from gdn.ops import ConvExtend
from gdn.ops import ConvUpdate
from gdn.ops import Decode
from gdn.ops import Extend
from gdn.ops import Gating
from gdn.ops import PackedDecode
from gdn.ops import QkvSplit
from gdn.ops import ReplayDecode
from gdn.ops import Verify
from gdn.report import ResolutionReport
from gdn.types import OPERATIONS
from gdn.types import StateContract


@dataclass(frozen=True, slots=True)
class ResolvedTriple:
    """Decode, extend and verify over one state contract, and the operations around them.

    Each attribute is the very function that the backend's factory returned (see `gdn.ops` for signatures), or None
    where nobody serves it. Only `verify` may be wrapped: where trees are verified by another backend than chains.
    """

    config: GdnConfig
    device: DeviceInfo
    state: StateContract
    backends: Mapping[str, str]
    report: ResolutionReport
    decode: Decode
    extend: Extend
    verify: Verify
    packed_decode: PackedDecode | None = None
    replay_decode: ReplayDecode | None = None
    tree_verify: Verify | None = None
    conv_extend: ConvExtend | None = None
    conv_update: ConvUpdate | None = None
    gating: Gating | None = None
    qkv_split: QkvSplit | None = None

    @property
    def key(self) -> str:
        """Stable hash, equal on ranks that chose alike."""
        return self.report.key

    def explain(self) -> str:
        """The report as text."""
        return str(self.report)

    def operations(self) -> dict[str, Callable[..., Any]]:
        """The bound operations by name, without those that nobody serves."""
        bound = {name: getattr(self, name) for name in OPERATIONS}
        return {name: function for name, function in bound.items() if function is not None}

    def checked(self) -> ResolvedTriple:
        """A copy whose operations also check values (slots, offsets, parents, gates) before they run.

        For tests and bug reports: every call reads its index arguments back to the host.
        """
        from gdn.checked import checked

        functions: dict[str, Any] = {name: checked(name, function) for name, function in self.operations().items()}
        return replace(self, **functions)

    def compilable(self) -> ResolvedTriple:
        """A copy for `torch.compile`: in a graph each operation is one operator `torch.ops.gdn.*`, with no graph break.

        Outside of graphs its operations call the bound functions directly. Results, state updates and errors are those
        of the operations themselves. Chunk states of `extend` without `seq_lens_cpu` have a size that only the device
        knows: a graph needs `torch._dynamo.config.capture_dynamic_output_shape_ops` for them.
        """
        from gdn.torch_ops import compilable

        functions: dict[str, Any] = compilable(f"{self.key}@{self.device.torch_device}", self.config, self.operations())
        return replace(self, **functions)
