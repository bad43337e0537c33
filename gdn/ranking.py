"""Who is asked first: the host's own order of backends, as data with its reasons.

Plugins don't rank themselves (numbers chosen by each would race to the top). A backend that no row names stands after
those named, by its tier, built-in before third party, then by name; never by the order of registration.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from typing import Final

from gdn.capabilities import BackendManifest
from gdn.capabilities import SMRange
from gdn.conditions import Condition
from gdn.conditions import Question
from gdn.conditions import failures
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
    conditions: tuple[Condition, ...] = ()
    """Where one of them isn't met, `otherwise` is the order; each that failed is reported."""
    otherwise: tuple[str, ...] = ()
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

    def order_for(self, question: Question) -> tuple[str, ...]:
        """The order that holds under the row's conditions."""
        return self.otherwise if next(failures(self.conditions, question), None) is not None else self.order


_TRITON_FIRST: Final = ("triton", "cutedsl", "flashinfer")

SM100_EXTEND_DEFAULT: Final = (
    Condition("named", ()),
    Condition("runtime_major", least=13),
    Condition("config.max_tokens", least=1, most=8192),
    Condition("config.head_k_dim", 128),
    Condition("config.head_v_dim", 128),
    Condition("state.dtype", "bfloat16"),
    Condition("config.state_checkpoints", False),
    Condition("config.strided_state", False),
)
"""With the row's platform and architectures, the twelve conditions under which SGLang's default for SM100 prefill is
FlashInfer: `named` stands for its general and its per-operation flag, a known `max_tokens` also for fixed chunking."""

RANKING: Final = (
    RankingRow(
        "cuda",
        ("flashinfer", "triton", "cutedsl"),
        "on an H200 with an fp32 pool FlashInfer's extend takes 0.4 to 0.9 of Triton's GPU time from 4,096 tokens on, "
        "at 1x1024 1.6 times as long (benchmarks/results/h200-extend.json)",
        conditions=(Condition("state.dtype", "float32"),),
        otherwise=_TRITON_FIRST,
        operations=frozenset({"extend"}),
        sm_range=SMRange(min=90, max=90),
    ),
    RankingRow(
        "cuda",
        ("flashinfer", "triton", "cutedsl"),
        "SGLang's default for SM100 prefill, validated there; not measured here",
        conditions=SM100_EXTEND_DEFAULT,
        otherwise=_TRITON_FIRST,
        operations=frozenset({"extend"}),
        sm_range=SMRange(min=100, max=109),
    ),
    RankingRow("cuda", _TRITON_FIRST, "Triton is the only backend with rows shown on a GPU so far"),
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
    question: Question,
    *,
    prefer: tuple[str, ...] = (),
    third_party: bool = False,
) -> Rank:
    """Where `manifest` stands for `operation`, the caller's preference first."""
    row = ranking_row(operation, question.device)
    return Rank(
        preferred=prefer.index(manifest.name) if manifest.name in prefer else len(prefer),
        listed=_place(manifest.name, row.order_for(question) if row else ()),
        tier=_TIERS[manifest.tier],
        third_party=third_party,
        name=manifest.name,
    )


def unconditional(rank: Rank, operation: RowOperation, device: DeviceInfo) -> Rank:
    """The rank by the row's first order, whatever its conditions: comparable between state contracts."""
    row = ranking_row(operation, device)
    return replace(rank, listed=_place(rank.name, row.order if row else ()))


def _place(name: str, order: tuple[str, ...]) -> int:
    return order.index(name) if name in order else _UNLISTED
