"""Draw a result file of `benchmarks.gpu`: time over floor of every point, ours beside other libraries'.

python -m benchmarks.plot benchmarks/results/h200.json docs/images/h200.png
"""

from __future__ import annotations

import json
import sys
from typing import Any

import matplotlib.pyplot as plt

LIBRARIES = {"gdn": "#1b5e9c", "sglang": "#d98c21", "fla": "#8a6fb0", "flashinfer": "#4d9a57"}


def draw(data: dict[str, Any], path: str) -> None:
    groups = list(dict.fromkeys((row["operation"], row["point"].split()[0]) for row in data["rows"]))
    columns = 3
    lines = -(-len(groups) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(15, 3.2 * lines), squeeze=False)
    for axis, group in zip(axes.flat, groups, strict=False):
        rows = [row for row in data["rows"] if (row["operation"], row["point"].split()[0]) == group]
        _draw_group(axis, group, rows)
    for axis in axes.flat[len(groups) :]:
        axis.axis("off")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=len(LIBRARIES), frameon=False)
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if version)
    figure.suptitle(
        f"{data['device']}, {data['date']}: GPU time over the floor (1 is the limit)\n{versions}", fontsize=9
    )
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=110)


def _draw_group(axis: Any, group: tuple[str, str], rows: list[dict[str, Any]]) -> None:
    width = 0.8 / len(LIBRARIES)
    for i, (name, colour) in enumerate(LIBRARIES.items()):
        heights = [(row.get(name) or 0) / row["floor_us"] for row in rows]
        axis.bar([x + i * width for x in range(len(rows))], heights, width, color=colour, label=name)
    axis.axhline(1, color="black", linewidth=0.6)
    names = [" ".join(row["point"].split()[1:]).replace("outputs", "out") for row in rows]
    axis.set_xticks([x + 0.3 for x in range(len(rows))], names, rotation=30, ha="right", fontsize=7)
    axis.set_title(f"{group[0]}, {group[1]}", fontsize=9)
    axis.set_yscale("log")
    axis.tick_params(axis="y", labelsize=7)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        draw(json.load(file), sys.argv[2])
