"""The compiled kernels, run instruction by instruction on the CPU, against the fp64 reference."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
sys.path.insert(0, str(Path(__file__).parent))

import emulated

from gdn.backends.cutedsl import compiled
from gdn.backends.cutedsl import decode
from gdn.backends.cutedsl import verify
from gdn.testing.calls import build_call
from gdn.testing.compare import assert_matches
from gdn.testing.situations import SITUATIONS

pytestmark = pytest.mark.cross_compile

CONTEXT = SimpleNamespace(config=SimpleNamespace(deterministic=False), device=SimpleNamespace(sm=90))
FACTORIES = {
    "decode": decode.factory,
    "packed_decode": decode.packed_factory,
    "verify": verify.factory,
    "tree_verify": verify.factory,
}
PAIRS = (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"))
POINTS = [
    pytest.param(operation, case.but(activation=activation, state=state), id=f"{operation}-{case.name}-{activation}-{state}")
    for operation in FACTORIES
    for case in SITUATIONS[operation]
    for activation, state in PAIRS
    if "verify" not in operation or case.drafts <= verify.MOST_DRAFTS
]


@pytest.fixture(autouse=True)
def _emulation(monkeypatch):
    monkeypatch.setattr(compiled, "function_of", emulated.function_of)


@pytest.mark.parametrize(("operation", "case"), POINTS)
def test_matches_the_reference(operation, case):
    assert_matches(FACTORIES[operation](CONTEXT), build_call(operation, case, seed=0))
