"""Traps of the library that a case of the conformance kit can't set, and proof that the suite sees our faults."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch

from gdn.backends.flashinfer import decode
from gdn.backends.flashinfer import extend
from gdn.backends.flashinfer import library
from gdn.backends.flashinfer import rows
from gdn.backends.flashinfer import slots
from gdn.backends.flashinfer import staging
from gdn.backends.flashinfer import verify
from gdn.errors import BackendRefused
from gdn.errors import InputError
from gdn.testing.calls import build_call
from gdn.testing.case import Case
from gdn.testing.case import Heads
from gdn.testing.compare import assert_matches
from gdn.testing.compare import compare
from tests.backends.flashinfer import fakes
from tests.backends.flashinfer.test_fakes_conformance import OverFakes

HEADS = Heads(1, 2, 128, 128)
ALL_BUT_ZERO = (3, -1, 0, 9)


def fitted(operation, **changes):
    """A bf16 case over a pool whose slot 0 is live, with padding below and above it."""
    fields = {"heads": HEADS, "activation": "bfloat16", "pool_slots": 5, "slots": ALL_BUT_ZERO, "lengths": (1,) * 4}
    return OverFakes.fitted(operation, Case(**{**fields, **changes}))


def bound(operation, case):
    return OverFakes.bind(operation, case.config())


@pytest.mark.parametrize("operation", ["decode", "extend", "verify"])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_an_index_slice_aligned_to_its_element_only(operation, state, index):
    case = fitted(operation, state=state, index=index)
    call = build_call(operation, case, seed=0)
    for name in ("cache_indices", "query_start_loc", "intermediate_state_indices"):
        if (given := call.arguments.get(name)) is not None:
            call.arguments[name] = torch.cat((given.new_zeros(1), given))[1:]
            assert call.arguments[name].data_ptr() % 32
    assert_matches(bound(operation, case), call)


@pytest.mark.parametrize("operation", ["decode", "extend", "verify"])
def test_out_and_inputs_at_odd_addresses(operation):
    case = fitted(operation, state="float32", out=True)
    call = build_call(operation, case, seed=0)
    for name in ("q", "k", "v", "a", "b", "g", "beta", "A_log", "dt_bias", "out"):
        if (given := call.arguments.get(name)) is not None:
            shifted = given.new_empty(given.numel() + 1)[1:].view(given.shape)
            call.arguments[name] = shifted.copy_(given)
            assert shifted.data_ptr() % 32
    assert_matches(bound(operation, case), call)


@pytest.mark.parametrize("operation", ["decode", "extend", "verify"])
def test_a_pool_less_aligned_than_the_contract_is_refused(operation):
    case = fitted(operation, state="float32")
    call = build_call(operation, case, seed=0)
    pool = call.arguments["ssm_states"]
    shifted = pool.new_zeros(pool.numel() + 1)[1:].view(pool.shape)
    gapped = pool.new_zeros(pool.shape[0], pool[0].numel() + 1)[:, :-1].unflatten(1, pool.shape[1:])
    for wrong in (shifted, gapped):
        with pytest.raises(InputError, match=r"ssm_states: expected .* aligned to 32 bytes"):
            bound(operation, case)(**{**call.arguments, "ssm_states": wrong})


@pytest.mark.parametrize("operation", ["decode", "verify"])
@pytest.mark.parametrize("parameters", ["float32", "activation"])
def test_weights_updated_in_place_are_seen(operation, parameters):
    case = fitted(operation, state="float32", parameters=parameters)
    function = bound(operation, case)
    for seed in (0, 1):
        call = build_call(operation, case, seed=seed)
        if seed == 0:
            kept = call
        for name in ("A_log", "dt_bias"):
            kept.arguments[name].copy_(call.arguments[name])
            call.arguments[name] = kept.arguments[name]
        assert_matches(function, call)


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("buffer", [True, False])
def test_one_draft_leaves_the_pool_alone(state, buffer):
    """With one token the library takes its decode kernel, which ignores `disable_state_update`."""
    case = fitted("verify", state=state, drafts=1, buffer=buffer)
    assert_matches(bound("verify", case), build_call("verify", case, seed=0))


@pytest.mark.parametrize("operation", ["decode", "extend", "verify"])
def test_a_scale_of_zero_is_no_default(operation):
    case = fitted(operation, state="float32", scale=0.0)
    assert_matches(bound(operation, case), build_call(operation, case, seed=0))


@pytest.mark.parametrize(("argument", "dtype"), [("a", torch.float32), ("b", torch.float32)])
def test_gates_that_the_kernel_would_round_are_refused(argument, dtype):
    case = fitted("decode", state="float32")
    call = build_call("decode", case, seed=0)
    call.arguments[argument] = call.arguments[argument].to(dtype)
    with pytest.raises(InputError, match=f"{argument}: expected dtype bfloat16"):
        bound("decode", case)(**call.arguments)


def _nothing(*_args, **_kwargs):
    pass


def _first_slot(indices, usable, _instead):
    return torch.where(slots.inside(indices, usable), indices, 0).to(torch.int32)


def _unbounded(indices, _usable, _instead):
    return indices.clamp(max=3).to(torch.int32)


def _by_position(buffer, _rows, own):
    n, steps = own.shape
    place = torch.arange(n)[:, None] * buffer.stride(0) + torch.arange(steps) * buffer.stride(1)
    return torch.where(own, place, -1).flatten()


def _norms_left_out(q, k, g, indices, usable):
    return staging.Prefill(q.contiguous(), k.contiguous(), g.exp(), slots.or_else(indices, usable, -1))


def _gates_left_out(q, k, g, indices, usable):
    return staging.prefill_inputs(q, k, g * 0, indices, usable)


def _foreign_slots_live(q, k, g, indices, usable):
    return staging.prefill_inputs(q, k, g, indices.clamp(max=3), usable)


def _kept_beyond_the_pool(given, offsets, indices, kept, _usable, out):
    rows.spread(given, offsets, indices, kept, 1 << 30, out)


@pytest.mark.parametrize(
    ("operation", "state", "module", "name", "fault"),
    [
        ("decode", "bfloat16", decode, "slots_or_else", _first_slot),
        ("decode", "bfloat16", decode, "silence_each", _nothing),
        ("decode", "float32", decode, "slots_or_else", _unbounded),
        ("extend", "float32", extend, "prefill_inputs", _foreign_slots_live),
        ("extend", "float32", extend, "prefill_inputs", _gates_left_out),
        ("extend", "float32", extend, "silence", _nothing),
        ("verify", "float32", verify, "spread", _kept_beyond_the_pool),
        ("verify", "bfloat16", rows, "_places", _by_position),
    ],
)
def test_a_planted_fault_is_found(operation, state, module, name, fault):
    case = fitted(operation, state=state, lengths=(1, 2, 3, 2) if operation != "decode" else (1,) * 4)
    assert_matches(bound(operation, case), build_call(operation, case, seed=0))
    with mock.patch.object(module, name, fault):
        assert not all(found.passed for found in compare(bound(operation, case), build_call(operation, case, seed=0)))


def test_keys_longer_than_one_are_found():
    case = fitted("extend", state="float32")
    with mock.patch.object(extend, "prefill_inputs", _norms_left_out), pytest.raises(AssertionError, match="grow"):
        bound("extend", case)(**build_call("extend", case, seed=0).arguments)


def test_a_function_that_lost_an_argument_is_refused_at_bind_time():
    modules = fakes.modules()
    modules["flashinfer.gdn_prefill"].chunk_gated_delta_rule = lambda q, k, v: None
    modules["flashinfer.gdn_kernels"].run_mtp_decode = None
    with mock.patch.dict(sys.modules, modules):
        with pytest.raises(BackendRefused, match="takes no argument g, beta"):
            library.function("gdn_prefill:chunk_gated_delta_rule")
        with pytest.raises(BackendRefused, match="run_mtp_decode is missing"):
            library.function("gdn_decode:gated_delta_rule_mtp", kernel=library.FP32_VERIFY_KERNEL)
        with pytest.raises(BackendRefused, match="other_name is missing"):
            library.function("gdn_decode:other_name")
    with mock.patch.dict(sys.modules, {"flashinfer": None}), pytest.raises(BackendRefused, match="can't be imported"):
        library.function("gdn_decode:gated_delta_rule_mtp")
