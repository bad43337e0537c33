"""Every instruction path that this processor has matches the reference, each forced by its variable."""

from __future__ import annotations

import pytest
import torch

import gdn
from gdn.backends.cpu.native.build import PATHS
from gdn.backends.cpu.native.library import library
from gdn.cpu_facts import read_cpu
from gdn.testing.calls import build_call
from gdn.testing.compare import assert_matches
from gdn.testing.operations import bound_operation
from gdn.testing.situations import SITUATIONS

CPU = gdn.DeviceInfo.parse("cpu")
HERE = [path.name for path in PATHS if path.features <= read_cpu().features]
DTYPES = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"))


@pytest.fixture(params=HERE)
def path(request, monkeypatch):
    monkeypatch.setenv("GDN_CPU_PATH", request.param)
    return request.param


@pytest.mark.parametrize("operation", SITUATIONS)
def test_a_path_matches_the_reference(operation, path):
    assert library().path == path
    for plain in SITUATIONS[operation]:
        for activation, state in DTYPES:
            case = plain.but(activation=activation, state=state)
            function = bound_operation("cpu", operation, case.config(), CPU)
            assert_matches(function, build_call(operation, case, seed=4))


@pytest.mark.parametrize("operation", ["decode", "extend", "verify", "conv_extend"])
def test_the_number_of_threads_changes_no_bit(operation, path):
    before = torch.get_num_threads()
    plain = next(case for case in reversed(SITUATIONS[operation]) if case.heads.K > 32 or "conv" in operation)
    try:
        for dtype in ("float32", "bfloat16"):
            case = plain.but(activation=dtype)
            function = bound_operation("cpu", operation, case.config(deterministic=True), CPU)
            results = []
            for threads in (1, 2):
                torch.set_num_threads(threads)
                call = build_call(operation, case, seed=8)
                result = function(**call.arguments)
                pool = call.arguments["conv_states" if "conv" in operation else "ssm_states"]
                results.append((result.output if operation == "extend" else result, pool))
            for output, pool in results[1:]:
                assert torch.equal(output, results[0][0])
                assert torch.equal(pool.nan_to_num(), results[0][1].nan_to_num())
    finally:
        torch.set_num_threads(before)


def test_states_that_decay_through_subnormals_are_flushed_and_the_mode_is_restored(path):
    function = bound_operation("cpu", "decode", gdn.GdnConfig(
        num_k_heads=1, num_v_heads=1, head_k_dim=32, head_v_dim=32, activation_dtype="float32"
    ), CPU)  # fmt: skip
    pool = torch.full((1, 1, 32, 32), 1e-38)
    zeros = torch.zeros(1, 1, 1, 32)
    gates = {"A_log": torch.zeros(1), "dt_bias": torch.full((1,), 3.0)}
    function(
        zeros, zeros, zeros, torch.zeros(1, 1), torch.zeros(1, 1), **gates, ssm_states=pool,
        cache_indices=torch.tensor([0]),
    )  # fmt: skip
    assert float(pool.abs().max()) == 0.0
    assert float(torch.tensor([1e-38]) * 0.1) > 0.0
