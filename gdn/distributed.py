"""Resolve on every rank of a torch.distributed group alike, even where the ranks' machines differ.

Each rank finds out what it can do; the first rank chooses, by its own ranking, among what all can do; every rank binds
that choice or says why it can't, and then all choose again. Decode, extend and verify stand on one state contract, the
same on every rank.

Every function here is a collective: all ranks of the group must call it, with the same config. An error on one rank
ends the call on all of them: that rank raises it, the others raise `gdn.RankError` naming it. A rank that dies or never
calls is left to the group's own timeout.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

from gdn.agreement import Decision
from gdn.agreement import Offer
from gdn.agreement import check_configs
from gdn.agreement import decide
from gdn.agreement import follow
from gdn.agreement import joint_requirements
from gdn.agreement import limits
from gdn.api import DeviceLike
from gdn.api import as_config
from gdn.api import as_device
from gdn.api import facts_of
from gdn.api import selection_of
from gdn.bind import Bound
from gdn.bind import Refusal
from gdn.bind import bind
from gdn.config import GdnConfig
from gdn.device import DeviceInfo
from gdn.errors import RankError
from gdn.errors import ResolutionError
from gdn.errors import UnknownDeviceError
from gdn.outcome import failure
from gdn.outcome import log
from gdn.outcome import triple_of
from gdn.ranks import Ranks
from gdn.registry import get_registry
from gdn.report import ResolutionReport
from gdn.resolver import Facts
from gdn.resolver import abilities
from gdn.resolver import explain as explain_facts
from gdn.selection import Prefer
from gdn.selection import Require
from gdn.selection import Selection
from gdn.triple import ResolvedTriple
from gdn.types import Operation


def resolve(
    config: GdnConfig | Mapping[str, Any],
    group: Any = None,
    *,
    device: DeviceLike = None,
    require: Require = None,
    prefer: Prefer = None,
    exclude: str | Iterable[str] = (),
) -> ResolvedTriple:
    """`gdn.resolve` on all ranks of `group`, with the same backends and state contract on each.

    `triple.report.rejected` says what each rank lacked ("rank 3: ..."). Nothing is cached: every call communicates.
    The first rank logs at INFO, the others at DEBUG; the order of preference is that of the first rank.

    Args:
        config: geometry and needs of one rank, the same on all.
        group: a `torch.distributed` process group; None: all ranks. A CPU (gloo) group needs no device.
        device, require, prefer, exclude: as for `gdn.resolve`, for this rank. A backend that one rank excludes or
            disables is used on none.

    Raises:
        NoBackendError, RequirementError: no triple that all ranks can have; the same error on every rank.
        ConfigError: the ranks' configs differ (on every rank), or there is no such group.
        RankError: another rank failed.
    """
    ranks = Ranks.of(group)
    question = ranks.share(lambda: _Question.of(config, device, require, prefer, exclude, bindable=True))
    refused: dict[tuple[str, Operation, int], str] = {}
    built: dict[Any, Any] = {}
    while True:  # ends: each round but the last adds a refused row on some rank, and rows are finitely many
        report = _agree(question, ranks, refused, bindable=True)
        outcome, all_bound = _bind(report, ranks, built)
        if isinstance(outcome, Refusal):
            refused[outcome.backend, outcome.operation, outcome.row] = outcome.message
        elif all_bound:
            break
    triple = triple_of(report, outcome)
    log(report, follower=not ranks.first)
    return triple


def explain(
    config: GdnConfig | Mapping[str, Any],
    group: Any = None,
    *,
    device: DeviceLike = None,
    require: Require = None,
    prefer: Prefer = None,
    exclude: str | Iterable[str] = (),
    assume_installed: Iterable[str] = (),
) -> ResolutionReport:
    """What `resolve` would choose, from what the manifests say: no kernel is imported. Arguments as for `gdn.explain`.

    Raises:
        ConfigError, RankError: as for `resolve`. An incomplete answer is no error here.
    """
    ranks = Ranks.of(group)
    assumed = tuple(assume_installed)
    question = ranks.share(lambda: _Question.of(config, device, require, prefer, exclude, assumed))
    return _agree(question, ranks, {}, bindable=False)


@dataclass(frozen=True, slots=True)
class _Question:
    """One rank's side of what is asked."""

    config: GdnConfig
    device: DeviceInfo
    selection: Selection
    assumed: tuple[str, ...]
    versions: Mapping[str, str]

    @classmethod
    def of(
        cls,
        config: GdnConfig | Mapping[str, Any],
        device: DeviceLike,
        require: Require,
        prefer: Prefer,
        exclude: str | Iterable[str],
        assumed: tuple[str, ...] = (),
        *,
        bindable: bool = False,
    ) -> _Question:
        machine = as_device(device)
        if bindable and machine.hypothetical:
            raise UnknownDeviceError(f"{machine} is not a device of this host; explain answers what-if questions")
        registry = get_registry()
        versions = {status.name: f"{status.distribution} {status.version}" for status in registry.statuses}
        selection = selection_of(registry, require, prefer, exclude)
        return cls(as_config(config), machine, selection, assumed, versions)

    def facts(self, refused: Mapping[tuple[str, Operation, int], str]) -> Facts:
        return facts_of(get_registry(), self.selection, self.assumed, refused)


def _agree(
    question: _Question, ranks: Ranks, refused: Mapping[tuple[str, Operation, int], str], *, bindable: bool
) -> ResolutionReport:
    """This rank's report of the joint choice. Raises on every rank alike where a triple is wanted and there is none."""
    facts = question.facts(refused)

    def offer() -> Offer:
        wishes = question.selection
        can = abilities(question.config, question.device, facts)
        return Offer(ranks.own, question.config, can, wishes.require, wishes.required_by, question.versions)

    offers = ranks.gather(offer)
    check_configs(offers)
    elsewhere = limits(ranks.own, offers)

    def choose() -> tuple[Decision, type[ResolutionError] | None, str] | None:
        if not ranks.first:
            return None
        report = explain_facts(question.config, question.device, replace(facts, elsewhere=elsewhere))
        error = None
        if bindable and not report.complete:
            error = failure(report, joint_requirements(question.selection, offers))
        return decide(report, offers), type(error) if error else None, str(error)

    answer = ranks.gather(choose)[0]
    assert answer is not None
    decision, error, text = answer
    if not ranks.first:
        elsewhere = follow(decision, elsewhere, {ability for offer in offers for ability in offer.abilities})
    report = explain_facts(question.config, question.device, replace(facts, elsewhere=elsewhere))
    if error is not None:
        raise error(text, report)
    return replace(report, state=decision.state, notes=(*report.notes, *decision.notes))


def _bind(report: ResolutionReport, ranks: Ranks, built: dict[Any, Any]) -> tuple[Bound | Refusal, bool]:
    """This rank's functions or refusal, and whether every rank has its functions."""
    manifests = {manifest.name: manifest for manifest in get_registry().manifests}
    outcome = ranks.share(lambda: bind(report, manifests, built))
    answers = ranks.gather(lambda: (not isinstance(outcome, Refusal), report.key))
    if len({key for _, key in answers}) > 1:
        keys = ", ".join(f"{key} on rank {rank}" for rank, (_, key) in zip(ranks.numbers, answers, strict=True))
        raise RankError(f"the ranks hold different triples, although the first chose for all: {keys}")
    return outcome, all(bound for bound, _ in answers)
