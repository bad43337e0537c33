"""Who is asked first: the host's own order of backends, as data with its reasons.

Plugins don't rank themselves (numbers chosen by each would race to the top). A backend that no row names stands after
those named, by its tier, built-in before third party, then by name; never by the order of registration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gdn.capabilities import BackendManifest
from gdn.capabilities import SMRange
from gdn.device import DeviceInfo
from gdn.types import Platform
from gdn.types import RowOperation

_TIERS: Final = {"preferred": 0, "normal": 1, "fallback": 2, "reference": 3}


@dataclass(frozen=True, slots=True)
class RankingRow:
    """The order for some operations on some devices."""

    platform: Platform
    order: tuple[str, ...]
    reason: str
    operations: frozenset[RowOperation] | None = None
    """None: every operation."""
    sm_range: SMRange | None = None
    """None: every device of the platform."""

    def applies(self, operation: RowOperation, device: DeviceInfo) -> bool:
        return (
            self.platform == device.type
            and (self.operations is None or operation in self.operations)
            and (self.sm_range is None or (device.sm is not None and device.sm in self.sm_range))
        )


RANKING: Final = (
    RankingRow(
        "cuda", ("triton", "cutedsl", "flashinfer"), "Triton is the only backend with rows shown on a GPU so far"
    ),
    RankingRow("rocm", ("triton",), "the only built-in backend for AMD GPUs"),
    RankingRow("npu", ("npu", "triton"), "vendor operators before generic kernels"),
    RankingRow("cpu", ("cpu",), "the only built-in backend for CPUs"),
)
"""First row that applies wins."""


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """Position of one backend for one operation; smaller is asked first. Total: the name breaks every tie."""

    preferred: int
    listed: int
    tier: int
    third_party: bool
    name: str


_UNLISTED: Final = 1_000


def ranking_row(operation: RowOperation, device: DeviceInfo) -> RankingRow | None:
    """The row of the table that orders `operation` on `device`."""
    return next((row for row in RANKING if row.applies(operation, device)), None)


def rank(
    manifest: BackendManifest,
    operation: RowOperation,
    device: DeviceInfo,
    *,
    prefer: tuple[str, ...] = (),
    third_party: bool = False,
) -> Rank:
    """Where `manifest` stands for `operation` on `device`, the caller's preference first."""
    row = ranking_row(operation, device)
    order = row.order if row else ()
    return Rank(
        preferred=prefer.index(manifest.name) if manifest.name in prefer else len(prefer),
        listed=order.index(manifest.name) if manifest.name in order else _UNLISTED,
        tier=_TIERS[manifest.tier],
        third_party=third_party,
        name=manifest.name,
    )
