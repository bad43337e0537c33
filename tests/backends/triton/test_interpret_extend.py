"""Extend kernels in Triton's interpreter against the fp64 reference. Set TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, set before triton is imported", allow_module_level=True)

from gdn.backends.triton import extend
from gdn.testing.calls import build_call
from gdn.testing.compare import assert_matches
from gdn.testing.situations import SITUATIONS

pytestmark = pytest.mark.interpret

CONTEXT = SimpleNamespace(config=SimpleNamespace(deterministic=False), device=None)
POINTS = [
    pytest.param(case.but(activation=activation, state=state), id=f"{case.name}-{activation}-{state}")
    for case in SITUATIONS["extend"]
    for activation, state in (("float32", "float32"), ("float16", "float16"))
]


@pytest.mark.parametrize("case", POINTS)
def test_matches_the_reference(case):
    assert_matches(extend.factory(CONTEXT), build_call("extend", case, seed=0))
