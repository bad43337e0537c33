"""Sweep the tiles of extend on this GPU."""

from __future__ import annotations

import torch

from benchmarks.gpu import Bench
from benchmarks.timing import graph_us
from benchmarks.timing import slot_sets
from gdn.backends.triton import extend
from gdn.backends.triton import extend_tuning
from gdn.backends.triton.extend_tuning import ExtendTile

SHAPES = ((1, 1024), (1, 4096), (1, 16384), (8, 512), (8, 2048), (8, 8192), (64, 64), (256, 64))
TILES = tuple(
    ExtendTile(*tile) for tile in ((32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 8, 2), (128, 4, 2), (128, 8, 2))
)


def main() -> None:
    bench = Bench(16, 32)
    for sequences, length in SHAPES:
        tokens = sequences * length
        q, k, v = (x.contiguous() for x in bench.heads(bench.mixed(tokens)[0]))
        g, beta = -torch.rand(1, tokens, 32, device="cuda") * 0.1, torch.rand(1, tokens, 32, device="cuda")
        pool = torch.randn(4 * sequences, 32, 128, 128, device="cuda") * 0.1
        offsets = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * length
        found = []
        for tile in TILES:
            extend_tuning._TABLE = ((None, tile),)
            ours = extend.factory(bench.context)
            calls = [
                lambda s=s, f=ours: f(q, k, v, g, beta, ssm_states=pool, cache_indices=s, query_start_loc=offsets)
                for s in slot_sets(sequences, pool.shape[0], 2)
            ]
            try:
                found.append((graph_us(calls, 5), tuple(tile)))
            except Exception as error:  # a tile that doesn't fit the device
                print(f"    {tuple(tile)}: {type(error).__name__}: {error}"[:120])
        prepare = round(_prepare_us(bench, q, k, v, g, beta, pool, offsets), 1)
        found.sort()
        best = "  ".join(f"{us:.1f} {tile}" for us, tile in found[:6])
        print(f"extend {sequences}x{length}: prepare {prepare};  {best}", flush=True)


def _prepare_us(bench, q, k, v, g, beta, pool, offsets):
    """The prepare kernel alone."""
    plan = extend._plan(
        False, bench.context.device, q, k, v, g, beta, pool, offsets[:-1], offsets, None, None, None, False
    )
    solve, attend, factors = (torch.empty_like(x) for x in (plan.matrix, plan.matrix, plan.factors))
    call = lambda: plan.prepare(  # noqa: E731
        plan.chunk_programs, 1, 1, q, k, g, beta, offsets, solve, attend, factors, plan.scale, *plan.prepare_numbers
    )
    return graph_us([call] * 3, 5)


if __name__ == "__main__":
    main()
