"""Situations fit what a backend asks for: head dims, slot alignment, scratch slots whose content doesn't count."""

import pytest
import torch

from gdn.backends.cpu.decode import factory
from gdn.testing.calls import build_call
from gdn.testing.case import Case
from gdn.testing.case import Heads
from gdn.testing.compare import compare
from gdn.testing.operations import fit
from gdn.types import StateContract


def rows(served, alignment=1, reserved=0):
    def serving(_operation, config):
        if (config.head_k_dim, config.head_v_dim) == served:
            yield None, StateContract(config.state_dtype, alignment=alignment, reserved_slots=reserved)

    return serving


def test_head_dims_become_the_served_ones_unless_they_are_the_point():
    case = Case("x", heads=Heads(2, 4, 32, 48))
    assert fit("decode", case, rows((32, 48))).heads == case.heads
    assert fit("decode", case, rows((128, 128))).heads == Heads(2, 4, 128, 128)
    assert fit("decode", case, rows((128, 128)), dims=False) is None
    assert fit("decode", case, rows((64, 64))) is None


@pytest.mark.parametrize(("state", "gap", "expected"), [("bfloat16", 24, 32), ("bfloat16", 0, 0), ("float32", 24, 24)])
def test_the_gap_grows_to_the_alignment(state, gap, expected):
    case = Case("x", heads=Heads(1, 2, 128, 128), state=state, slot_gap=gap)
    assert fit("extend", case, rows((128, 128), alignment=32)).slot_gap == expected


def test_scratch_slots_hold_anything_and_no_request():
    case = fit("decode", Case("x", slots=(0, 2), lengths=(1, 1), pool_slots=3), rows((32, 48), reserved=1))
    call = build_call("decode", case, seed=0)
    assert call.arguments["ssm_states"].shape[0] == 4

    def writes(slot):
        def decode(*args, ssm_states, **kwargs):
            out = honest(*args, ssm_states=ssm_states, **kwargs)
            ssm_states[slot] = 7.0
            return out

        return decode

    class Context:
        config = case.config(deterministic=True)

    honest = factory(Context)
    assert all(found.passed for found in compare(writes(3), call))
    assert not all(found.passed for found in compare(writes(1), call))
    assert torch.isnan(call.arguments["ssm_states"][3]).all()
