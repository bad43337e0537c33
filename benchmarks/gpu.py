"""Our Triton kernels beside other libraries' on this GPU: one table from one run.

GPU time is the replay of a CUDA graph over rotating slots of a pool far larger than L2, median; host is the time until
an eager call returns. The floor is the bytes that must move over 4.3 TB/s, or the flops over 790 TFLOP/s.

    python -m benchmarks.gpu --json benchmarks/results/h200.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from collections.abc import Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any
from typing import NamedTuple

import torch

from benchmarks import peers
from benchmarks.timing import POOL_BYTES
from benchmarks.timing import eager_us
from benchmarks.timing import graph_us
from benchmarks.timing import slot_sets
from gdn.backends.triton import conv
from gdn.backends.triton import decode
from gdn.backends.triton import extend
from gdn.backends.triton import replay
from gdn.backends.triton import verify
from gdn.config import GdnConfig
from gdn.device import detect_device
from gdn.testing.operations import bound_operation

BANDWIDTH, FLOPS = 4.3e12, 790e12
K = V = 128
WINDOW = 16
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Calls = list[Callable[[], Any]]


class Bench:
    """Geometry, inputs and pools of one run."""

    def __init__(self, HK: int, HV: int, without: tuple[str, ...] = ()) -> None:
        self.HK, self.HV, self.without = HK, HV, without
        self.dim = 2 * HK * K + HV * V
        self.context = SimpleNamespace(config=SimpleNamespace(deterministic=False), device=detect_device("cuda:0"))
        self.A_log, self.dt_bias = torch.randn(HV, device="cuda"), torch.randn(HV, device="cuda")

    def mixed(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        return make(rows, self.dim), make(rows, self.HV), make(rows, self.HV)

    def heads(self, mixed: torch.Tensor) -> list[torch.Tensor]:
        parts = mixed.split((self.HK * K, self.HK * K, self.HV * V), dim=1)
        return [part.unflatten(1, (-1, K))[None] for part in parts]

    def pool(self, dtype: torch.dtype, batch: int) -> torch.Tensor:
        slots = max(POOL_BYTES // (self.HV * K * V * dtype.itemsize), batch)
        return torch.randn(slots, self.HV, V, K, device="cuda", dtype=dtype)

    def bound(self, backend: str, operation: str, dtype: torch.dtype) -> Callable[..., Any] | None:
        """Another backend's function of this project; None where it doesn't serve this."""
        name = str(dtype).removeprefix("torch.")
        heads = {"num_k_heads": self.HK, "num_v_heads": self.HV, "head_k_dim": K, "head_v_dim": V}
        drafts = {"max_draft_tokens": 16} if "verify" in operation else {}
        tree = {"tree_drafts": True} if operation == "tree_verify" else {}
        config = GdnConfig(**heads, **drafts, **tree, state_dtype=name)
        return bound_operation(backend, operation, config, self.context.device)

    def state_bytes(self, dtype: torch.dtype) -> int:
        return self.HV * K * V * dtype.itemsize


def decode_points(bench: Bench, batches: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    for name, dtype in DTYPES.items():
        pool = bench.pool(dtype, max(batches))
        for batch in batches:
            mixed, a, b = bench.mixed(batch)
            q, k, v = bench.heads(mixed)
            sets = slot_sets(batch, pool.shape[0] - 1)  # FlashInfer's decode of bf16 pools takes the last as scratch
            ours, adapter = decode.packed_factory(bench.context), bench.bound("flashinfer", "decode", dtype)
            cutedsl = bench.bound("cutedsl", "packed_decode", dtype)
            gates = {"A_log": bench.A_log, "dt_bias": bench.dt_bias}
            contiguous = [x.contiguous() for x in (q, k, v)]
            calls = {
                "gdn": [lambda s=s: ours(mixed, a, b, **gates, ssm_states=pool, cache_indices=s) for s in sets],
                "gdn-cutedsl": [
                    cutedsl and (lambda s=s: cutedsl(mixed, a, b, **gates, ssm_states=pool, cache_indices=s))
                    for s in sets
                ],
                "sglang": [
                    peers.sglang_packed_decode(
                        mixed, a, b, bench.A_log, bench.dt_bias, pool, lambda s=s: s, K**-0.5
                    )
                    for s in sets
                ],
                "flashinfer": [
                    peers.flashinfer_decode(
                        *contiguous, a, b, bench.A_log, bench.dt_bias, pool, lambda s=s: s, K**-0.5
                    )
                    for s in sets
                ],
                "gdn-flashinfer": [
                    adapter and (lambda s=s: adapter(*contiguous, a, b, **gates, ssm_states=pool, cache_indices=s))
                    for s in sets
                ],
            }  # fmt: skip
            floor = 2 * batch * bench.state_bytes(dtype) / BANDWIDTH
            yield measured(bench, "packed_decode", f"{name} B={batch}", floor, calls, eager=batch <= 32)


class Drafts(NamedTuple):
    """Drafts of each request, whether their states are stored, and whether they form a tree."""

    batch: int
    drafts: int = 4
    stored: bool = True
    tree: bool = False

    def __str__(self) -> str:
        return f"T={self.drafts} B={self.batch}{' tree' * self.tree}{'' if self.stored else ' outputs'}"


def verify_points(bench: Bench, points: tuple[Drafts, ...]) -> Iterator[dict[str, Any]]:
    for name, dtype in DTYPES.items():
        pool = bench.pool(dtype, max(point.batch for point in points))
        for point in points:
            states = 1 + point.drafts * point.stored
            floor = states * point.batch * bench.state_bytes(dtype) / BANDWIDTH
            calls = verify_calls(bench, pool, point)
            operation = "tree_verify" if point.tree else "verify"
            yield measured(bench, operation, f"{name} {point}", floor, calls, eager=point.batch <= 8)


def verify_calls(bench: Bench, pool: torch.Tensor, point: Drafts) -> dict[str, Calls]:
    batch, drafts = point.batch, point.drafts
    mixed, a, b = bench.mixed(batch * drafts)
    q, k, v = (x.contiguous() for x in bench.heads(mixed))
    most = max(1, min(4, (24 << 30) // (batch * drafts * bench.state_bytes(pool.dtype))))
    buffers = [pool.new_empty(batch, drafts, *pool.shape[1:]) if point.stored else None for _ in range(most)]
    offsets = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * drafts
    rows = torch.arange(batch, device="cuda", dtype=torch.int32)
    binary = ((torch.arange(drafts, device="cuda") - 1) // 2).clamp_min(0).repeat(batch, 1)
    parents = binary if point.tree else None
    ours, operation = verify.factory(bench.context), "tree_verify" if point.tree else "verify"
    adapter, cutedsl = bench.bound("flashinfer", operation, pool.dtype), bench.bound("cutedsl", operation, pool.dtype)
    pairs = [(s, buffers[i % most]) for i, s in enumerate(slot_sets(batch, pool.shape[0], 8))]
    shared = {"query_start_loc": offsets, "intermediate_state_indices": rows, "cache_steps": drafts}

    def through(function: Callable[..., Any] | None) -> Calls:
        return [
            function
            and (
                lambda s=s, to=to: function(
                    bench.A_log, bench.dt_bias, q, k, v, a, b, ssm_states=pool, cache_indices=s,
                    intermediate_states_buffer=to, retrieve_parent_token=parents, **shared,
                )
            )
            for s, to in pairs
        ]  # fmt: skip

    calls = {"gdn": through(ours), "gdn-cutedsl": through(cutedsl)}
    if point.tree:
        return calls
    inputs = (bench.A_log, bench.dt_bias, q, k, v, a, b, pool)
    if point.stored:
        calls["sglang"] = [
            peers.sglang_verify(*inputs, lambda s=s: s, offsets, to, rows, drafts) for s, to in pairs
        ]  # fmt: skip
    calls["gdn-flashinfer"] = through(adapter)
    calls["flashinfer"] = [peers.flashinfer_verify(*inputs, lambda s=s: s, to, drafts) for s, to in pairs]
    return calls


def replay_points(bench: Bench, batches: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    for name, dtype in DTYPES.items():
        pool = bench.pool(dtype, max(batches))
        slots = pool.shape[0]
        d = torch.randn(slots, bench.HV, WINDOW, V, device="cuda").to(dtype)
        k = torch.nn.functional.normalize(torch.randn(slots, bench.HK, WINDOW, K, device="cuda"), dim=-1).to(dtype)
        g = -torch.rand(slots, bench.HV, WINDOW, device="cuda")
        ours = replay.factory(bench.context)
        for batch in batches:
            mixed, a, b = bench.mixed(batch)
            sets = slot_sets(batch, slots, 12)
            for position in (0, 7, 15):
                cursor = torch.full((batch,), position, device="cuda", dtype=torch.int32)
                ring = {"replayssm_d": d, "replayssm_k": k, "replayssm_g": g, "replayssm_write_pos": cursor}
                calls = {
                    "gdn": [
                        lambda s=s, ring=ring: ours(
                            mixed, a, b, A_log=bench.A_log, dt_bias=bench.dt_bias, ssm_states=pool, cache_indices=s,
                            **ring,
                        )
                        for s in sets
                    ],
                    "sglang": [
                        peers.sglang_replay_decode(
                            mixed, a, b, bench.A_log, bench.dt_bias, pool, lambda s=s: s, (d, k, g), cursor, K**-0.5
                        )
                        for s in sets
                    ],
                }  # fmt: skip
                floor = (1 + (position == 15)) * batch * bench.state_bytes(dtype) / BANDWIDTH
                yield measured(bench, "replay_decode", f"{name} L=16 m={position} B={batch}", floor, calls)


def extend_points(bench: Bench, shapes: tuple[tuple[int, int], ...]) -> Iterator[dict[str, Any]]:
    ours, adapter = extend.factory(bench.context), bench.bound("flashinfer", "extend", torch.float32)
    cutedsl = bench.bound("cutedsl", "extend", torch.float32)
    for sequences, length in shapes:
        tokens = sequences * length
        mixed, _, _ = bench.mixed(tokens)
        q, k, v = (x.contiguous() for x in bench.heads(mixed))
        g = -torch.rand(1, tokens, bench.HV, device="cuda") * 0.1
        beta = torch.rand(1, tokens, bench.HV, device="cuda")
        pool = torch.randn(4 * sequences, bench.HV, V, K, device="cuda") * 0.1
        offsets = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * length
        sets = slot_sets(sequences, pool.shape[0], 4)
        calls = {
            "gdn": [
                lambda s=s: ours(q, k, v, g, beta, ssm_states=pool, cache_indices=s, query_start_loc=offsets)
                for s in sets
            ],
            "sglang": [peers.sglang_extend(q, k, v, g, beta, pool, lambda s=s: s, offsets) for s in sets],
            "fla": [peers.fla_extend(q, k, v, g, beta, pool, lambda s=s: s, offsets) for s in sets[:1]],
            "flashinfer": [
                peers.flashinfer_extend(q, k, v, g, beta, pool, lambda s=s: s, offsets, length, use_cp=False)
                for s in sets
            ],
            "flashinfer-auto": [
                peers.flashinfer_extend(q, k, v, g, beta, pool, lambda s=s: s, offsets, length) for s in sets
            ],
            "flashinfer-prepared": [
                peers.flashinfer_extend(
                    q, k, v, g, beta, pool, lambda s=s: s, offsets, length, use_cp=False, prepared=True
                )
                for s in sets
            ],
            **{
                f"gdn-{name}": [
                    function
                    and (
                        lambda s=s, function=function: function(
                            q, k, v, g, beta, ssm_states=pool, cache_indices=s, query_start_loc=offsets
                        )
                    )
                    for s in sets
                ]
                for name, function in (("flashinfer", adapter), ("cutedsl", cutedsl))
            },
        }  # fmt: skip
        heads = 2 * bench.HK * K + 2 * bench.HV * V
        bytes_moved = tokens * (heads * 2 + 8 * bench.HV) + 2 * sequences * bench.state_bytes(torch.float32)
        flops = tokens * bench.HV * (6 * K * V + 64 * 4 * K)
        floor = max(bytes_moved / BANDWIDTH, flops / FLOPS)
        yield measured(bench, "extend", f"fp32 {sequences}x{length}", floor, calls, eager=True)


def conv_points(bench: Bench, batches: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    update = conv.update_factory(bench.context)
    for batch in batches:
        slots = max((1 << 30) // (bench.dim * 3 * 2), batch)
        pool = torch.randn(slots, bench.dim, 3, device="cuda", dtype=torch.bfloat16)
        x, _, _ = bench.mixed(batch)
        weight = torch.randn(bench.dim, 4, device="cuda", dtype=torch.bfloat16)
        sets = slot_sets(batch, slots)
        calls = {
            "gdn": [lambda s=s: update(x, pool, weight, None, conv_state_indices=s) for s in sets],
            "sglang": [peers.sglang_conv_update(x.clone(), pool, weight, None, lambda s=s: s) for s in sets],
        }
        floor = batch * bench.dim * 2 * 8 / BANDWIDTH
        yield measured(bench, "conv_update", f"bf16 B={batch}", floor, calls, eager=batch <= 8)


def measured(
    bench: Bench, operation: str, point: str, floor: float, calls: dict[str, Calls], *, eager: bool = False
) -> dict[str, Any]:  # fmt: skip
    """Time every library; what fails is reported by its error."""
    row: dict[str, Any] = {"operation": operation, "heads": f"{bench.HK}/{bench.HV}", "point": point}
    row["floor_us"] = round(floor * 1e6, 2)
    for name, several in calls.items():
        if name in bench.without:
            continue
        if any(call is None for call in several):
            row[name] = None
            continue
        try:
            row[name] = round(graph_us(several), 2)
        except Exception as error:  # a peer that can't be captured or refuses the point
            row[name] = None
            row.setdefault("errors", {})[name] = f"{type(error).__name__}: {error}"[:160]
            torch.cuda.synchronize()
        if eager:
            try:
                host, wall = eager_us(several, rounds=10)
                row.setdefault("eager", {})[name] = {"host_us": round(host, 1), "wall_us": round(wall, 1)}
            except Exception as error:  # see above
                row.setdefault("errors", {})[f"{name} eager"] = f"{type(error).__name__}: {error}"[:160]
    show(row)
    return row


BESIDE = ("gdn-cutedsl", "gdn-flashinfer", "flashinfer-prepared")
"""Shown, no part of the ratio: this project's other backends, and a call with part of its work done before."""


