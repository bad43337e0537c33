"""Print a result file of `benchmarks.gpu` as Markdown tables."""

from __future__ import annotations

import json
import sys
from typing import Any

PEERS = ("sglang", "fla", "flashinfer", "flashinfer-auto")
BESIDE = ("gdn-cutedsl", "gdn-flashinfer", "flashinfer-prepared")
"""Shown, no part of the ratio: this project's other backends, and a call with part of its work done before."""


def tables(data: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if version)
    lines = [f"{data['device']}, {data['date']}, {versions}. Microseconds; ratio: best other library over gdn.", ""]
    for operation in dict.fromkeys(row["operation"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["operation"] == operation]
        peers = [name for name in PEERS + BESIDE if any(row.get(name) for row in rows)]
        heads = (
            "heads",
            "point",
            "floor",
            "gdn",
            "of floor",
            *peers,
            "ratio",
            "host gdn",
            *(f"host {p}" for p in peers),
        )
        lines += [f"### {operation}", "", _line(heads), _line(["---"] * len(heads))]
        for row in rows:
            others = [row[name] for name in PEERS if row.get(name)]
            ratio = f"{min(others) / row['gdn']:.2f}" if others and row.get("gdn") else ""
            share = f"{100 * row['floor_us'] / row['gdn']:.0f}%" if row.get("gdn") else ""
            eager = row.get("eager", {})
            hosts = [eager.get(name, {}).get("host_us", "") for name in ("gdn", *peers)]
            times = [row.get(name) or "" for name in peers]
            lines.append(_line((row["heads"], row["point"], row["floor_us"], row["gdn"], share, *times, ratio, *hosts)))
        lines.append("")
    return "\n".join(lines)


def _line(cells: Any) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(tables(json.load(file)))
