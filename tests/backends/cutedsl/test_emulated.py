"""The compiled kernels, run instruction by instruction on the CPU, against the fp64 reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
from gdn.backends.cutedsl import compiled
from gdn.backends.cutedsl import decode
from gdn.backends.cutedsl import verify
from gdn.testing.calls import build_call
from gdn.testing.case import Case
from gdn.testing.case import Heads
from gdn.testing.compare import assert_matches
from gdn.testing.situations import SITUATIONS
from tests.backends.cutedsl import emulated

pytestmark = pytest.mark.cross_compile

FACTORIES = {
    "decode": decode.factory,
    "packed_decode": decode.packed_factory,
    "verify": verify.factory,
    "tree_verify": verify.factory,
}
PAIRS = (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"))


def bound(operation, *, large_batch=False):
    """The operation, in the blocks of small batches or in those of large ones."""
    config = SimpleNamespace(deterministic=large_batch)
    return FACTORIES[operation](SimpleNamespace(config=config, device=SimpleNamespace(sm=90)))


@pytest.fixture(autouse=True)
def _emulation(monkeypatch):
    monkeypatch.setattr(compiled, "function_of", emulated.function_of)


SERVED = [
    (operation, case)
    for operation in FACTORIES
    for case in SITUATIONS[operation]
    if "verify" not in operation or case.drafts <= verify.MOST_DRAFTS
]


def points(cases, pairs=PAIRS):
    for operation, case in cases:
        for activation, state in pairs:
            typed = case.but(activation=activation, state=state)
            yield pytest.param(operation, typed, id=f"{operation}-{case.name}-{activation}-{state}")


@pytest.mark.parametrize(("operation", "case"), list(points(SERVED)))
def test_matches_the_reference(operation, case):
    assert_matches(bound(operation), build_call(operation, case, seed=0))


LARGE = [
    (operation, case)
    for operation, case in SERVED
    if any(word in case.name for word in ("wide", "ragged", "views", "rows-outside", "ratio-3"))
]


@pytest.mark.parametrize(("operation", "case"), list(points(LARGE, PAIRS[:2])))
def test_blocks_of_large_batches(operation, case):
    assert_matches(bound(operation, large_batch=True), build_call(operation, case, seed=1))


MIXED = (("bfloat16", "float16"), ("float16", "bfloat16"), ("float16", "float32"))
DIMS = [
    (
        operation,
        Case(f"{K}x{V}", heads=Heads(1, 2, K, V), lengths=lengths, drafts=drafts, buffer=drafts != 16, views=V == 80),
    )
    for K, V in ((64, 16), (64, 80), (128, 176), (256, 64), (32, 256))
    for operation, lengths, drafts in (("decode", (1, 1), 4), ("verify", (5, 3), 5), ("tree_verify", (16, 9), 16))
]


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "case"), list(points(DIMS, PAIRS[:2])))
@pytest.mark.parametrize("large_batch", [False, True])
def test_dims(operation, case, large_batch):
    assert_matches(bound(operation, large_batch=large_batch), build_call(operation, case, seed=2))


@pytest.mark.parametrize(
    ("operation", "case"), list(points([point for point in DIMS if point[1].heads.V == 176], MIXED))
)
def test_states_of_another_16_bit_dtype(operation, case):
    assert_matches(bound(operation), build_call(operation, case, seed=3))
