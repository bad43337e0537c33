"""Match manifests with a config and a device, all operations together over one state contract.

Pure: every fact about the system is an argument, so any machine can be asked about anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import Final

from gdn.capabilities import BackendManifest
from gdn.capabilities import CapabilityRow
from gdn.conditions import Question
from gdn.conditions import failures
from gdn.config import GdnConfig
from gdn.device import DeviceInfo
from gdn.matching import InstalledVersion
from gdn.matching import match
from gdn.ranking import Rank
from gdn.ranking import rank
from gdn.ranking import ranking_row
from gdn.ranking import unconditional
from gdn.reasons import Reason
from gdn.report import Fallback
from gdn.report import Rejection
from gdn.report import ResolutionReport
from gdn.selection import Selection
from gdn.types import AUXILIARY_OPERATIONS
from gdn.types import CORE_OPERATIONS
from gdn.types import OPERATIONS
from gdn.types import ROW_OPERATION
from gdn.types import DType
from gdn.types import Operation
from gdn.types import StateContract

Refusals = Mapping[tuple[str, Operation, int], str]
"""Rows that their factory refused at bind time: (backend, operation, row index) -> why."""

Ability = tuple[DType, Operation, str]
"""One backend doing one operation over states of one dtype."""

_FROM_DECODE: Final[tuple[Operation, ...]] = ("packed_decode", "replay_decode")
_STATE_PREFERENCE: Final[tuple[DType, ...]] = ("float32", "bfloat16", "float16")
"""Under state_dtype="auto", among contracts that give equally ranked backends: most precise first."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that an answer depends on beside config and device."""

    manifests: tuple[BackendManifest, ...]
    installed: InstalledVersion
    selection: Selection = field(default_factory=Selection)
    third_party: frozenset[str] = frozenset()
    broken: Mapping[str, str] = field(default_factory=dict)
    """Plugins that failed to load: name -> stage and error."""
    refused: Refusals = field(default_factory=dict)
    elsewhere: Mapping[Ability, tuple[Reason, ...]] = field(default_factory=dict)
    """What keeps a backend from an operation on other ranks, so here too."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    manifest: BackendManifest
    rank: Rank
    row: int | None
    """Index of the first row that matches; None: none does."""
    reasons: tuple[Reason, ...]
    """Of every row, the closest first."""
    deciding: int
    """How many of them belong to the closest row."""
    passed_over: tuple[Reason, ...] = ()
    """Why rows before `row` were given up although they match: their factories refused."""


@dataclass(frozen=True, slots=True)
class _Pick:
    """The outcome for one operation under one state contract."""

    operation: Operation
    winner: _Candidate | None
    losers: tuple[_Candidate, ...]
    unmet: tuple[str, ...] = ()
    """Conditions of the ranking row that don't hold, so that its second order does."""


def needed_operations(config: GdnConfig) -> tuple[Operation, ...]:
    """The operations without which `config` has no triple."""
    extra: list[Operation] = []
    if config.tree_drafts:
        extra.append("tree_verify")
    if config.replay_window:
        extra.append("replay_decode")
    return (*CORE_OPERATIONS, *extra)


def explain(config: GdnConfig, device: DeviceInfo, facts: Facts) -> ResolutionReport:
    """Resolve every operation for `config` on `device`; never raises for want of a backend."""
    needed = needed_operations(config)
    outcomes = [(state, _pick_all(config, device, state, facts)) for state in _contracts(config)]
    serving = [o for o in outcomes if all(o[1][op].winner for op in needed)]
    if serving:
        state, picks = min(serving, key=lambda o: _outcome_order(o[1], device))
    else:
        state, picks = max(outcomes, key=lambda o: sum(o[1][op].winner is not None for op in needed))
    return _report(config, device, facts, needed, state if serving else None, picks)


