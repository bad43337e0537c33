"""The costs around the kernels: import, explain, cached resolve, validation. Prints each beside its budget."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable

import gdn

IMPORT_MS, EXPLAIN_MS, RESOLVE_US, VALIDATION_US = 100.0, 1.0, 5.0, 2.0


def import_ms(code: str) -> float:
    """Median time of `code` in fresh processes, less that of an empty one."""

    def run(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return (time.perf_counter() - start) * 1e3

    return statistics.median(run(code) for _ in range(9)) - statistics.median(run("") for _ in range(9))


def microseconds(function: Callable[[], object], number: int) -> float:
    """Best of five."""
    return min(timeit.repeat(function, number=number, repeat=5)) / number * 1e6


def validation_us() -> float:
    """A validated decode signature, seen again."""
    import torch

    from gdn.signature import validated
    from gdn.validation import check_decode

    q = torch.zeros(1, 8, 16, 128)
    v, a, parameters = torch.zeros(1, 8, 32, 128), torch.zeros(8, 32), torch.zeros(32)
    arguments = (
        q, q.clone(), v, a, a.clone(), parameters, parameters.clone(), torch.zeros(8, 32, 128, 128),
        torch.zeros(8, dtype=torch.int32), None, None,
    )  # fmt: skip
    check = validated(check_decode)
    return microseconds(lambda: check(*arguments), 20000) - microseconds(lambda: None, 20000)


def main() -> None:
    config, device = gdn.presets()["qwen3-next-80b-a3b"], gdn.DeviceInfo.parse("sm90", cuda="13.0")
    gdn.explain(config, device=device)
    rows = [
        ("import gdn, ms", import_ms("import gdn"), IMPORT_MS),
        ("its first use, ms", import_ms("import gdn; gdn.resolve"), IMPORT_MS),
        ("explain, ms", microseconds(lambda: gdn.explain(config, device=device), 50) / 1e3, EXPLAIN_MS),
    ]
    try:
        import torch  # noqa: F401
    except ImportError:
        print("no torch: cached resolve and validation are left out")
    else:
        gdn.resolve(config, device="cpu")
        rows.append(("cached resolve, us", microseconds(lambda: gdn.resolve(config, device="cpu"), 5000), RESOLVE_US))
        rows.append(("validation, us", validation_us(), VALIDATION_US))
    for name, value, budget in rows:
        print(f"{name:20} {value:8.2f}   budget {budget:6.1f}   {budget / value:5.1f}x")


if __name__ == "__main__":
    main()
