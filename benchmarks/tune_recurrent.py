"""Sweep the tiles of the Triton recurrent kernels on this GPU; prints the best few of each point."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from types import SimpleNamespace

import torch

from benchmarks.timing import POOL_BYTES
from benchmarks.timing import eager_us
from benchmarks.timing import graph_us
from benchmarks.timing import slot_sets
from gdn.backends.triton import decode
from gdn.backends.triton import replay
from gdn.backends.triton import tuning
from gdn.backends.triton import verify
from gdn.backends.triton.tuning import Tile
from gdn.device import detect_device

CONTEXT = SimpleNamespace(config=SimpleNamespace(deterministic=False), device=detect_device("cuda:0"))
HK, HV, K, V = 16, 32, 128, 128
SMALL = tuple(Tile(*t) for t in ((4, 1), (8, 1), (16, 1), (32, 1), (4, 1, 2), (8, 1, 2), (16, 1, 2), (8, 2), (32, 2)))
RING = tuple(
    Tile(*t) for t in ((16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 4), (16, 2, 2), (32, 4, 2), (32, 4, 4))
)
DRAFTS = tuple(
    Tile(*t) for t in ((16, 1), (16, 2), (16, 4), (32, 1), (32, 2), (32, 4), (64, 4), (16, 2, 2), (32, 4, 2))
)
LARGE = tuple(
    Tile(*t)
    for t in (
        (8, 1), (16, 1), (32, 1), (8, 1, 4), (8, 1, 16), (16, 1, 2), (16, 1, 4), (16, 1, 8), (32, 1, 2), (32, 1, 4),
        (32, 2, 2), (32, 2, 4), (64, 4, 2),
    )
)  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def inputs(rows: int):
    dim = 2 * HK * K + HV * V
    mixed = torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16)
    a, b = (torch.randn(rows, HV, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return mixed, a, b, torch.randn(HV, device="cuda"), torch.randn(HV, device="cuda")


def pool_for(dtype: torch.dtype, batch: int) -> torch.Tensor:
    slots = max(POOL_BYTES // (HV * K * V * dtype.itemsize), 2 * batch)
    return torch.randn(slots, HV, V, K, device="cuda", dtype=dtype)


def decode_calls(pool: torch.Tensor, batch: int, function=None):
    function = function or decode.packed_factory(CONTEXT)
    mixed, a, b, A_log, dt_bias = inputs(batch)
    return [
        lambda s=slots: function(mixed, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=pool, cache_indices=s)
        for slots in slot_sets(batch, pool.shape[0])
    ]


def verify_calls(pool: torch.Tensor, batch: int, drafts: int, stores: bool = True):
    function = verify.factory(CONTEXT)
    mixed, a, b, A_log, dt_bias = inputs(batch * drafts)
    q, k, v = mixed.split((HK * K, HK * K, HV * V), dim=1)
    q, k, v = (x.unflatten(1, (-1, K))[None] for x in (q, k, v))
    offsets = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * drafts
    most = max(1, min(4, (24 << 30) // (batch * drafts * HV * V * K * pool.element_size())))
    buffers = [pool.new_empty(batch, drafts, HV, V, K) if stores else None for _ in range(most)]
    rows = torch.arange(batch, device="cuda", dtype=torch.int32)
    return [
        lambda s=slots, buffer=buffers[i % most]: function(
            A_log, dt_bias, q, k, v, a, b, ssm_states=pool, cache_indices=s, query_start_loc=offsets,
            intermediate_states_buffer=buffer, intermediate_state_indices=rows, cache_steps=drafts,
        )
        for i, slots in enumerate(slot_sets(batch, pool.shape[0], 8))
    ]  # fmt: skip


def replay_calls(pool: torch.Tensor, batch: int, position: int, window: int = 16):
    function = replay.factory(CONTEXT)
    mixed, a, b, A_log, dt_bias = inputs(batch)
    slots = pool.shape[0]
    d = torch.randn(slots, HV, window, V, device="cuda", dtype=pool.dtype)
    k = torch.nn.functional.normalize(torch.randn(slots, HK, window, K, device="cuda"), dim=-1).to(pool.dtype)
    g = -torch.rand(slots, HV, window, device="cuda")
    cursor = torch.full((batch,), position, device="cuda", dtype=torch.int32)
    return [
        lambda s=chosen: function(
            mixed, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=pool, cache_indices=s, replayssm_d=d, replayssm_k=k,
            replayssm_g=g, replayssm_write_pos=cursor,
        )
        for chosen in slot_sets(batch, slots, 12)
    ]  # fmt: skip


def sweep(table, tiles, calls_of, label, results, budget):
    """Time every tile; the table is restored."""
    kept, measured = table[calls_of.bytes], []
    for tile in tiles:
        if time.monotonic() > budget:
            break
        table[calls_of.bytes] = ((None, tile),)
        measured.append((graph_us(calls_of(), 6), tile))
    table[calls_of.bytes] = kept
    measured.sort()
    results[label] = [(round(us, 2), tuple(tile)) for us, tile in measured]
    best = "  ".join(f"{us:8.2f} {tile.rows}/{tile.warps}x{tile.tiles}" for us, tile in measured[:4])
    print(f"{label:28} {best}", flush=True)


class Calls:
    def __init__(self, build, size):
        self.build, self.bytes = build, size

    def __call__(self):
        return self.build()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--only", default="decode,verify,outputs,replay,host")
    parser.add_argument("--seconds", type=float, default=150)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    results: dict[str, object] = {}
    for name, dtype in DTYPES.items():
        pool = pool_for(dtype, 512)
        size = dtype.itemsize
        if "decode" in options.only:
            for batch in (1, 8, 32, 128, 512):
                sweep(
                    tuning._DECODE, SMALL if batch <= 8 else LARGE,
                    Calls(lambda b=batch, p=pool: decode_calls(p, b), size),
                    f"decode {name} B={batch}", results, deadline,
                )  # fmt: skip
        if "verify" in options.only:
            for batch in (1, 8, 32, 128):
                sweep(
                    tuning._STATES, DRAFTS, Calls(lambda b=batch, p=pool: verify_calls(p, b, 16), size),
                    f"verify {name} T=16 B={batch}", results, deadline,
                )  # fmt: skip
        if "outputs" in options.only:
            for batch, drafts in ((1, 4), (64, 4), (64, 8), (64, 16)):
                sweep(
                    tuning._OUTPUTS, DRAFTS,
                    Calls(lambda b=batch, d=drafts, p=pool: verify_calls(p, b, d, stores=False), size),
                    f"outputs {name} T={drafts} B={batch}", results, deadline,
                )  # fmt: skip
        if "replay" in options.only:
            for batch, position in itertools.product((128,), (7, 15)):
                sweep(
                    tuning._REPLAY, RING, Calls(lambda b=batch, m=position, p=pool: replay_calls(p, b, m), size),
                    f"replay {name} B={batch} m={position}", results, deadline,
                )  # fmt: skip
        if "host" in options.only:
            for batch in (1, 32):
                host, wall = eager_us(decode_calls(pool, batch))
                print(f"eager packed decode {name} B={batch}: host {host:.1f} us, wall {wall:.1f} us", flush=True)
                results[f"eager {name} B={batch}"] = (host, wall)
        pool = None
        torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
