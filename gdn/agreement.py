"""What ranks of a group tell each other, and what one rank may do given what the others told. No communication here."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from itertools import groupby

from gdn.capabilities import CapabilityRow
from gdn.config import GdnConfig
from gdn.errors import ConfigError
from gdn.reasons import Reason
from gdn.report import ResolutionReport
from gdn.resolver import Ability
from gdn.selection import Selection
from gdn.types import ROW_OPERATION
from gdn.types import Operation
from gdn.types import StateContract

_STATEFUL = ("decode", "extend", "verify")


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank can do."""

    rank: int
    config: GdnConfig
    abilities: Mapping[Ability, CapabilityRow | tuple[Reason, ...]]
    required: Mapping[Operation, str]
    required_by: Mapping[Operation, str]
    versions: Mapping[str, str]
    """Backend -> distribution and version, as text."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the first rank chose out of what all can do."""

    rank: int
    chosen: Mapping[Operation, str | None]
    state: StateContract | None
    notes: tuple[str, ...] = ()


Elsewhere = dict[Ability, tuple[Reason, ...]]


def check_configs(offers: Sequence[Offer]) -> None:
    """Raise the same ConfigError on every rank unless all ask for the same config."""
    first = offers[0]
    for offer in offers[1:]:
        ours, theirs = first.config.model_dump(), offer.config.model_dump()
        if different := [name for name in ours if ours[name] != theirs[name]]:
            values = ", ".join(f"{name} {ours[name]!r} and {theirs[name]!r}" for name in different)
            raise ConfigError(f"ranks {first.rank} and {offer.rank} resolve different configs: {values}")


def limits(own: int, offers: Sequence[Offer]) -> Elsewhere:
    """Why other ranks than `own` can't do what they can't, each reason with the ranks that it holds for."""
    known = {ability for offer in offers for ability in offer.abilities}
    return {ability: why for ability in known if (why := _reasons_elsewhere(ability, own, offers))}


def _reasons_elsewhere(ability: Ability, own: int, offers: Iterable[Offer]) -> tuple[Reason, ...]:
    ranks: dict[Reason, list[int]] = {}
    missing = (Reason("requires_missing", f"no backend {ability[2]} is installed there"),)
    for offer in offers:
        outcome = offer.abilities.get(ability, missing)
        if offer.rank != own and isinstance(outcome, tuple):
            for reason in outcome:
                ranks.setdefault(reason, []).append(offer.rank)
    return tuple(Reason(reason.code, f"{spelled(where)}: {reason.message}") for reason, where in ranks.items())


def decide(report: ResolutionReport, offers: Sequence[Offer]) -> Decision:
    """The first rank's report as a decision: its choices, over a state contract that suits every rank's rows."""
    chosen = dict(report.chosen)
    state = report.state
    if state is not None:
        rows = [
            row
            for operation, backend in chosen.items()
            if backend is not None and ROW_OPERATION[operation] in _STATEFUL
            for offer in offers
            if isinstance(row := offer.abilities[state.dtype, operation, backend], CapabilityRow)
        ]
        state = replace(
            state,
            alignment=max(row.state_alignment for row in rows),
            reserved_slots=max(row.reserved_slots for row in rows),
        )
    names = sorted({name for name in chosen.values() if name is not None})
    return Decision(offers[0].rank, chosen, state, tuple(note for name in names for note in _versions(name, offers)))


def _versions(backend: str, offers: Iterable[Offer]) -> Iterable[str]:
    """A note where ranks have different versions of a backend."""
    ranks: dict[str, list[int]] = {}
    for offer in offers:
        ranks.setdefault(offer.versions.get(backend, "unknown"), []).append(offer.rank)
    if len(ranks) > 1:
        yield f"{backend} differs: " + ", ".join(f"{version} on {spelled(where)}" for version, where in ranks.items())


def follow(decision: Decision, known: Elsewhere, abilities: Iterable[Ability]) -> Elsewhere:
    """`known`, and a reason against everything else that the decision left out."""
    left_out: Elsewhere = {}
    for ability in abilities:
        dtype, operation, backend = ability
        chosen = decision.chosen[operation]
        if chosen != backend:
            left_out[ability] = (Reason("policy", f"rank {decision.rank} chose {chosen or 'nobody'} for all"),)
        elif decision.state is not None and decision.state.dtype != dtype:
            left_out[ability] = (
                Reason("policy", f"rank {decision.rank} chose a {decision.state.dtype} state for all"),
            )
    return {**left_out, **known}


def joint_requirements(selection: Selection, offers: Iterable[Offer]) -> Selection:
    """`selection` with the requirements of every rank, so that an error names those that can't be met."""
    required, required_by = dict(selection.require), dict(selection.required_by)
    for offer in offers:
        for operation, name in offer.required.items():
            if operation not in required:
                required[operation], required_by[operation] = name, f"rank {offer.rank}: {offer.required_by[operation]}"
    return replace(selection, require=required, required_by=required_by)


def spelled(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 4-7"."""
    spans = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(sorted(ranks)), key=lambda numbered: numbered[1] - numbered[0])
    ]
    text = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