def abilities(config: GdnConfig, device: DeviceInfo, facts: Facts) -> dict[Ability, CapabilityRow | tuple[Reason, ...]]:
    """Every backend's row for every operation and state dtype that `config` allows, or why it has none."""
    found: dict[Ability, CapabilityRow | tuple[Reason, ...]] = {}
    for state in _contracts(config):
        for manifest in facts.manifests:
            decode_row = _candidate(manifest, "decode", config, device, state, facts).row
            for operation in OPERATIONS:
                only_row = decode_row if operation in _FROM_DECODE else None
                candidate = _candidate(manifest, operation, config, device, state, facts, only_row=only_row)
                found[state.dtype, operation, manifest.name] = (
                    candidate.reasons[: candidate.deciding]
                    if candidate.row is None
                    else manifest.capabilities[candidate.row]
                )
        for name, error in facts.broken.items():
            for operation in OPERATIONS:
                found[state.dtype, operation, name] = (Reason("plugin_broken", error),)
    return found


def _contracts(config: GdnConfig) -> list[StateContract]:
    dtypes = _STATE_PREFERENCE if config.state_dtype == "auto" else (config.state_dtype,)
    return [StateContract(dtype) for dtype in dtypes]


def _outcome_order(picks: Mapping[Operation, _Pick], device: DeviceInfo) -> list[Rank]:
    return [
        unconditional(winner.rank, ROW_OPERATION[op], device) for op in CORE_OPERATIONS if (winner := picks[op].winner)
    ]


def _pick_all(config: GdnConfig, device: DeviceInfo, state: StateContract, facts: Facts) -> dict[Operation, _Pick]:
    picks: dict[Operation, _Pick] = {}
    for operation in (*CORE_OPERATIONS, *AUXILIARY_OPERATIONS):
        picks[operation] = _pick(operation, config, device, state, facts)
    verify = picks["verify"].winner
    picks["tree_verify"] = _pick("tree_verify", config, device, state, facts, verify.manifest.name if verify else None)
    decode = picks["decode"].winner
    for operation in _FROM_DECODE:
        picks[operation] = _pick_from_decode(operation, decode, config, device, state, facts)
    return picks


def _pick(
    operation: Operation,
    config: GdnConfig,
    device: DeviceInfo,
    state: StateContract,
    facts: Facts,
    companion: str | None = None,
) -> _Pick:
    candidates = [
        _candidate(manifest, operation, config, device, state, facts, companion=companion)
        for manifest in facts.manifests
    ]
    candidates.sort(key=lambda c: c.rank)
    winner = next((c for c in candidates if c.row is not None), None)
    row = ranking_row(ROW_OPERATION[operation], device)
    unmet = tuple(failures(row.conditions, _question(operation, config, device, state, facts))) if row else ()
    return _Pick(operation, winner, tuple(c for c in candidates if c is not winner), unmet)


def _question(
    operation: Operation, config: GdnConfig, device: DeviceInfo, state: StateContract, facts: Facts
) -> Question:
    return Question(config, device, state, tuple(sorted(facts.selection.named(operation))))


def _pick_from_decode(
    operation: Operation,
    decode: _Candidate | None,
    config: GdnConfig,
    device: DeviceInfo,
    state: StateContract,
    facts: Facts,
) -> _Pick:
    """Packed and replay decode belong to the row that serves decode: all three update the same state."""
    if decode is None or decode.row is None:
        pick = _pick(operation, config, device, state, facts)
        return _Pick(operation, None, tuple(loser for loser in pick.losers if loser.row is None))
    others = (
        _beside_decode(_candidate(manifest, operation, config, device, state, facts), operation, decode.manifest.name)
        for manifest in facts.manifests
        if manifest is not decode.manifest
    )
    losers = tuple(sorted(others, key=lambda c: c.rank))
    candidate = _candidate(decode.manifest, operation, config, device, state, facts, only_row=decode.row)
    if candidate.row is None:
        return _Pick(operation, None, (candidate, *losers))
    return _Pick(operation, candidate, losers)


def _beside_decode(candidate: _Candidate, operation: Operation, decoder: str) -> _Candidate:
    """The candidate as a loser: it may not serve `operation` while another backend decodes."""
    if candidate.row is None:
        return candidate
    why = Reason("policy", f"{operation} belongs to the row that serves decode, and {decoder} serves it")
    return replace(candidate, row=None, reasons=(why,), deciding=1)


