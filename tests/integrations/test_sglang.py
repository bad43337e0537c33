"""The object for SGLang: the interface that its wheel declares, and results of the triple behind it."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

import gdn
from gdn.testing.calls import build_call
from gdn.testing.case import Case
from gdn.testing.compare import assert_matches

torch = pytest.importorskip("torch")

from gdn.integrations.sglang import GdnKernelDispatcher  # noqa: E402

SGLANG = json.loads((Path(__file__).parent / "sglang_interface.json").read_text())
PLAIN = Case(lengths=(1, 1, 1), scale=0.3)
SEED = ("packed_decode", "decode", "extend", "target_verify")


def dispatcher(**options):
    return GdnKernelDispatcher(gdn.resolve(PLAIN.config(**options), device="cpu"))


def parameters(method):
    return inspect.signature(getattr(GdnKernelDispatcher, method)).parameters


@pytest.mark.parametrize("kind", ["kernel", "dispatcher"])
def test_every_declared_method_has_its_parameters_by_name_and_order(kind):
    declared = {k: v for k, v in SGLANG[kind].items() if k in SEED}
    assert declared
    for method, names in declared.items():
        ours = parameters(method)
        assert list(ours)[1 : 1 + len(names["positional"])] == names["positional"]
        assert set(names["keyword"]) <= set(ours)


def test_every_call_of_sglang_is_accepted():
    assert {name for name, _ in SGLANG["calls"]} >= set(SEED)
    for method, keywords in SGLANG["calls"]:
        if method in SEED:
            assert set(keywords) <= set(parameters(method)), method


def test_everything_that_sglang_reads_is_there():
    ours = dispatcher()
    missing = [name for name in (*SGLANG["read"], *SGLANG["kernel_flags"]) if not hasattr(ours, name)]
    assert not missing


def test_decode_matches_the_reference():
    case = PLAIN.but(scale=None, offsets=True, lengths=(1, 0, 1), tail=1)
    call = build_call("decode", case, seed=0)
    call.arguments.pop("scale")
    assert_matches(dispatcher().decode, call)


def test_packed_decode_matches_the_reference():
    call = build_call("packed_decode", PLAIN, seed=0)
    call.arguments.update(num_v_heads=PLAIN.heads.HV, head_v_dim=PLAIN.heads.V)
    assert dispatcher().supports_packed_decode
    assert_matches(dispatcher().packed_decode, call)


def test_a_ring_goes_to_replay_decode():
    call = build_call("replay_decode", PLAIN.but(forced=(0, 1, 0)), seed=0)
    call.arguments.update(num_v_heads=PLAIN.heads.HV, head_v_dim=PLAIN.heads.V)
    assert_matches(dispatcher(replay_window=4).packed_decode, call)


def test_without_packed_decode_it_says_so_and_returns_none():
    from dataclasses import replace

    triple = replace(dispatcher().triple, packed_decode=None, replay_decode=None)
    call = build_call("packed_decode", PLAIN, seed=0)
    call.arguments.update(num_v_heads=PLAIN.heads.HV, head_v_dim=PLAIN.heads.V)
    ours = GdnKernelDispatcher(triple)
    assert not ours.supports_packed_decode
    assert ours.packed_decode(**call.arguments) is None
    ring = {f"replayssm_{name}": call.arguments["a"] for name in ("d", "k", "g", "write_pos")}
    with pytest.raises(gdn.ConfigError, match="replay_window"):
        ours.packed_decode(**call.arguments, **ring)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_extend_returns_output_none_and_chunk_states(checkpoints):
    case = PLAIN.but(lengths=(70, 0, 5), chunk_states=checkpoints, scale=None)
    call = build_call("extend", case, seed=0)
    ours = dispatcher(state_checkpoints=checkpoints)

    def extend(*, scale=None, return_chunk_states=False, **arguments):
        output, final_state, chunk_states = ours.extend(**arguments)
        return gdn.ExtendResult(output, final_state, chunk_states)

    assert_matches(extend, call)
    assert extend(**call.copy().arguments).final_state is None


@pytest.mark.parametrize("tree", [False, True])
def test_target_verify_takes_index_tables_longer_than_the_batch(tree):
    case = PLAIN.but(lengths=(4, 4, 4), drafts=4, scale=None, tree=tree)
    call = build_call("tree_verify" if tree else "verify", case, seed=0)
    ours = dispatcher(max_draft_tokens=4)

    def verify(*, scale=None, **arguments):
        for name in ("cache_indices", "intermediate_state_indices"):
            arguments[name] = torch.nn.functional.pad(arguments[name], (0, 5), value=1)
        return ours.target_verify(**arguments)

    assert_matches(verify, call)


@pytest.mark.parametrize(
    "wish", [{"track_state": 1}, {"num_state_checkpoints": 2}, {"inplace_update": False}, {"track_chunk_idx": 1}]
)
def test_features_that_gdn_lacks_are_refused_where_they_are_set(wish):
    call = build_call("extend", PLAIN.but(scale=None), seed=0)
    arguments = {k: v for k, v in call.arguments.items() if k not in ("scale", "return_chunk_states")}
    with pytest.raises(gdn.InputError, match=next(iter(wish))):
        dispatcher().extend(**arguments, **wish)
    with pytest.raises(TypeError, match="unheard_of"):
        dispatcher().extend(**arguments, unheard_of=1)
