"""The answer of the resolver, with the reason for every no."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import Final
from typing import NamedTuple

from gdn.config import GdnConfig
from gdn.device import DeviceInfo
from gdn.reasons import ReasonCode
from gdn.types import CORE_OPERATIONS
from gdn.types import OPERATIONS
from gdn.types import Operation
from gdn.types import StateContract

REPORT_VERSION: Final = 1


class Rejection(NamedTuple):
    """Why one backend doesn't serve one operation: what was got and what is needed."""

    backend: str
    operation: str
    code: ReasonCode
    message: str


class Fallback(NamedTuple):
    """A preference that wasn't met."""

    operation: str
    preferred: str
    given: str | None
    code: ReasonCode
    message: str


@dataclass(frozen=True, slots=True)
class ResolutionReport:
    """Who serves what on this device, and why nobody else does."""

    config: GdnConfig
    device: DeviceInfo
    state: StateContract | None
    """None where no state contract serves decode, extend and verify together."""
    chosen: Mapping[Operation, str | None]
    needed: tuple[Operation, ...]
    """Operations without which there is no triple."""
    rejected: tuple[Rejection, ...] = ()
    """Every failing constraint of every row, the closest row of a backend first."""
    lost: tuple[Rejection, ...] = ()
    """The deciding reasons of backends ranked above the chosen one (or of all where none is chosen)."""
    fallbacks: tuple[Fallback, ...] = ()
    notes: tuple[str, ...] = ()
    """Limits and hints that an operator should read."""
    rows: Mapping[Operation, int] = field(default_factory=dict)
    """Index of the chosen manifest row, per operation."""

    @property
    def complete(self) -> bool:
        """Every needed operation has a backend."""
        return all(self.chosen.get(operation) for operation in self.needed)

    @property
    def key(self) -> str:
        """Stable hash of config, choices and state contract; equal on ranks that chose alike."""
        facts = {
            "config": self.config.model_dump(mode="json"),
            "chosen": dict(sorted(self.chosen.items())),
            "state": asdict(self.state) if self.state else None,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def reasons(self, operation: str, backend: str) -> tuple[Rejection, ...]:
        """All reasons why `backend` doesn't serve `operation`."""
        return tuple(r for r in self.rejected if r.operation == operation and r.backend == backend)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "report_version": REPORT_VERSION,
            "key": self.key,
            "complete": self.complete,
            "config": self.config.model_dump(mode="json"),
            "device": device_dict(self.device),
            "state": asdict(self.state) if self.state else None,
            "chosen": dict(self.chosen),
            "needed": list(self.needed),
            "rejected": [r._asdict() for r in self.rejected],
            "lost": [r._asdict() for r in self.lost],
            "fallbacks": [f._asdict() for f in self.fallbacks],
            "notes": list(self.notes),
        }

    def summary(self) -> str:
        """The triple in one line."""
        core = " ".join(f"{op}={self.chosen.get(op) or 'none'}" for op in CORE_OPERATIONS)
        packed = "yes" if self.chosen.get("packed_decode") else "no"
        state = f"{self.state.dtype}/{self.state.layout}" if self.state else "none"
        return f"triple {core} packed_decode={packed} state={state} device={self.device} key={self.key}"

    def _serves(self, rejection: Rejection) -> bool:
        """Whether the backend serves the operation all the same, with a later row."""
        return dict[str, str | None](self.chosen.items()).get(rejection.operation) == rejection.backend

    def __str__(self) -> str:
        lines = [self.summary()]
        others = [op for op in OPERATIONS if op not in CORE_OPERATIONS]
        lines.append("  " + " ".join(f"{op}={self.chosen.get(op) or 'none'}" for op in others))
        for r in self.lost:
            who = f"{r.backend}'s first choice" if self._serves(r) else r.backend
            lines.append(f"  {r.operation}: {who} not used: {r.message} [{r.code}]")
        lines += [f"  {f.operation}: preferred {f.preferred}, given {f.given}: {f.message}" for f in self.fallbacks]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def device_dict(device: DeviceInfo) -> dict[str, Any]:
    """A device's facts as plain data."""
    facts = asdict(device)
    facts["cpu"]["features"] = sorted(device.cpu.features)
    facts["problems"] = list(device.problems)
    facts["architecture"] = device.architecture
    return facts
