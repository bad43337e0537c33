"""Speed of the cpu backend beside transformers' torch functions, on this machine and in this process.

    python benchmarks/cpu.py [--quick] [--rows native|torch] [--threads N] [--json FILE]

Both sides run alternately, so that other load hits them alike: read the ratios, not the times. Threads are pinned,
one per core, since unpinned OpenMP threads lose milliseconds whenever anything else runs. Decode rotates over 36 pools,
as many layers as Qwen3-Next has, so that states come from memory and not from cache.

transformers gets less to do: q and k already repeated for the value heads, gates computed beforehand, one equally long
sequence per row, a state it returns instead of updating. The floor is the time to move the bytes that the operation
must read and write at the bandwidth of a large copy.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from dataclasses import dataclass
from pathlib import Path

KEY_HEADS, VALUE_HEADS, HEAD_DIM, WIDTH, LAYERS = 16, 32, 128, 4, 36
CONV_DIM = 2 * KEY_HEADS * HEAD_DIM + VALUE_HEADS * HEAD_DIM

Call = Callable[[int], object]


@dataclass(frozen=True)
class Row:
    """One line of the table; times in microseconds, medians with 10th percentiles."""

    operation: str
    point: str
    ours: float
    ours_p10: float
    transformers: float | None
    transformers_p10: float | None
    floor: float

    @property
    def ratio(self) -> float | None:
        """How many times faster than transformers."""
        return None if self.transformers is None else self.transformers / self.ours


def pin_threads(threads: int) -> None:
    """One OpenMP thread per core; works only before torch is imported."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    os.environ["OMP_PROC_BIND"] = "true"
    os.environ["OMP_PLACES"] = ",".join(f"{{{core}}}" for core in cores)


def measure(ours: Call, theirs: Call | None, rounds: int) -> tuple[list[float], list[float]]:
    """Times of both sides in microseconds, taken alternately after a warm-up."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(-2, rounds):
        for call, spent in zip((ours, theirs), times, strict=True):
            if call is not None:
                begin = time.perf_counter()
                call(turn % LAYERS)
                if turn >= 0:
                    spent.append((time.perf_counter() - begin) * 1e6)
    return times


def copy_bandwidth() -> float:
    """Bytes per microsecond, read plus written, of copying 256 MiB."""
    import torch

    source = torch.ones(2**26)
    target = torch.empty_like(source)
    times, _ = measure(lambda _: target.copy_(source), None, 9)
    return 2 * source.numel() * source.element_size() / min(times)


def tenth(times: list[float]) -> float:
    return sorted(times)[len(times) // 10]


def run(operation: str, point: str, ours: Call, theirs: Call | None, moved_bytes: int, rounds: int) -> Row:
    mine, other = measure(ours, theirs, rounds)
    return Row(
        operation,
        point,
        statistics.median(mine),
        tenth(mine),
        statistics.median(other) if other else None,
        tenth(other) if other else None,
        moved_bytes / bandwidth(),
    )


bandwidth = functools.cache(copy_bandwidth)


@functools.cache
def operation(name: str) -> Callable[..., object]:
    """The backend's function, from the kind of rows that the command line asks for."""
    import gdn
    from gdn.testing.operations import bound_operation

    config = gdn.GdnConfig(
        num_k_heads=KEY_HEADS, num_v_heads=VALUE_HEADS, head_k_dim=HEAD_DIM, head_v_dim=HEAD_DIM
    )  # fmt: skip
    function = bound_operation("cpu", name, config, gdn.DeviceInfo.parse("cpu"))  # type: ignore[arg-type]
    assert function is not None
    return function


def recurrent_inputs(tokens: int, dtype_name: str):  # type: ignore[no-untyped-def]
    import torch

    dtype = getattr(torch, dtype_name)
    q, k = (torch.randn(1, tokens, KEY_HEADS, HEAD_DIM, dtype=dtype) for _ in range(2))
    v = torch.randn(1, tokens, VALUE_HEADS, HEAD_DIM, dtype=dtype)
    a, b = (torch.randn(tokens, VALUE_HEADS, dtype=dtype) for _ in range(2))
    return q, k, v, a, b, torch.rand(VALUE_HEADS), torch.rand(VALUE_HEADS)


