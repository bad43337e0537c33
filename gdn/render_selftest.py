"""Run the self-test with a progress bar and print its results."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn
from rich.progress import MofNCompleteColumn
from rich.progress import Progress
from rich.progress import TextColumn
from rich.table import Table
from rich.text import Text

from gdn.errors import ConfigError
from gdn.installed import installed_version
from gdn.report import ResolutionReport

if TYPE_CHECKING:
    from gdn.testing.selftest import SelfTestResult


def run_with_progress(report: ResolutionReport, *, quiet: bool) -> list[SelfTestResult]:
    """Compare every usable backend of the report's device with the reference; progress goes to stderr."""
    if report.device.hypothetical:
        raise ConfigError(f"--self-test runs kernels, and {report.device} is not a device of this host")
    if installed_version("torch") is None:
        raise ConfigError("--self-test needs torch: pip install torch")
    from gdn.testing.selftest import run_selftest

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(file=sys.stderr), disable=quiet, transient=True) as progress:
        task = progress.add_task("self-test", total=None)

        def advance(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        return run_selftest(report.device, report.config, progress=advance)


def print_results(console: Console, results: list[SelfTestResult]) -> None:
    """The worst error of each backend and operation beside its tolerance."""
    table = Table(title="self-test", title_justify="left", box=None, header_style="bold", pad_edge=False)
    for heading in ("backend", "operation", "dtype", "worst error", "tolerance", "result"):
        table.add_column(heading)
    for result in results:
        style, word = ("green", "passed") if result.passed else ("red", f"FAILED {result.detail}")
        table.add_row(
            result.backend,
            result.operation,
            result.dtype,
            f"{result.worst_error:.1e}",
            f"{result.tolerance:.1e}",
            Text(word, style=style),
        )
    console.print(table)
    passed = sum(result.passed for result in results)
    console.print(f"{passed} of {len(results)} comparisons passed")
