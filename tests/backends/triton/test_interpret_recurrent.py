"""Decode, verify and replay kernels in Triton's interpreter against the fp64 reference. Set TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, set before triton is imported", allow_module_level=True)

from gdn.backends.triton import decode
from gdn.backends.triton import replay
from gdn.backends.triton import verify
from gdn.testing.calls import build_call
from gdn.testing.compare import assert_matches
from gdn.testing.situations import SITUATIONS

pytestmark = pytest.mark.interpret

CONTEXT = SimpleNamespace(config=SimpleNamespace(deterministic=False), device=None)
FUNCTIONS = {
    "decode": decode.factory(CONTEXT),
    "packed_decode": decode.packed_factory(CONTEXT),
    "replay_decode": replay.factory(CONTEXT),
    "verify": verify.factory(CONTEXT),
    "tree_verify": verify.factory(CONTEXT),
}
POINTS = [
    pytest.param(
        operation, case.but(activation=activation, state=state), id=f"{operation}-{case.name}-{activation}-{state}"
    )
    for operation in FUNCTIONS
    for case in SITUATIONS[operation]
    if case.heads.dim <= 320
    for activation, state in (("float32", "float32"), ("float16", "float16"))
]


@pytest.mark.parametrize(("operation", "case"), POINTS)
def test_matches_the_reference(operation, case):
    assert_matches(FUNCTIONS[operation], build_call(operation, case, seed=0))


@pytest.mark.parametrize("operation", ["verify", "tree_verify"])
@pytest.mark.parametrize("buffer", [True, False])
def test_rows_of_drafts_beyond_cache_steps_are_zeros(operation, buffer):
    case = SITUATIONS["verify"][0].but(drafts=5, lengths=(5, 2), buffer=buffer, out=True)
    arguments = build_call(operation, case, seed=0).arguments
    out = FUNCTIONS[operation](**{**arguments, "cache_steps": 3})
    assert bool((out[0, 3:5] == 0).all())
    assert bool((out[0, [0, 1, 2, 5, 6]] != 0).any(dim=(1, 2)).all())
