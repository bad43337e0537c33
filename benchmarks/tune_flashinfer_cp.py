"""Sweep FlashInfer's context-parallel extend against its plain one on this GPU: where would `use_cp=True` pay?

    python -m benchmarks.tune_flashinfer_cp --json benchmarks/results/h200-flashinfer-cp.json

Direct calls with valid slots, so without the slot arguments that the adapter needs for padding and that exclude context
parallelism. GPU time by graph replay and wall time of eager calls, in microseconds; a point is worth it only where both
gain. The outcome belongs into `gdn/backends/flashinfer/context_parallel.py`.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from benchmarks.gpu import PACKAGES
from benchmarks.gpu import Bench
from benchmarks.gpu import _version
from benchmarks.peers import flashinfer_extend
from benchmarks.timing import eager_us
from benchmarks.timing import graph_us
from benchmarks.timing import slot_sets

HEADS = ((2, 8), (4, 8), (8, 16), (8, 32), (16, 32), (16, 64))
SHAPES = tuple((n, length) for n in (1, 2, 4, 8) for length in (512, 1024, 2048, 3072, 4096, 8192, 16384, 65536))
MOST_TOKENS, MOST_STATES = 131072, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = [
        point(Bench(HK, HV), sequences, length)
        for HK, HV in HEADS
        for sequences, length in SHAPES
        if sequences * length <= MOST_TOKENS and sequences * HV <= MOST_STATES
    ]
    if options.json:
        facts = {"device": torch.cuda.get_device_name(0), "date": time.strftime("%Y-%m-%d")}
        versions = {name: _version(name) for name in PACKAGES}
        with open(options.json, "w") as file:
            json.dump({**facts, "versions": versions, "rows": rows}, file, indent=1)


def point(bench: Bench, sequences: int, length: int) -> dict[str, object]:
    """One shape with and without context parallelism."""
    tokens = sequences * length
    q, k, v = (x.contiguous() for x in bench.heads(bench.mixed(tokens)[0]))
    g = -torch.rand(1, tokens, bench.HV, device="cuda") * 0.1
    beta = torch.rand(1, tokens, bench.HV, device="cuda")
    pool = torch.randn(4 * sequences, bench.HV, 128, 128, device="cuda") * 0.1
    offsets = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * length
    row: dict[str, object] = {"heads": f"{bench.HK}/{bench.HV}", "states": sequences * bench.HV, "length": length}
    for name, use_cp in (("plain", False), ("cp", True)):
        calls = [
            flashinfer_extend(q, k, v, g, beta, pool, lambda s=s: s, offsets, length, use_cp=use_cp)
            for s in slot_sets(sequences, pool.shape[0], 4)
        ]
        if None in calls:
            raise SystemExit("flashinfer can't be imported here")
        row[name] = {"gpu_us": round(graph_us(calls, 5), 1), "wall_us": round(eager_us(calls, 5)[1], 1)}
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
