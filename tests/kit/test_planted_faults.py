"""The kit finds what it is made to find: each planted fault fails, the faultless operation passes."""

from __future__ import annotations

import math

import pytest
import torch

import gdn
from gdn.backends.cpu import chunk_step
from gdn.backends.cpu import gates
from gdn.backends.cpu import rows
from gdn.testing.calls import build_call
from gdn.testing.compare import compare
from gdn.testing.operations import bound_operation
from gdn.testing.situations import SITUATIONS

CPU = gdn.DeviceInfo.parse("cpu")


@pytest.fixture(autouse=True)
def _without_native_kernels(monkeypatch):
    """Faults are planted in Python."""
    monkeypatch.setenv("GDN_CPU_NATIVE", "0")


def failures(operation, wrap=lambda function: function, **dtypes):
    """Names of the situations in which the operation is found wrong."""
    found = []
    for plain in SITUATIONS[operation]:
        case = plain.but(**dtypes)
        function = wrap(bound_operation("cpu", operation, case.config(), CPU))
        if not all(difference.passed for difference in compare(function, build_call(operation, case, seed=1))):
            found.append(case.name)
    return found


@pytest.mark.parametrize("operation", SITUATIONS)
def test_the_faultless_operation_passes(operation):
    assert failures(operation) == []


@pytest.mark.parametrize("operation", ["decode", "packed_decode", "replay_decode", "extend", "verify", "tree_verify"])
@pytest.mark.parametrize("epsilon", [1e-5, 1e-7, 0.0])
def test_a_wrong_epsilon(operation, epsilon, monkeypatch):
    monkeypatch.setattr(gates, "NORM_EPSILON", epsilon)
    assert failures(operation)


def test_an_epsilon_outside_the_root(monkeypatch):
    def outside(x):
        return x.div_(x.square().sum(-1, keepdim=True).sqrt_().add_(1e-6))

    monkeypatch.setattr(chunk_step, "normalise_", outside)
    assert failures("extend")


@pytest.mark.parametrize("operation", ["decode", "packed_decode", "replay_decode", "verify", "tree_verify"])
@pytest.mark.parametrize("activation", ["float32", "bfloat16"])
def test_a_beta_rounded_to_bf16(operation, activation, monkeypatch):
    from gdn.backends.cpu import token_step

    exact = token_step.write_strength
    monkeypatch.setattr(token_step, "write_strength", lambda b: exact(b).bfloat16().float())
    assert failures(operation, activation=activation)


def test_a_beta_of_extend_rounded_to_bf16():
    def rounded(function):
        return lambda q, k, v, g, beta, **rest: function(q, k, v, g, beta.bfloat16().float(), **rest)

    assert failures("extend", rounded)


def test_gates_rounded_in_the_gating_operation():
    def rounded(function):
        def gating(A_log, a, b, dt_bias):
            g, beta = function(A_log, a, b, dt_bias)
            return g, beta.to(b.dtype).float()

        return gating

    assert failures("gating", rounded, activation="bfloat16")


@pytest.mark.parametrize("operation", ["decode", "packed_decode", "extend"])
def test_a_transposed_state(operation):
    def transposed(function):
        def run(*args, ssm_states, **rest):
            key_dim, value_dim = ssm_states.shape[3], ssm_states.shape[2]
            square = ssm_states[..., :value_dim] if key_dim >= value_dim else ssm_states[..., :key_dim, :]
            square.copy_(square.transpose(-1, -2).clone())
            result = function(*args, ssm_states=ssm_states, **rest)
            square.copy_(square.transpose(-1, -2).clone())
            return result

        return run

    assert failures(operation, transposed)


@pytest.mark.parametrize("chunk", [63, 65, 32])
def test_an_off_by_one_chunk(chunk, monkeypatch):
    from gdn.backends.cpu import extend

    monkeypatch.setattr(extend, "CHUNK", chunk)
    assert "plain-checkpoints" in failures("extend")


def test_a_chunk_that_forgets_the_state_entering_it():
    def restarted(function):
        def extend(q, k, v, g, beta, *, ssm_states, **rest):
            result = function(q, k, v, g, beta, ssm_states=ssm_states, **rest)
            empty = torch.zeros_like(ssm_states)
            forgetful = function(q, k, v, g, beta, ssm_states=empty, **{**rest, "out": None})
            result.output[:, -1:] = forgetful.output[:, -1:]
            return result

        return extend

    assert failures("extend", restarted)


def test_the_other_head_map():
    def interleaved(function):
        def decode(q, k, v, a, b, **rest):
            ratio = v.shape[2] // k.shape[2]
            q, k = (x.repeat(1, 1, ratio, 1) for x in (q, k))
            return function(q, k, v, a, b, **rest)

        return decode

    assert failures("decode", interleaved)


def test_padding_that_falls_on_the_last_slot(monkeypatch):
    from gdn.backends.cpu import packed

    original = rows.decode_rows

    def wrapped(cache_indices, query_start_loc, tokens, slots):
        return original(cache_indices % slots if slots else cache_indices, query_start_loc, tokens, slots)

    monkeypatch.setattr(packed, "decode_rows", wrapped)
    assert "plain-padded" in failures("packed_decode")


def test_rows_of_nobody_left_unwritten(monkeypatch):
    from gdn.backends.cpu import extend

    monkeypatch.setattr(extend, "zero_other_rows", lambda out, written: None)

    def poisoned(function):
        def extend(v, **rest):
            rest["out"] = torch.full(v.shape, math.nan)
            return function(v=v, **rest)

        return extend

    assert "plain-padded" in failures("extend", poisoned)


def test_a_verify_that_writes_the_pool():
    def eager(function):
        def verify(*args, ssm_states, cache_indices, **rest):
            out = function(*args, ssm_states=ssm_states, cache_indices=cache_indices, **rest)
            for slot in cache_indices.tolist():
                if 0 <= slot < ssm_states.shape[0]:
                    ssm_states[slot].mul_(0.999)
            return out

        return verify

    assert failures("verify", eager)


def test_a_tree_verified_as_a_chain():
    def chained(function):
        return lambda *args, retrieve_parent_token, **rest: function(*args, retrieve_parent_token=None, **rest)

    assert failures("tree_verify", chained)


def test_a_write_between_two_slots():
    def spill(function):
        def decode(*args, ssm_states, **rest):
            out = function(*args, ssm_states=ssm_states, **rest)
            if ssm_states.shape[0] and ssm_states.stride(0) > ssm_states[0].numel():
                size = ssm_states[0].numel()
                ssm_states.as_strided((1,), (1,), ssm_states.storage_offset() + size).fill_(1.0)
            return out

        return decode

    assert "plain-views" in failures("decode", spill)


@pytest.mark.parametrize("operation", ["conv_extend", "conv_update"])
def test_a_convolution_one_tap_off(operation):
    def shifted(function):
        if operation == "conv_extend":
            return lambda x, weight, bias, **rest: function(x, weight.roll(1, dims=1), bias, **rest)
        return lambda weight, **rest: function(weight=weight.roll(1, dims=1), **rest)

    def by_name(function):
        if operation == "conv_extend":
            return lambda **arguments: shifted(function)(
                arguments.pop("x"), arguments.pop("weight"), arguments.pop("bias"), **arguments
            )
        return shifted(function)

    assert failures(operation, by_name)
