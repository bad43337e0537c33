"""Where the host time of one eager packed decode goes, in microseconds."""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch

from gdn.backends.triton import decode
from gdn.device import detect_device

CONTEXT = SimpleNamespace(config=SimpleNamespace(deterministic=False), device=detect_device("cuda:0"))


def cost(function, rounds: int = 300) -> float:
    best = float("inf")
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            function()
        best = min(best, (time.perf_counter() - start) / rounds * 1e6)
    return best


def main() -> None:
    B, HK, HV, K, V = 1, 16, 32, 128, 128
    mixed = torch.randn(B, 2 * HK * K + HV * V, device="cuda", dtype=torch.bfloat16)
    a, b = (torch.randn(B, HV, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    A_log, dt_bias = torch.randn(HV, device="cuda"), torch.randn(HV, device="cuda")
    pool = torch.randn(64, HV, V, K, device="cuda", dtype=torch.bfloat16)
    slots = torch.zeros(B, device="cuda", dtype=torch.int32)
    out = torch.empty(1, B, HV, V, device="cuda", dtype=torch.bfloat16)
    function = decode.packed_factory(CONTEXT)
    plans = function.__closure__[0].cell_contents
    args = (mixed, a, b, A_log, dt_bias, pool, slots, None, None, None)
    call = lambda: function(mixed, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=pool, cache_indices=slots)  # noqa: E731
    call()
    plan = plans(*args)
    tensors = (mixed, mixed, mixed, a, b, A_log, dt_bias, pool, slots, None, out)
    launch_args = (*tensors, plan.scale, *plan.numbers)
    print(f"whole call {cost(call):.2f}")
    print(f"plan lookup {cost(lambda: plans(*args)):.2f}")
    print(f"torch.empty {cost(lambda: torch.empty(plan.shape, dtype=plan.dtype, device=plan.device)):.2f}")
    print(f"new_empty {cost(lambda: mixed.new_empty(plan.shape)):.2f}")
    print(f"launch {cost(lambda: plan.launch(plan.programs, 1, 1, *launch_args)):.2f}")
    run = plan.launch._aligned
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    stream = torch._C._cuda_getCurrentRawStream(0)
    rest = (*launch_args[11:], *plan.launch._tail)
    print(f"bare run {cost(lambda: run(plan.programs, 1, 1, stream, *addresses, *rest)):.2f}")
    print(f"addresses {cost(lambda: [0 if t is None else t.data_ptr() for t in tensors]):.2f}")
    print(f"device + stream {cost(lambda: (torch._C._cuda_getDevice(), torch._C._cuda_getCurrentRawStream(0))):.2f}")
    print(f"arguments {len(launch_args)} + {len(plan.launch._tail)} constants")


if __name__ == "__main__":
    main()