def decode_row(batch: int, rounds: int, state_dtype_name: str) -> Row:
    import torch
    from transformers.models.qwen3_next import modeling_qwen3_next as peer

    decode = operation("decode")
    gating = operation("gating")

    q, k, v, a, b, A_log, dt_bias = recurrent_inputs(batch, "bfloat16")
    state_dtype = getattr(torch, state_dtype_name)
    pools = [torch.zeros(batch, VALUE_HEADS, HEAD_DIM, HEAD_DIM, dtype=state_dtype) for _ in range(LAYERS)]
    slots = torch.arange(batch)
    g, beta = gating(A_log, a, b, dt_bias)

    def per_request(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(VALUE_HEADS // x.shape[2], dim=2).transpose(0, 1)

    peer_inputs = (per_request(q), per_request(k), per_request(v), g.transpose(0, 1), beta.transpose(0, 1))

    def ours(layer: int) -> object:
        return decode(
            q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=pools[layer], cache_indices=slots
        )  # fmt: skip

    def theirs(layer: int) -> object:
        _, state = peer.torch_recurrent_gated_delta_rule(
            *peer_inputs, initial_state=pools[layer], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        return state

    return run("decode", f"B={batch} {state_dtype_name} state", ours, theirs, 2 * pools[0].nbytes, rounds)


def extend_row(tokens: int, rounds: int, dtype_name: str) -> Row:
    import torch
    from transformers.models.qwen3_next import modeling_qwen3_next as peer

    extend = operation("extend")
    gating = operation("gating")

    q, k, v, a, b, A_log, dt_bias = recurrent_inputs(tokens, dtype_name)
    g, beta = gating(A_log, a, b, dt_bias)
    pool = torch.zeros(2, VALUE_HEADS, HEAD_DIM, HEAD_DIM)
    slots, bounds = torch.tensor([1]), torch.tensor([0, tokens])
    repeated_q, repeated_k = (x.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=2) for x in (q, k))

    def ours(_: int) -> object:
        return extend(q, k, v, g, beta, ssm_states=pool, cache_indices=slots, query_start_loc=bounds)

    def theirs(_: int) -> object:
        return peer.torch_chunk_gated_delta_rule(
            repeated_q, repeated_k, v, g, beta, initial_state=pool[:1], output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    moved = sum(x.nbytes for x in (q, k, v, v, g, beta)) + 2 * pool[0].nbytes
    return run("extend", f"T={tokens} {dtype_name}", ours, theirs, moved, rounds)


def verify_row(batch: int, drafts: int, rounds: int) -> Row:
    import torch

    verify = operation("verify")

    q, k, v, a, b, A_log, dt_bias = recurrent_inputs(batch * drafts, "bfloat16")
    pool = torch.zeros(batch, VALUE_HEADS, HEAD_DIM, HEAD_DIM)
    buffer = torch.zeros(batch, drafts, *pool.shape[1:])
    rows, bounds = torch.arange(batch), torch.arange(batch + 1) * drafts

    def ours(_: int) -> object:
        return verify(
            A_log, dt_bias, q, k, v, a, b, ssm_states=pool, cache_indices=rows, query_start_loc=bounds,
            intermediate_states_buffer=buffer, intermediate_state_indices=rows, cache_steps=drafts,
        )  # fmt: skip

    return run("verify", f"B={batch} D={drafts}", ours, None, pool.nbytes + buffer.nbytes, rounds)


def conv_update_row(batch: int, rounds: int) -> Row:
    import torch
    from transformers.models.qwen3_next import modeling_qwen3_next as peer

    conv_update = operation("conv_update")

    x, weight = torch.randn(batch, CONV_DIM, dtype=torch.bfloat16), torch.randn(CONV_DIM, WIDTH, dtype=torch.bfloat16)
    pools = [torch.zeros(batch, CONV_DIM, WIDTH - 1, dtype=torch.bfloat16) for _ in range(LAYERS)]
    slots = torch.arange(batch)
    return run(
        "conv_update",
        f"B={batch}",
        lambda layer: conv_update(x, pools[layer], weight, conv_state_indices=slots),
        lambda layer: peer.causal_conv1d_update(x.unsqueeze(-1), pools[layer], weight, activation="silu"),
        2 * x.nbytes + 2 * pools[0].nbytes,
        rounds,
    )


def conv_extend_row(tokens: int, rounds: int) -> Row:
    import torch
    from transformers.models.qwen3_next import modeling_qwen3_next as peer

    conv_extend = operation("conv_extend")

    x = torch.randn(tokens, CONV_DIM, dtype=torch.bfloat16).t()
    weight = torch.randn(CONV_DIM, WIDTH, dtype=torch.bfloat16)
    pool = torch.zeros(1, CONV_DIM, WIDTH - 1, dtype=torch.bfloat16)
    slots, bounds = torch.tensor([0]), torch.tensor([0, tokens])
    return run(
        "conv_extend",
        f"T={tokens}",
        lambda _: conv_extend(
            x, weight, None, conv_states=pool, query_start_loc=bounds, cache_indices=slots, has_initial_state=None
        ),
        lambda _: peer.causal_conv1d_fn(x.unsqueeze(0), weight, activation="silu"),
        2 * x.nbytes,
        rounds,
    )


def gating_row(tokens: int, rounds: int) -> Row:
    import torch

    gating = operation("gating")

    *_, a, b, A_log, dt_bias = recurrent_inputs(tokens, "bfloat16")

    def theirs(_: int) -> object:
        return -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias), b.sigmoid()

    moved = 2 * a.nbytes + 8 * a.numel()
    return run("gating", f"T={tokens}", lambda _: gating(A_log, a, b, dt_bias), theirs, moved, rounds)


def table(quick: bool) -> list[Row]:
    few, many = (3, 12) if quick else (10, 72)
    batches, lengths = ((1, 8), (512,)) if quick else ((1, 8, 32), (64, 512, 2048))
    rows = [decode_row(batch, many if batch < 32 else 3 * few, "float32") for batch in batches]
    rows += [decode_row(batch, many if batch < 32 else 3 * few, "bfloat16") for batch in batches]
    rows += [extend_row(tokens, few, dtype) for dtype in ("float32", "bfloat16") for tokens in lengths]
    rows += [verify_row(batch, 4, 3 * few) for batch in batches]
    rows += [conv_update_row(batch, many) for batch in batches]
    rows += [conv_extend_row(tokens, few) for tokens in lengths]
    return rows + [gating_row(tokens, many) for tokens in (1, 32, 2048)]


def instruction_path() -> str:
    from gdn.backends.cpu.native.library import library

    return library().path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer points and rounds")
    parser.add_argument("--rows", choices=("native", "torch"), default="native", help="which kind of rows")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    arguments = parser.parse_args()
    pin_threads(arguments.threads)
    os.environ["GDN_CPU_NATIVE"] = "1" if arguments.rows == "native" else "0"

    import torch
    import transformers

    from gdn.cpu_facts import read_cpu

    with torch.inference_mode():
        rows = table(arguments.quick)
    machine = {
        "rows": arguments.rows,
        "path": instruction_path() if arguments.rows == "native" else None,
        "cpu": read_cpu().model,
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "copy_gigabytes_per_second": round(bandwidth() / 1e3, 1),
    }
    print(machine)
    print(
        f"{'operation':12} {'point':24} {'ours us (p10)':>20} {'transformers us (p10)':>24} {'ratio':>6} {'floor':>9}"
    )
    for row in rows:
        mine = f"{row.ours:.0f} ({row.ours_p10:.0f})"
        other = "-" if row.transformers is None else f"{row.transformers:.0f} ({row.transformers_p10:.0f})"
        ratio = "-" if row.ratio is None else f"{row.ratio:.1f}"
        print(f"{row.operation:12} {row.point:24} {mine:>20} {other:>24} {ratio:>6} {row.floor:9.1f}")
    if arguments.json:
        report = {"machine": machine, "rows": [{**asdict(row), "ratio": row.ratio} for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