def _candidate(
    manifest: BackendManifest,
    operation: Operation,
    config: GdnConfig,
    device: DeviceInfo,
    state: StateContract,
    facts: Facts,
    *,
    only_row: int | None = None,
    companion: str | None = None,
) -> _Candidate:
    selection = facts.selection
    place = rank(
        manifest,
        ROW_OPERATION[operation],
        _question(operation, config, device, state, facts),
        prefer=(*selection.order(operation), *((companion,) if companion else ())),
        third_party=manifest.name in facts.third_party,
    )
    by_name = (
        *_name_reasons(manifest.name, operation, selection),
        *facts.elsewhere.get((state.dtype, operation, manifest.name), ()),
    )
    failures: list[tuple[Reason, ...]] = []
    found: int | None = None
    for index, row in enumerate(manifest.capabilities):
        if row.op != ROW_OPERATION[operation] or only_row not in (None, index):
            continue
        reasons = (
            *by_name,
            *_row_reasons(manifest, row, index, operation, config, device, state, facts),
        )
        if not reasons:
            found = index
            break
        failures.append(reasons)
    if found is not None:
        refusals = dict.fromkeys(r for reasons in failures for r in reasons if r.code == "bind_refused")
        return _Candidate(manifest, place, found, (), 0, tuple(refusals))
    if not failures:
        undeclared = Reason("op_not_declared", f"the manifest declares no {ROW_OPERATION[operation]} row")
        failures.append((*by_name, undeclared))
    failures.sort(key=_distance)
    unique = dict.fromkeys(reason for reasons in failures for reason in reasons)
    return _Candidate(manifest, place, None, tuple(unique), len(failures[0]))


def _distance(reasons: Sequence[Reason]) -> tuple[bool, bool, int]:
    """How far a row is from matching: one for another kind of device is farthest, then one for another chip."""
    failed = {reason.code for reason in reasons}
    return "device_type" in failed, "sm_range" in failed, len(reasons)


def _name_reasons(name: str, operation: Operation, selection: Selection) -> tuple[Reason, ...]:
    reasons = []
    if name in selection.disabled:
        reasons.append(Reason("disabled", "switched off by GDN_DISABLE_BACKENDS"))
    if name in selection.exclude:
        reasons.append(Reason("excluded", "the call excludes it"))
    required = selection.require.get(operation)
    if required is not None and required != name:
        reasons.append(Reason("policy", f"{selection.required_by[operation]} asks for {required}"))
    return tuple(reasons)


def _row_reasons(
    manifest: BackendManifest,
    row: CapabilityRow,
    index: int,
    operation: Operation,
    config: GdnConfig,
    device: DeviceInfo,
    state: StateContract,
    facts: Facts,
) -> Iterable[Reason]:
    yield from match(row, operation, config, device, state, facts.installed)
    if manifest.maturity_of(row) == "experimental" and manifest.name not in facts.selection.named(operation):
        yield Reason("experimental", "the row is experimental: name the backend in require or prefer to use it")
    for refused_operation in _bound_with(operation, config):
        if (why := facts.refused.get((manifest.name, refused_operation, index))) is not None:
            yield Reason("bind_refused", why)


def _bound_with(operation: Operation, config: GdnConfig) -> tuple[Operation, ...]:
    """Operations whose refusal makes a row unfit for `operation`: itself, and what the config needs beside it."""
    if operation == "decode" and config.replay_window:
        return ("decode", "replay_decode")
    return (operation,)


