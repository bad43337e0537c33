"""Write the capability report: a rich table, markdown or JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gdn._version import __version__
from gdn.columns import backend_dict
from gdn.columns import manifest_columns
from gdn.installed import installed_version
from gdn.registry import BackendStatus
from gdn.report import ResolutionReport
from gdn.report import device_dict
from gdn.types import OPERATIONS

_HEADINGS = {
    "targets": "runs on",
    "head_dims": "head dims",
    "dtypes": "dtypes",
    "state_dtypes": "state",
    "packed_decode": "packed decode",
    "replay": "replay",
    "verify": "verify",
    "maturity": "maturity",
    "evidence": "evidence",
}


def report_dict(report: ResolutionReport, statuses: tuple[BackendStatus, ...]) -> dict[str, Any]:
    """The whole report as JSON-ready data."""
    return {
        "gdn_version": __version__,
        "device": device_dict(report.device),
        "config": report.config.model_dump(mode="json"),
        "backends": [backend_dict(status, report) for status in statuses],
        "resolution": report.to_dict(),
    }


def header(report: ResolutionReport, statuses: tuple[BackendStatus, ...]) -> list[str]:
    """What was asked, in a few lines."""
    device, config = report.device, report.config
    torch = installed_version("torch") or "not installed"
    loaded = sum(status.ok for status in statuses)
    facts = [device.name or device.cpu.model, f"runtime {device.runtime}" if device.runtime else ""]
    features = ",".join(sorted(device.cpu.features)) if device.type == "cpu" else ""
    heads = f"heads {config.num_k_heads}/{config.num_v_heads} K={config.head_k_dim} V={config.head_v_dim}"
    asked = {
        "D": config.max_draft_tokens,
        "tree": config.tree_drafts,
        "L": config.replay_window,
        "strided": config.strided_state,
        "checkpoints": config.state_checkpoints,
        "deterministic": config.deterministic,
        "cuda_graph": config.cuda_graph,
    }
    extras = " ".join(f"{name}={value}" for name, value in asked.items() if value)
    lines = [
        f"gdn {__version__}, torch {torch}, plugins: {loaded} loaded, {len(statuses) - loaded} failed",
        f"device {device}" + "".join(f", {fact}" for fact in (*facts, features) if fact),
        f"config {heads} W={config.conv_kernel_size} {config.activation_dtype}/{config.state_dtype} {extras}".rstrip(),
    ]
    return lines + [f"problem: {problem}" for problem in device.problems]


def print_table(console: Console, report: ResolutionReport, statuses: tuple[BackendStatus, ...]) -> None:
    """The report for a terminal."""
    for line in header(report, statuses):
        console.print(Text(line), soft_wrap=True)
    console.print(_backend_table(statuses))
    console.print(_operation_table(report))
    console.print(Group(*_closing(report, statuses)), soft_wrap=True)


def _backend_table(statuses: tuple[BackendStatus, ...]) -> Table:
    table = Table(title="backends", title_justify="left", box=None, header_style="bold", pad_edge=False)
    for heading in ("backend", "version", *_HEADINGS.values()):
        table.add_column(heading, overflow="fold")
    for status in statuses:
        if status.manifest is None:
            continue
        columns = manifest_columns(status.manifest)
        table.add_row(status.name, status.version or "", *(columns[name] for name in _HEADINGS))
    return table


def _operation_table(report: ResolutionReport) -> Table:
    table = Table(title="operations", title_justify="left", box=None, header_style="bold", pad_edge=False)
    for heading in ("operation", "backend", "why not the others"):
        table.add_column(heading, overflow="fold")
    for operation in OPERATIONS:
        chosen = report.chosen[operation]
        style = "green" if chosen else "red" if operation in report.needed else "yellow"
        table.add_row(operation, Text(chosen or "none", style=style), Text("\n".join(_why_not(report, operation))))
    return table


def _why_not(report: ResolutionReport, operation: str) -> list[str]:
    """One line for each backend that doesn't serve `operation`: its deciding reasons."""
    lines: dict[str, list[str]] = {}
    for reason in report.rejected:
        if reason.operation == operation:
            lines.setdefault(reason.backend, []).append(f"{reason.message} [{reason.code}]")
    return [f"{backend}: {'; '.join(reasons)}" for backend, reasons in lines.items()]


def _closing(report: ResolutionReport, statuses: tuple[BackendStatus, ...]) -> list[Text]:
    style = "bold green" if report.complete else "bold red"
    lines = [Text(report.summary(), style=style)]
    lines += [
        Text(f"preferred {f.preferred} for {f.operation}, given {f.given}: {f.message} [{f.code}]", style="yellow")
        for f in report.fallbacks
    ]
    lines += [Text(f"note: {note}") for note in report.notes]
    lines += [Text(failure_line(status), style="red") for status in statuses if not status.ok]
    return lines


def failure_line(status: BackendStatus) -> str:
    """A failed plugin: who, from where, at which stage, why."""
    source = f"{status.distribution} {status.version}" if status.distribution else "unknown distribution"
    return f"failed plugin {status.name} ({source}) at stage {status.stage}: {status.error}"


def markdown(report: ResolutionReport, statuses: tuple[BackendStatus, ...], *, manifests_only: bool = False) -> str:
    """The report as GitHub-flavoured markdown; `manifests_only` leaves out all that depends on the machine."""
    heads = ("backend", *_HEADINGS.values(), "requires")
    lines = [_markdown_row(heads), _markdown_row(["---"] * len(heads))]
    for status in statuses:
        if status.manifest is not None:
            columns = manifest_columns(status.manifest)
            lines.append(_markdown_row([status.name, *(columns[n] for n in _HEADINGS), columns["requires"]]))
    if manifests_only:
        return "\n".join(lines) + "\n"
    lines = [*header(report, statuses), "", *lines, "", _markdown_row(["operation", "backend", "why not the others"])]
    lines.append(_markdown_row(["---"] * 3))
    for operation in OPERATIONS:
        why = "<br>".join(_why_not(report, operation))
        lines.append(_markdown_row([operation, report.chosen[operation] or "none", why]))
    lines += ["", report.summary(), *(f"- note: {note}" for note in report.notes)]
    lines += [f"- {failure_line(status)}" for status in statuses if not status.ok]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
