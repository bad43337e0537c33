"""Compare every usable backend of this machine with the reference, each in a process of its own.

A backend that hangs or kills its process is a failed result, not the end of the test.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from typing import Any

from gdn.config import GdnConfig
from gdn.device import DeviceInfo
from gdn.registry import get_registry
from gdn.testing.operations import declared_operations
from gdn.testing.operations import rows_serving
from gdn.types import Operation

Progress = Callable[[int, int, str], None]
TIMEOUT = 120.0
"""Seconds that one operation of one backend may take, compilation included."""


@dataclass(frozen=True)
class SelfTestResult:
    """The worst comparison of one operation of one backend."""

    backend: str
    operation: str
    dtype: str
    worst_error: float
    tolerance: float
    passed: bool
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, where an infinite error is null."""
        finite = None if self.worst_error == float("inf") else self.worst_error
        return {**asdict(self), "worst_error": finite}


def run_selftest(
    device: DeviceInfo,
    config: GdnConfig,
    *,
    backends: Sequence[str] | None = None,
    progress: Progress | None = None,
    timeout: float = TIMEOUT,
) -> list[SelfTestResult]:
    """Test every operation that a backend serves on `device` in the dtypes of `config`.

    Args:
        backends: names; None: all that loaded.
        progress: called with (comparisons done, all of them, what comes next).
        timeout: seconds for each operation.
    """
    names = [manifest.name for manifest in get_registry().manifests] if backends is None else list(backends)
    work = {name: list(_served(name, device, config)) for name in names}
    total = sum(map(len, work.values()))
    results: list[SelfTestResult] = []
    for name, operations in work.items():
        remaining = list(operations)
        while remaining:
            if progress:
                progress(len(results), total, f"{name} {remaining[0]}")
            before = len(remaining)
            for result in _in_child(name, device, config, remaining, timeout):
                results.append(result)
                remaining.remove(result.operation)  # type: ignore[arg-type]
                if progress:
                    progress(len(results), total, f"{name} {result.operation}")
            assert len(remaining) < before
    return results


def _served(backend: str, device: DeviceInfo, config: GdnConfig) -> Iterator[Operation]:
    for operation in declared_operations(backend):
        if next(rows_serving(backend, operation, config, device), None) is not None:
            yield operation


def _in_child(
    backend: str, device: DeviceInfo, config: GdnConfig, operations: Sequence[Operation], timeout: float
) -> Iterator[SelfTestResult]:
    """Results of one child process, in order; ends early with a failed one where the child hangs or dies."""
    task = json.dumps({
        "backend": backend, "device": device.torch_device, "config": config.model_dump(), "operations": operations,
    })  # fmt: skip
    child = subprocess.Popen(
        [sys.executable, "-m", "gdn.testing.selftest", task], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []
    readers = [
        threading.Thread(target=_forward, args=(child.stdout, lines.put), daemon=True),
        threading.Thread(target=_forward, args=(child.stderr, errors.append), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        for operation in operations:
            answer = _next_answer(child, lines, errors, timeout)
            if isinstance(answer, str):
                yield _failed(backend, operation, config, f"lost: {answer}")
                return
            yield answer
    finally:
        child.kill()
        child.wait()
        for reader, stream in zip(readers, (child.stdout, child.stderr), strict=True):
            reader.join()
            assert stream is not None
            stream.close()


def _next_answer(
    child: subprocess.Popen[str], lines: queue.Queue[str | None], errors: list[str], timeout: float
) -> SelfTestResult | str:
    """The child's next result, or why none will come."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            line = lines.get(timeout=max(deadline - time.monotonic(), 0.01))
        except queue.Empty:
            break
        if line is None:
            time.sleep(0.2)
            said = next((text.strip() for text in reversed(errors) if text and text.strip()), "no message")
            return f"the process ended with code {child.wait()}: {said}"
        if line.startswith('{"backend"'):
            return SelfTestResult(**json.loads(line))
    return f"no answer within {timeout:.0f} s"


def _failed(backend: str, operation: str, config: GdnConfig, why: str) -> SelfTestResult:
    return SelfTestResult(backend, operation, _dtypes(config), float("inf"), 0.0, False, why)


def _forward(stream: Any, put: Callable[[Any], None]) -> None:
    for line in stream:
        put(line)
    put(None)


def _dtypes(config: GdnConfig) -> str:
    return f"{config.activation_dtype}/{config.state_dtype}"


def compare_operation(backend: str, operation: Operation, config: GdnConfig, device: DeviceInfo) -> SelfTestResult:
    """Every situation of one operation, in this process; the comparison nearest to its tolerance counts."""
    from gdn.testing.calls import build_call
    from gdn.testing.compare import compare
    from gdn.testing.operations import bound_operation
    from gdn.testing.operations import serving_config
    from gdn.testing.situations import SITUATIONS

    state = "float32" if config.state_dtype == "auto" else config.state_dtype
    worst, detail, passed = (0.0, 0.0, -1.0), "", True
    for seed, plain in enumerate(SITUATIONS[operation]):
        case = plain.but(activation=config.activation_dtype, state=state)
        function = bound_operation(backend, operation, serving_config(operation, case), device)
        if function is None:
            continue
        for difference in compare(function, build_call(operation, case, seed=seed, device=device.torch_device)):
            closeness = difference.error / difference.tolerance if difference.tolerance else difference.error
            if closeness > worst[2]:
                worst = (difference.error, difference.tolerance, closeness)
            if not difference.passed and passed:
                passed, detail = False, f"{case.name}: {difference}"
    return SelfTestResult(backend, operation, _dtypes(config), worst[0], worst[1], passed, detail)


def _main(task: dict[str, Any]) -> None:
    config = GdnConfig(**task["config"])
    from gdn.device import detect_device

    device = detect_device(task["device"])
    for operation in task["operations"]:
        try:
            result = compare_operation(task["backend"], operation, config, device)
        except Exception as error:  # a backend's own failure is this operation's result
            result = _failed(task["backend"], operation, config, f"{type(error).__name__}: {error}")
        print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