def _report(
    config: GdnConfig,
    device: DeviceInfo,
    facts: Facts,
    needed: tuple[Operation, ...],
    state: StateContract | None,
    picks: Mapping[Operation, _Pick],
) -> ResolutionReport:
    rejected: list[Rejection] = []
    lost: list[Rejection] = []
    fallbacks: list[Fallback] = []
    notes: list[str] = []
    winners: dict[Operation, _Candidate] = {}
    for operation in OPERATIONS:
        pick = picks[operation]
        if pick.winner:
            winners[operation] = pick.winner
        rejected += _rejections(pick, device)
        lost += _losses(pick)
        for name, error in sorted(facts.broken.items()):
            rejected.append(Rejection(name, operation, "plugin_broken", error))
        fallbacks += _fallbacks(pick, facts)
    chosen_rows = {c.manifest.capabilities[c.row] for c in winners.values() if c.row is not None}
    notes += [row.note for row in sorted(chosen_rows, key=lambda row: row.op) if row.note]
    notes += facts.selection.overridden
    return ResolutionReport(
        config=config,
        device=device,
        state=_contract_of(state, winners) if state else None,
        chosen={op: winners[op].manifest.name if op in winners else None for op in OPERATIONS},
        needed=needed,
        rejected=tuple(dict.fromkeys(rejected)),
        lost=tuple(dict.fromkeys(lost)),
        fallbacks=tuple(fallbacks),
        notes=tuple(dict.fromkeys(notes)),
        rows={op: c.row for op, c in winners.items() if c.row is not None},
    )


def _contract_of(state: StateContract, winners: Mapping[Operation, _Candidate]) -> StateContract:
    """The contract with the strictest alignment and the most scratch slots of the chosen rows."""
    stateful = ("decode", "extend", "verify")
    rows = [
        c.manifest.capabilities[c.row]
        for op, c in winners.items()
        if ROW_OPERATION[op] in stateful and c.row is not None
    ]
    return StateContract(
        dtype=state.dtype,
        layout=state.layout,
        alignment=max((row.state_alignment for row in rows), default=1),
        reserved_slots=max((row.reserved_slots for row in rows), default=0),
    )


def _rejections(pick: _Pick, device: DeviceInfo) -> Iterable[Rejection]:
    yield from _refused_rows(pick)
    for loser in pick.losers:
        if loser.row is None:
            for reason in loser.reasons:
                yield Rejection(loser.manifest.name, pick.operation, reason.code, reason.message)
        elif pick.winner:
            for why in _ranked_after(pick.winner.manifest.name, loser.manifest.name, pick, device):
                yield Rejection(loser.manifest.name, pick.operation, "policy", why)


def _ranked_after(winner: str, loser: str, pick: _Pick, device: DeviceInfo) -> Iterable[str]:
    """Why a backend that matches stands behind the winner: by the row's order, or for conditions that don't hold."""
    row = ranking_row(ROW_OPERATION[pick.operation], device)
    if row is None:
        return (f"ranked after {winner}",)
    if not pick.unmet:
        return (f"ranked after {winner}: {row.reason}",)
    if loser in row.order and row.order.index(loser) == 0:
        return [f"ranked after {winner}: it would come first, but {failure}" for failure in pick.unmet]
    return (f"ranked after {winner}",)


def _refused_rows(pick: _Pick) -> Iterable[Rejection]:
    """Rows of the winner itself that stood before the one that serves."""
    if pick.winner:
        for reason in pick.winner.passed_over:
            yield Rejection(pick.winner.manifest.name, pick.operation, reason.code, reason.message)


def _losses(pick: _Pick) -> Iterable[Rejection]:
    yield from _refused_rows(pick)
    for loser in pick.losers:
        if loser.row is None and (pick.winner is None or loser.rank < pick.winner.rank):
            for reason in loser.reasons[: loser.deciding]:
                yield Rejection(loser.manifest.name, pick.operation, reason.code, reason.message)


def _fallbacks(pick: _Pick, facts: Facts) -> Iterable[Fallback]:
    preferred = facts.selection.prefer.get(pick.operation, ())
    given = pick.winner.manifest.name if pick.winner else None
    for name in preferred:
        if name == given:
            return
        if name in facts.broken:
            yield Fallback(pick.operation, name, given, "plugin_broken", facts.broken[name])
        for loser in pick.losers:
            if loser.manifest.name == name:
                for reason in loser.reasons[: loser.deciding]:
                    yield Fallback(pick.operation, name, given, reason.code, reason.message)
