"""gdn-capabilities: what this machine, or any other, can run, and why not."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from gdn._version import __version__
from gdn.capabilities import manifest_schema
from gdn.config import GdnConfig
from gdn.config import presets
from gdn.errors import ConfigError
from gdn.errors import GdnError

DEFAULT_PRESET = "qwen3-next-80b-a3b"
TRIPLE, NO_TRIPLE, BAD_USAGE = 0, 1, 2
_TABLE_WIDTH = 160


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 0 with a full triple or a plain listing, 1 without, 2 for bad usage."""
    options = _parser().parse_args(arguments)
    if options.schema:
        print(json.dumps(manifest_schema(), indent=2, sort_keys=True))
        return TRIPLE
    try:
        return _answer(options)
    except GdnError as error:
        print(f"gdn-capabilities: {error}", file=sys.stderr)
        return BAD_USAGE


def entry_point() -> None:
    sys.exit(main())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gdn-capabilities",
        description="Show the Gated DeltaNet backends, what each can do on a device, and the reason for every no.",
        epilog="exit codes: 0 a full triple or a plain listing; 1 no triple, or a failed self-test; 2 bad usage",
    )
    parser.add_argument(
        "--config", metavar="PRESET_OR_JSON_FILE", help=f"what to resolve; presets: {', '.join(presets())}"
    )
    parser.add_argument("--device", help='"cuda:0", "cpu", or any machine: "sm100", "sm90", "gfx942", "ascend910b"')
    parser.add_argument("--cuda", metavar="VERSION", help="CUDA version of a device that isn't here")
    for name, meaning in (
        ("require", "use this backend or fail"),
        ("prefer", "ask this backend first"),
        ("exclude", "anything but this backend"),
    ):
        syntax = "NAME" if name == "exclude" else "[OPERATION=]NAME"
        parser.add_argument(
            f"--{name}", metavar=syntax, action="append", default=[], help=f"{meaning}; may be repeated"
        )
    parser.add_argument(
        "--assume-installed", metavar="REQ", action="append", default=[], help='such as "flashinfer-python==0.7.4"'
    )
    parser.add_argument("--format", choices=("table", "json", "markdown"), default="table")
    parser.add_argument("--schema", action="store_true", help="print the manifests' JSON schema")
    parser.add_argument("--self-test", action="store_true", help="run every usable backend against the reference")
    parser.add_argument("--version", action="version", version=f"gdn {__version__}")
    return parser


def _answer(options: argparse.Namespace) -> int:
    from gdn import api
    from gdn import render

    device: Any = options.device
    if options.cuda:
        from gdn.device import DeviceInfo

        if device is None:
            raise ConfigError("--cuda needs --device")
        device = DeviceInfo.parse(device, cuda=options.cuda)
    elif device is not None:
        device = api.as_device(device)
    selection = {
        "require": _by_operation(options.require, "--require"),
        "prefer": _by_operation(options.prefer, "--prefer"),
        "exclude": tuple(options.exclude),
    }
    config = _read_config(options.config or DEFAULT_PRESET)
    report = api.explain(config, device=device, **selection, assume_installed=tuple(options.assume_installed))
    if report.complete and not report.device.hypothetical and not options.assume_installed:
        report = _bound_report(config, report, device, selection)
    statuses = api.backends()
    results = None
    if options.self_test:
        results = _self_test(report, quiet=options.format == "json")
    if options.format == "json":
        data = render.report_dict(report, statuses)
        if results is not None:
            data["self_test"] = [result.to_dict() for result in results]
        print(json.dumps(data, indent=2))
    elif options.format == "markdown":
        print(render.markdown(report, statuses), end="")
    else:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_TABLE_WIDTH)
        render.print_table(console, report, statuses)
    if results is not None and options.format != "json":
        from gdn.render_selftest import print_results

        print_results(Console(), results)
    if results is not None and not (results and all(result.passed for result in results)):
        return NO_TRIPLE
    asked = any((options.config, options.require, options.prefer, options.exclude))
    return NO_TRIPLE if asked and not report.complete else TRIPLE


def _bound_report(config: GdnConfig, report: Any, device: Any, selection: dict[str, Any]) -> Any:
    """The report once kernels are bound, which says what is in force; `report` where binding fails."""
    from gdn import api

    try:
        return api.resolve(config, device=device, **selection).report
    except Exception as error:  # a broken framework must not keep the listing from the operator
        print(f"gdn-capabilities: not bound: {type(error).__name__}: {error}", file=sys.stderr)
        return report


def _read_config(text: str) -> GdnConfig:
    known = presets()
    if text in known:
        return known[text]
    path = Path(text)
    if text != "-" and not path.is_file():
        raise ConfigError(f"--config {text!r} is neither a file nor a preset; presets: {', '.join(known)}")
    try:
        raw = json.loads(sys.stdin.read() if text == "-" else path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {text!r} can't be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"--config {text!r}: expected a JSON object, got {type(raw).__name__}")
    try:
        return GdnConfig.from_hf(raw) if "linear_num_key_heads" in raw or "text_config" in raw else GdnConfig(**raw)
    except ValueError as error:
        raise ConfigError(f"--config {text!r}: {error}") from error


def _by_operation(texts: list[str], flag: str) -> Any:
    """None, one name for all operations, or names per operation."""
    if not texts:
        return None
    pairs = [text.split("=", 1) for text in texts if "=" in text]
    plain = [text for text in texts if "=" not in text]
    if plain and pairs:
        raise ConfigError(f"{flag}: give either NAME or OPERATION=NAME, got both")
    if pairs:
        return dict(pairs)
    if len(plain) == 1:
        return plain[0]
    if flag == "--prefer":
        return tuple(plain)
    raise ConfigError(f"{flag}: two names for the same operations: {', '.join(plain)}")


def _self_test(report: Any, *, quiet: bool) -> list[Any]:
    from gdn.render_selftest import run_with_progress

    return run_with_progress(report, quiet=quiet)


if __name__ == "__main__":
    entry_point()