def show(row: dict[str, Any]) -> None:
    others = {name: row[name] for name in ("sglang", "fla", "flashinfer", "flashinfer-auto") if row.get(name)}
    best = min(others.values(), default=None)
    ratio = f"{best / row['gdn']:.2f}x" if best and row["gdn"] else "-"
    text = "  ".join(f"{name} {us:.1f}" for name, us in others.items())
    eager = "  ".join(
        f"{name} {value['host_us']:.0f}/{value['wall_us']:.0f}" for name, value in row.get("eager", {}).items()
    )
    beside = "  ".join(f"{name} {row[name]:.1f}" for name in BESIDE if row.get(name))
    text += f"  ({beside})" if beside else ""
    share = f"{100 * row['floor_us'] / row['gdn']:.0f}%" if row["gdn"] else "-"
    print(f"{row['operation']:14}{row['heads']:>6} {row['point']:22} gdn {row['gdn']} us ({share} of floor) | {text} | "
          f"{ratio} | eager {eager}", flush=True)  # fmt: skip
    for name, error in row.get("errors", {}).items():
        print(f"    {name}: {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--only", default="extend,decode,verify,replay,conv")
    parser.add_argument("--heads", default="16/32")
    parser.add_argument("--without", default="", help="libraries that are left out")
    parser.add_argument("--quick", action="store_true", help="fewer points")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    batches = (1, 8, 32, 128, 512)
    verified = (
        *(Drafts(batch) for batch in batches),
        *(Drafts(64, drafts, stored=False, tree=tree) for drafts in (4, 8, 16) for tree in (False, True)),
        *(Drafts(64, drafts, tree=tree) for drafts in (8, 16) for tree in (False, True)),
    )
    shapes = ((1, 1024), (1, 4096), (1, 16384), (8, 512), (8, 2048), (8, 8192), (64, 64))
    if options.quick:
        batches, shapes = (8, 128), ((1, 1024), (1, 16384), (8, 2048), (64, 64))
        verified = (Drafts(8), Drafts(64, 8, stored=False), Drafts(64, 8, stored=False, tree=True))
    for heads in options.heads.split(","):
        bench = Bench(*map(int, heads.split("/")), tuple(options.without.split(",")))
        sections = {
            "decode": lambda b=bench: decode_points(b, batches),
            "verify": lambda b=bench: verify_points(b, verified),
            "replay": lambda b=bench: replay_points(b, tuple(x for x in batches if x >= 32)),
            "extend": lambda b=bench: extend_points(b, shapes),
            "conv": lambda b=bench: conv_points(b, (8, 64)),
        }
        for name in options.only.split(","):
            rows += sections[name]()
            torch.cuda.empty_cache()
            if options.json:
                _write(options.json, rows)
    for what, why in peers.absent().items():
        print(f"absent: {what}: {why}")


def _write(path: str, rows: list[dict[str, Any]]) -> None:
    facts = {
        "device": torch.cuda.get_device_name(0),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }
    with open(path, "w") as file:
        json.dump({**facts, "rows": rows}, file, indent=1)


PACKAGES = ("torch", "triton", "gdn", "flashinfer-python", "nvidia-cutlass-dsl", "fla-core", "sglang")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
