"""The native code under the address and undefined-behaviour sanitizers, over the conformance situations."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gdn.backends.cpu.native.build import Settings
from gdn.backends.cpu.native.build import find_compiler
from gdn.backends.cpu.native.build import paths_for
from gdn.cpu_facts import read_cpu

RUN = """
import sys
import gdn
from gdn.backends.cpu.native.library import library
from gdn.testing.calls import build_call
from gdn.testing.compare import assert_matches
from gdn.testing.operations import bound_operation
from gdn.testing.situations import SITUATIONS
assert library().path == sys.argv[1]
for operation, situations in SITUATIONS.items():
    for plain in situations:
        for activation, state in (("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")):
            case = plain.but(activation=activation, state=state)
            function = bound_operation("cpu", operation, case.config(), gdn.DeviceInfo.parse("cpu"))
            assert_matches(function, build_call(operation, case, seed=2))
print("clean")
"""
FLAGS = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
PATHS = [path.name for path in paths_for(read_cpu(), Settings.read({}))]


def sanitized(path: str, source: str, tmp_path) -> subprocess.CompletedProcess[str]:
    compiler = str(find_compiler(Settings.read()))
    runtime = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip(f"{compiler} has no libasan")
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path),
        "GDN_CPU_PATH": path,
        "GDN_CPU_FLAGS": FLAGS,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "2",
    }
    return subprocess.run(
        [sys.executable, "-c", source, path], env=environment, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.mark.sanitize
@pytest.mark.parametrize("path", PATHS)
def test_no_sanitizer_complains(path, tmp_path):
    done = sanitized(path, RUN, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("clean\n")


@pytest.mark.sanitize
def test_the_sanitizer_would_complain(tmp_path):
    """A plan that promises one row too many."""
    source = """
import gdn, torch
from gdn.backends.cpu.native import gating
honest = gating._gating_plan
def lying(A_log, a, b, dt_bias):
    plan = honest(A_log, a, b, dt_bias)
    plan.memory.tokens += 64
    return plan
gating._gating_plan = lying
column = torch.zeros(64, 32)
gating.factory(None)(torch.zeros(32), column, column, torch.zeros(32))
"""
    done = sanitized("portable", source, tmp_path)
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr
