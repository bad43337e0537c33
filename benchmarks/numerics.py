"""Errors against the fp64 reference on this GPU, ours beside other libraries' on the same inputs.

For each operation and kind of gates: the root mean square of the error over that of the reference, of outputs and of
states. bf16 activations, fp32 states, heads 4/8, K = V = 128.

    python -m benchmarks.numerics --json benchmarks/results/h200-numerics.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import peers
from benchmarks.gpu import Bench
from benchmarks.gpu import K
from benchmarks.gpu import V
from gdn.backends.triton import decode
from gdn.backends.triton import extend
from gdn.backends.triton import verify
from gdn.testing import reference

GATES = {"slow": (-6.0, 1.0), "usual": (0.0, 1.0), "strong": (4.0, 2.0)}
"""Mean and spread of `a`, which with A_log = 0 gives log decays around -softplus(a)."""
Errors = dict[str, float]
Run = Callable[[torch.Tensor], torch.Tensor | None]
"""From a pool, which it may update, to the outputs."""


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    found, right = found.double().cpu().flatten(), right.double().flatten()
    return ((found - right).square().mean() / right.square().mean()).sqrt().item()


def compared(
    runs: dict[str, Run | None], pool: torch.Tensor, right: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, Any]:
    """Errors of outputs and of the pool, by library."""
    errors: dict[str, Any] = {}
    for name, run in runs.items():
        if run is None:
            continue
        states = pool.clone()
        try:
            output = run(states)
        except Exception as error:  # a peer that refuses the point
            errors[name] = f"{type(error).__name__}: {error}"[:120]
            continue
        errors[name] = {"output": relative(output, right[0]), "states": relative(states, right[1])}
    return errors


def on_cpu(*values: Any) -> list[Any]:
    return [value.double().cpu() if value.is_floating_point() else value.cpu() for value in values]


def decode_rows(bench: Bench, a: torch.Tensor, b: torch.Tensor, mixed: torch.Tensor) -> dict[str, Any]:
    rows = mixed.shape[0]
    pool = torch.randn(rows, bench.HV, V, K, device="cuda")
    slots = torch.arange(rows, device="cuda", dtype=torch.int32)
    gates = {"A_log": bench.A_log, "dt_bias": bench.dt_bias}
    states, wide_mixed, wide_a, wide_b, log, bias = on_cpu(pool, mixed, a, b, bench.A_log, bench.dt_bias)
    output = reference.packed_decode(
        wide_mixed, wide_a, wide_b, A_log=log, dt_bias=bias, ssm_states=states, cache_indices=slots.cpu()
    )
    ours = decode.packed_factory(bench.context)
    q, k, v = (x.contiguous() for x in bench.heads(mixed))

    def call(builder: Any, *inputs: Any) -> Run:
        return lambda states: builder(*inputs, a, b, bench.A_log, bench.dt_bias, states, lambda: slots, K**-0.5)()

    runs = {
        "gdn": lambda states: ours(mixed, a, b, **gates, ssm_states=states, cache_indices=slots),
        "sglang": call(peers.sglang_packed_decode, mixed),
        "flashinfer": call(peers.flashinfer_decode, q, k, v),
    }
    return compared(runs, pool, (output, states))


def extend_rows(bench: Bench, a: torch.Tensor, b: torch.Tensor, mixed: torch.Tensor) -> dict[str, Any]:
    tokens = mixed.shape[0]
    q, k, v = (x.contiguous() for x in bench.heads(mixed))
    g = -torch.nn.functional.softplus(a.float())[None]
    beta = b.float().sigmoid()[None]
    pool = torch.randn(1, bench.HV, V, K, device="cuda") * 0.1
    slots = torch.zeros(1, device="cuda", dtype=torch.int32)
    offsets = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
    wide_q, wide_k, wide_v, wide_g, wide_beta, states = on_cpu(q, k, v, g, beta, pool)
    right = reference.extend(
        wide_q, wide_k, wide_v, wide_g, wide_beta, ssm_states=states, cache_indices=slots.cpu(),
        query_start_loc=offsets.cpu(),
    )  # fmt: skip
    ours = extend.factory(bench.context)
    arguments = {"cache_indices": slots, "query_start_loc": offsets}

    def sglang(states: torch.Tensor) -> torch.Tensor:
        return _first(peers.sglang_extend(q, k, v, g, beta, states, lambda: slots, offsets)())

    def fla(states: torch.Tensor) -> torch.Tensor:
        output, final = peers.fla_extend(q, k, v, g, beta, states, lambda: slots, offsets)()
        states.copy_(final.transpose(-1, -2))
        return output

    def flashinfer(states: torch.Tensor) -> torch.Tensor:
        return _first(peers.flashinfer_extend(q, k, v, g, beta, states, lambda: slots, offsets, tokens)())

    runs = {
        "gdn": lambda states: ours(q, k, v, g, beta, ssm_states=states, **arguments).output,
        "sglang": sglang, "fla": fla, "flashinfer": flashinfer,
    }  # fmt: skip
    return compared(runs, pool, (right.output, states))


def verify_rows(bench: Bench, a: torch.Tensor, b: torch.Tensor, mixed: torch.Tensor) -> dict[str, Any]:
    drafts = 8
    rows = mixed.shape[0] // drafts
    q, k, v = (x.contiguous() for x in bench.heads(mixed))
    pool = torch.randn(rows, bench.HV, V, K, device="cuda")
    slots = torch.arange(rows, device="cuda", dtype=torch.int32)
    offsets = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * drafts
    wide = on_cpu(bench.A_log, bench.dt_bias, q, k, v, a, b)
    states = pool.double().cpu()
    output = reference.verify(
        *wide, ssm_states=states, cache_indices=slots.cpu(), query_start_loc=offsets.cpu(),
        intermediate_states_buffer=None, intermediate_state_indices=None, cache_steps=drafts,
    )  # fmt: skip
    ours = verify.factory(bench.context)
    inputs = (bench.A_log, bench.dt_bias, q, k, v, a, b)
    buffer = pool.new_empty(rows, drafts, *pool.shape[1:])
    runs = {
        "gdn": lambda states: ours(
            *inputs, ssm_states=states, cache_indices=slots, query_start_loc=offsets, intermediate_states_buffer=None,
            intermediate_state_indices=None, cache_steps=drafts,
        ),
        "sglang": lambda states: peers.sglang_verify(
            *inputs, states, lambda: slots, offsets, buffer, slots, drafts
        )(),
        "flashinfer": lambda states: _first(
            peers.flashinfer_verify(*inputs, states, lambda: slots, buffer, drafts)()
        ),
    }  # fmt: skip
    return compared(runs, pool, (output, states))


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


OPERATIONS = {"packed_decode": (decode_rows, 16), "verify": (verify_rows, 64), "extend": (extend_rows, 1000)}


def measured() -> Iterator[dict[str, Any]]:
    bench = Bench(4, 8)
    bench.A_log, bench.dt_bias = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    for operation, (rows_of, tokens) in OPERATIONS.items():
        for gates, (mean, spread) in GATES.items():
            mixed, a, b = bench.mixed(tokens)
            errors = rows_of(bench, (a * spread + mean).to(a.dtype), b, mixed)
            yield {"operation": operation, "gates": gates, "errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for row in measured():
        rows.append(row)
        shown = "  ".join(
            f"{name} {e['output']:.2e}/{e['states']:.2e}" if isinstance(e, dict) else f"{name}: {e}"
            for name, e in row["errors"].items()
        )
        print(f"{row['operation']:14} {row['gates']:8} output/states {shown}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
