"""What a report becomes: a triple, an error with every reason, or log lines."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING
from typing import Any

from gdn.errors import NoBackendError
from gdn.errors import RequirementError
from gdn.triple import ResolvedTriple

if TYPE_CHECKING:
    from gdn.bind import Bound
    from gdn.report import ResolutionReport
    from gdn.selection import Selection

logger = logging.getLogger("gdn.resolver")


def triple_of(report: ResolutionReport, bound: Bound) -> ResolvedTriple:
    """The triple of a complete report and its bound functions."""
    assert report.state is not None
    chosen: Mapping[str, str] = {operation: name for operation, name in report.chosen.items() if name is not None}
    functions: dict[str, Any] = {operation: function for operation, function in bound.items()}
    return ResolvedTriple(
        config=report.config,
        device=report.device,
        state=report.state,
        backends=MappingProxyType(chosen),
        report=report,
        **functions,
    )


def failure(report: ResolutionReport, selection: Selection) -> NoBackendError | RequirementError:
    """The error for an incomplete report, with every reason in its text."""
    missing = [operation for operation in report.needed if not report.chosen[operation]]
    unmet = [operation for operation in missing if operation in selection.require]
    lines = [f"nobody serves {', '.join(missing)} for this config on {report.device}"]
    if report.state is None and not missing:
        lines = [f"no state dtype serves {', '.join(report.needed)} together on {report.device}"]
    for operation in unmet:
        name = selection.require[operation]
        lines.append(f"{operation}: {selection.required_by[operation]} asks for {name}, which can't serve it:")
        lines += [f"  {r.message} [{r.code}]" for r in report.reasons(operation, name)]
    lines += [f"{r.operation}: {r.backend}: {r.message} [{r.code}]" for r in report.rejected if r.operation in missing]
    lines.append(f"see it again: gdn-capabilities --device {report.device.torch_device} --config CONFIG.json")
    text = "\n".join(lines)
    return RequirementError(text, report) if unmet else NoBackendError(text, report)


def log(report: ResolutionReport, *, follower: bool | None = None) -> None:
    """One line for the triple, one for each higher-ranked candidate that lost, one for each unmet preference.

    Args:
        follower: log at DEBUG, because another rank logs the same; None: whatever torch.distributed says.
    """
    follower = _follower_rank() if follower is None else follower
    quiet = logging.DEBUG if follower else logging.INFO
    loud = logging.DEBUG if follower else logging.WARNING
    logger.log(quiet, "%s", report.summary(), extra={"gdn": report.to_dict()})
    unmet = {(f.operation, f.preferred) for f in report.fallbacks}
    for fallback in report.fallbacks:
        if not _matters(report, fallback.operation):
            continue
        logger.log(
            loud,
            "%s: preferred %s, given %s: %s [%s]",
            fallback.operation, fallback.preferred, fallback.given, fallback.message, fallback.code,
        )  # fmt: skip
    for loss in report.lost:
        if (loss.operation, loss.backend) in unmet or not _matters(report, loss.operation):
            continue
        level = loud if loss.code in ("bind_refused", "plugin_broken") else quiet
        given = report.chosen[loss.operation]  # type: ignore[index]
        winner = "a later row of its own" if given == loss.backend else given
        logger.log(level, "%s: %s lost to %s: %s [%s]", loss.operation, loss.backend, winner, loss.message, loss.code)


def _matters(report: ResolutionReport, operation: Any) -> bool:
    """Losing an operation that the config doesn't need and that nobody serves is no news."""
    return operation in report.needed or report.chosen[operation] is not None


def _follower_rank() -> bool:
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return bool(distributed.get_rank() != 0)
