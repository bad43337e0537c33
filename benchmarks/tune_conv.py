"""Sweep the tiles of the triton backend's convolution, gating and split on this GPU.

    python benchmarks/tune_conv.py [--json FILE]

Times are those of CUDA graphs whose calls rotate over more data than the L2 cache holds; GB/s counts each byte that an
operation must read or write once. Each tile's result must equal that of the first tile. Host is the time of one call on
the CPU, for the tiles in use. A run takes less than 100 s.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from gdn.backends.cpu import conv as cpu_conv
from gdn.backends.triton import conv
from gdn.backends.triton import gating
from gdn.backends.triton import split
from gdn.config import GdnConfig

DIM, WIDTH = 8192, 4
CONFIG = GdnConfig(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128)
ROTATED_BYTES = 2**28
UPDATE_TILES = [(1, 64, 1), (1, 128, 1), (1, 128, 2), (1, 256, 2), (1, 256, 4), (1, 512, 4), (2, 128, 2), (4, 128, 4),
                (4, 256, 4), (8, 128, 4), (8, 64, 2), (16, 128, 4)]  # fmt: skip
EXTEND_TILES = [(16, 128, 4), (32, 64, 4), (32, 128, 4), (32, 128, 8), (32, 256, 8), (64, 64, 4), (64, 128, 4),
                (64, 128, 8), (128, 64, 8)]  # fmt: skip
GATING_TILES = [(512, 2), (512, 4), (1024, 4), (2048, 4), (4096, 8)]
SPLIT_TILES = [(4, 512, 4), (8, 256, 4), (8, 512, 4), (8, 1024, 4), (8, 1024, 8), (16, 512, 8), (16, 1024, 8)]

Call = Callable[[int], Any]


def copies_of(call_bytes: int) -> int:
    """How many sets of arguments one graph rotates over."""
    return max(2, min(64, ROTATED_BYTES // call_bytes))


def microseconds(call: Call, copies: int) -> float:
    """Median time of one call, from replays of a graph of `copies` calls or more."""
    calls = max(copies, 10)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for index in range(copies):
            call(index)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index % copies)
    graph.replay()
    times = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[len(times) // 2]


def host_microseconds(call: Call, calls: int = 300) -> float:
    """Best time of issuing one call, the device never far behind."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call(0)
        best = min(best, (time.perf_counter() - begin) / calls * 1e6)
    torch.cuda.synchronize()
    return best


