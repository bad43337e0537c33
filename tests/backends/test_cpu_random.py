"""Cases drawn at random against the fp64 reference."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

import gdn
from gdn.testing.calls import build_call
from gdn.testing.compare import assert_matches
from gdn.testing.operations import bound_operation
from gdn.testing.operations import declared_operations
from gdn.testing.strategies import any_case

CPU = gdn.DeviceInfo.parse("cpu")


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "torch"])
@pytest.mark.parametrize("operation", declared_operations("cpu"))
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_case_matches_the_reference(operation, native, data):
    case = data.draw(any_case(operation, dims=(1, 7, 32, 48)))
    types = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"))
    activation, state = data.draw(st.sampled_from(types))
    case = case.but(activation=activation, state=state)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GDN_CPU_NATIVE", native)
        function = bound_operation("cpu", operation, case.config(), CPU)
    assert ("native" in function.__module__) == (native == "1")
    assert_matches(function, build_call(operation, case, seed=data.draw(st.integers(0, 99))))
