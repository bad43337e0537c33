"""The CuTe DSL kernels beside the Triton ones on this GPU, and a sweep of their block sizes.

    python -m benchmarks.cutedsl --json benchmarks/results/h200-cutedsl.json
    python -m benchmarks.cutedsl --sweep

Times as in `benchmarks.gpu`. The floor is the bytes that must move over 4.3 TB/s. Every block size is compiled first
(2 to 10 s each); `GDN_CACHE_DIR` keeps the object files between runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.timing import eager_us
from benchmarks.timing import graph_us
from benchmarks.timing import slot_sets
from benchmarks.tune_recurrent import CONTEXT
from benchmarks.tune_recurrent import DTYPES
from benchmarks.tune_recurrent import HK
from benchmarks.tune_recurrent import HV
from benchmarks.tune_recurrent import K
from benchmarks.tune_recurrent import V
from benchmarks.tune_recurrent import decode_calls
from benchmarks.tune_recurrent import inputs
from benchmarks.tune_recurrent import pool_for
from gdn.backends.cutedsl import decode
from gdn.backends.cutedsl import tuning
from gdn.backends.cutedsl import verify
from gdn.backends.cutedsl.tuning import Block
from gdn.backends.triton import decode as triton_decode
from gdn.backends.triton import verify as triton_verify

BANDWIDTH = 4.3e12
BLOCKS = {
    "decode": tuple(itertools.starmap(Block, itertools.product((1, 2, 4, 8), (2, 4, 8, 16)))),
    "verify": tuple(itertools.starmap(Block, itertools.product((1, 2, 4, 8), (1, 2)))),
}
TABLES = {"decode": tuning.DECODE, "verify": tuning.VERIFY}
OURS = {"decode": decode, "verify": verify}
TRITON = {"decode": triton_decode, "verify": triton_verify}
Build = Callable[[Any], list[Callable[[], Any]]]
"""Calls over different slots, from the module whose factories make them."""


def verify_calls(module: Any, pool: torch.Tensor, batch: int, drafts: int, stores: bool, tree: bool):
    """Verify of `drafts` tokens a request: a chain, or a tree in which every draft hangs on the one before the last."""
    function = module.factory(CONTEXT)
    mixed, a, b, A_log, dt_bias = inputs(batch * drafts)
    q, k, v = (x.unflatten(1, (-1, K))[None] for x in mixed.split((HK * K, HK * K, HV * V), dim=1))
    offsets = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * drafts
    rows = torch.arange(batch, device="cuda", dtype=torch.int32)
    parents = torch.arange(drafts, device="cuda", dtype=torch.int32).sub(2).clamp(0).repeat(batch, 1) if tree else None
    most = max(1, min(4, (24 << 30) // (batch * drafts * HV * V * K * pool.element_size())))
    buffers = [pool.new_empty(batch, drafts, HV, V, K) if stores else None for _ in range(most)]
    return [
        lambda s=slots, buffer=buffer: function(
            A_log, dt_bias, q, k, v, a, b, ssm_states=pool, cache_indices=s, query_start_loc=offsets,
            intermediate_states_buffer=buffer, intermediate_state_indices=rows if stores else None,
            cache_steps=drafts, retrieve_parent_token=parents,
        )
        for slots, buffer in zip(slot_sets(batch, pool.shape[0], 8), itertools.cycle(buffers), strict=False)
    ]  # fmt: skip


def points(name: str, pool: torch.Tensor) -> Iterator[tuple[str, str, float, Build]]:
    """Table, label, states that must move per head, and the calls."""
    for batch in (1, 8, 32, 128, 512):
        build = lambda module, b=batch: decode_calls(pool, b, module.packed_factory(CONTEXT))  # noqa: E731
        yield "decode", f"packed decode {name} B={batch}", 2.0 * batch, build
    chosen = [(4, batch, True, False) for batch in (8, 32, 128, 512)]
    chosen += [(drafts, 64, False, tree) for drafts in (4, 8, 16) for tree in (False, True)]
    chosen += [(8, 32, True, True), (16, 32, True, False)]
    for drafts, batch, stores, tree in chosen:
        build = lambda m, b=batch, d=drafts, s=stores, t=tree: verify_calls(m, pool, b, d, s, t)  # noqa: E731
        what = f"verify {'tree' if tree else 'chain'}{' with states' if stores else ''}"
        yield "verify", f"{what} {name} T={drafts} B={batch}", float(batch * (1 + drafts * stores)), build


def compared(table: str, label: str, floor: float, build: Build) -> dict[str, Any]:
    row: dict[str, Any] = {"point": label, "floor_us": round(floor, 2)}
    for name, module in (("cutedsl", OURS[table]), ("triton", TRITON[table])):
        calls = build(module)
        row[name] = round(graph_us(calls), 2)
        if floor < 20:
            row[f"{name}_host_us"] = round(eager_us(calls, rounds=10)[0], 1)
    print(
        f"{label:44} floor {row['floor_us']:8.2f}  cutedsl {row['cutedsl']:8.2f}  triton {row['triton']:8.2f}  host "
        f"{row.get('cutedsl_host_us', '-')} / {row.get('triton_host_us', '-')}", flush=True,
    )  # fmt: skip
    return row


def swept(table: str, label: str, build: Build, size: int, deadline: float) -> dict[str, Any]:
    """Every block size; the table is restored."""
    kept, measured = TABLES[table][size], []
    try:
        for block in BLOCKS[table]:
            if time.monotonic() > deadline:
                break
            TABLES[table][size] = ((None, block),)
            measured.append((round(graph_us(build(OURS[table]), 6), 2), tuple(block)))
    finally:
        TABLES[table][size] = kept
    measured.sort()
    print(f"{label:44} " + "  ".join(f"{us:.2f} {block[0]}x{block[1]}" for us, block in measured[:5]), flush=True)
    return {"point": label, "blocks": measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--sweep", action="store_true", help="time every block size instead of comparing")
    parser.add_argument("--only", default="", help="points whose label contains this")
    parser.add_argument("--seconds", type=float, default=500)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    rows = []
    for name, dtype in DTYPES.items():
        pool = pool_for(dtype, 512)
        for table, label, states, build in points(name, pool):
            if options.only not in label or time.monotonic() > deadline:
                continue
            floor = states * HV * K * V * dtype.itemsize / BANDWIDTH * 1e6
            if options.sweep:
                rows.append(swept(table, label, build, dtype.itemsize, deadline))
            else:
                rows.append(compared(table, label, floor, build))
            torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(0), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