class Sweep:
    """Times the tiles of one situation and prints them, best first."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def run(self, name: str, tiles: list[Any], prepare: Callable[[Any], Call], call_bytes: int) -> None:
        copies, results, expected = copies_of(call_bytes), [], None
        for tile in tiles:
            call = prepare(tile)
            outputs = call(0)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            if expected is None:
                expected = outputs
            equal = all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))
            results.append((microseconds(call, copies), tile, equal))
        host = host_microseconds(prepare(None))
        results.sort(key=lambda result: result[0])
        print(f"{name}: host {host:.1f} us")
        for us, tile, equal in results:
            rate = call_bytes / us / 1e3
            print(f"  {tile!s:>16} {us:9.2f} us {rate:7.0f} GB/s{'' if equal else '  DIFFERS'}", flush=True)
            self.records.append({"name": name, "tile": tile, "us": us, "gbps": rate, "equal": equal, "host_us": host})


def sweep_update(sweep: Sweep, requests: int, drafts: int = 1) -> None:
    cells = requests * DIM
    call_bytes = cells * 2 * (2 * drafts + 2 * (WIDTH - 1)) + DIM * 2 * (WIDTH + 1)
    copies = copies_of(call_bytes)
    x = torch.randn(copies, requests, drafts, DIM, device="cuda").bfloat16()
    x = x[:, :, 0] if drafts == 1 else x.transpose(2, 3)
    pool = torch.zeros(copies * requests + 1, DIM, WIDTH - 1, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(copies * requests, device="cuda", dtype=torch.int32).view(copies, requests)
    weight, bias = parameters()

    def prepare(tile: tuple[int, int, int] | None) -> Call:
        before = conv.STEP_TILES, conv.DRAFT_TILE
        if tile is not None:
            conv.STEP_TILES, conv.DRAFT_TILE = ((None, conv.Tile(*tile)),), conv.Tile(*tile)
        update = conv.update_factory(None)
        xs, indices = x.unbind(0), slots.unbind(0)

        def call(index: int) -> torch.Tensor:
            return update(xs[index], pool, weight, bias, conv_state_indices=indices[index])

        pool.zero_()
        call(0)
        conv.STEP_TILES, conv.DRAFT_TILE = before
        pool.zero_()
        return call

    tiles = UPDATE_TILES if drafts == 1 else [tile for tile in UPDATE_TILES if tile[0] in (4, 8)]
    sweep.run(f"conv_update B={requests} D={drafts}", tiles, prepare, call_bytes)


def sweep_extend(sweep: Sweep, tokens: int) -> None:
    call_bytes = tokens * DIM * 2 * 2
    copies = copies_of(call_bytes)
    xs = torch.randn(copies, tokens, DIM, device="cuda").bfloat16().transpose(1, 2).unbind(0)
    pool = torch.zeros(4, DIM, WIDTH - 1, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, tokens // 4, tokens], device="cuda", dtype=torch.int32)
    slots = torch.tensor([2, 1], device="cuda", dtype=torch.int32)
    fresh = torch.zeros(2, device="cuda", dtype=torch.bool)
    weight, bias = parameters()

    def prepare(tile: tuple[int, int, int] | None) -> Call:
        before = conv.EXTEND_TILE
        if tile is not None:
            conv.EXTEND_TILE = conv.Tile(*tile)
        extend = conv.extend_factory(None)

        def call(index: int) -> torch.Tensor:
            return extend(
                xs[index], weight, bias, conv_states=pool, query_start_loc=starts, cache_indices=slots,
                has_initial_state=fresh,
            )  # fmt: skip

        call(0)
        conv.EXTEND_TILE = before
        return call

    sweep.run(f"conv_extend T={tokens}", EXTEND_TILES, prepare, call_bytes)


def sweep_gating(sweep: Sweep, tokens: int) -> None:
    heads = CONFIG.num_v_heads
    call_bytes = tokens * heads * (2 * 2 + 2 * 4)
    gates = torch.randn(copies_of(call_bytes), 2, tokens, heads, device="cuda").bfloat16()
    a, b = gates[:, 0].unbind(0), gates[:, 1].unbind(0)
    A_log, dt_bias = torch.randn(heads, device="cuda"), torch.randn(heads, device="cuda")

    def prepare(tile: tuple[int, int] | None) -> Call:
        before = gating.BLOCK_CELLS, gating.WARPS
        if tile is not None:
            gating.BLOCK_CELLS, gating.WARPS = tile
        run = gating.factory(None)

        def call(index: int) -> Any:
            return run(A_log, a[index], b[index], dt_bias)

        call(0)
        gating.BLOCK_CELLS, gating.WARPS = before
        return call

    sweep.run(f"gating T={tokens}", GATING_TILES, prepare, call_bytes)


def sweep_split(sweep: Sweep, tokens: int) -> None:
    call_bytes = tokens * CONFIG.conv_dim * 2 * 2
    rows = torch.randn(copies_of(call_bytes), tokens, CONFIG.conv_dim, device="cuda").bfloat16().unbind(0)

    def prepare(tile: tuple[int, int, int] | None) -> Call:
        before = split.BLOCK_TOKENS, split.BLOCK_COLUMNS, split.WARPS
        if tile is not None:
            split.BLOCK_TOKENS, split.BLOCK_COLUMNS, split.WARPS = tile
        run = split.factory(SimpleNamespace(config=CONFIG))

        def call(index: int) -> Any:
            return run(rows[index])

        call(0)
        split.BLOCK_TOKENS, split.BLOCK_COLUMNS, split.WARPS = before
        return call

    sweep.run(f"qkv_split T={tokens}", SPLIT_TILES, prepare, call_bytes)


def parameters() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(DIM, WIDTH, device="cuda").bfloat16(), torch.randn(DIM, device="cuda").bfloat16()


def check() -> None:
    """The kernels on this device against the cpu backend, once, in bf16."""
    torch.manual_seed(1)
    dim, starts = 300, torch.tensor([0, 5, 5, 6, 300, 302])
    slots, flags = torch.tensor([4, 0, 2, 1, -1]), torch.tensor([True, True, False, True, True])
    x, weight = torch.randn(310, dim).bfloat16().t(), torch.randn(dim, WIDTH).bfloat16()
    pool = torch.randn(6, dim, WIDTH - 1).bfloat16()
    cases = [(pool.clone(), *_extend_on(device, x, weight, pool, starts, slots, flags)) for device in ("cpu", "cuda")]
    torch.testing.assert_close(cases[1][1].cpu(), cases[0][1], atol=2e-2, rtol=2e-2)
    assert torch.equal(cases[1][2].cpu(), cases[0][2]), "conv_extend left other states"
    drafts = torch.randn(5, 4, dim).bfloat16().transpose(1, 2)
    links = torch.tensor([[1, 3, -1, -1]] * 5), torch.tensor([[-1, 2, -1, -1]] * 5)
    for case in (None, links):
        got = [_update_on(device, drafts, weight, pool, slots, case) for device in ("cpu", "cuda")]
        torch.testing.assert_close(got[1][0].cpu(), got[0][0], atol=2e-2, rtol=2e-2)
        for ours, theirs in zip(got[1][1:], got[0][1:], strict=True):
            assert torch.equal(ours.cpu(), theirs), "conv_update left other states, windows or parents"
    print("check against the cpu backend: passed", flush=True)


def _extend_on(device: str, x: Any, weight: Any, pool: Any, starts: Any, slots: Any, flags: Any) -> tuple[Any, Any]:
    run = cpu_conv.conv_extend if device == "cpu" else conv.extend_factory(None)
    pool = pool.to(device, copy=True)
    out = run(
        x.to(device), weight.to(device), None, conv_states=pool, query_start_loc=starts.to(device),
        cache_indices=slots.to(device), has_initial_state=flags.to(device),
    )  # fmt: skip
    return out, pool


def _update_on(device: str, x: Any, weight: Any, pool: Any, slots: Any, links: Any) -> tuple[Any, ...]:
    run = cpu_conv.conv_update if device == "cpu" else conv.update_factory(None)
    pool = pool.to(device, copy=True)
    window = torch.zeros(5, x.shape[2], x.shape[1], WIDTH - 1, device=device, dtype=x.dtype)
    parents = torch.zeros(x.shape[0], x.shape[2], device=device, dtype=torch.int64)
    tree = {}
    if links is not None:
        next_token, next_sibling = (link.to(device) for link in links)
        tree = {"retrieve_next_token": next_token, "retrieve_next_sibling": next_sibling}
        tree["retrieve_parent_token"] = parents
    out = run(
        x.to(device), pool, weight.to(device), conv_state_indices=slots.to(device),
        intermediate_conv_window=window, **tree,
    )  # fmt: skip
    return out, pool, window, parents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="write the measurements to this file")
    options = parser.parse_args()
    began = time.perf_counter()
    check()
    sweep = Sweep()
    for requests in (1, 8, 64, 512):
        sweep_update(sweep, requests)
    sweep_update(sweep, 64, drafts=4)
    for tokens in (1024, 16384):
        sweep_extend(sweep, tokens)
    sweep_gating(sweep, 16384)
    sweep_split(sweep, 16384)
    print(f"{torch.cuda.get_device_name()}, {time.perf_counter() - began:.0f} s")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "records": sweep.records}, file, indent=1)


if __name__ == "__main__":
    main()
