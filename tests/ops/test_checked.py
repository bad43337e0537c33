"""Value checks: what the operations take as it comes, a checked triple refuses by name."""

from __future__ import annotations

import pytest
import torch

import gdn
from gdn.testing.calls import build_call
from gdn.testing.case import Case

CASE = Case(lengths=(2, 1, 3), pool_slots=6, slots=(4, 0, 2), drafts=3)


@pytest.fixture(scope="module")
def triple():
    config = CASE.config(replay_window=4, max_draft_tokens=3, tree_drafts=True)
    return gdn.resolve(config, device="cpu").checked()


def arguments(operation, **changes):
    return {**build_call(operation, CASE, seed=0).arguments, **changes}


def test_good_values_pass(triple):
    for operation, function in triple.operations().items():
        function(**arguments(operation))


@pytest.mark.parametrize(
    ("operation", "name", "value", "message"),
    [
        ("decode", "cache_indices", [4, 6, 2], r"slot in \[0, 6\), got 6"),
        ("decode", "cache_indices", [4, -2, 2], "got -2"),
        ("packed_decode", "cache_indices", [1, 6947, 2], "got 6947"),
        ("decode", "cache_indices", [4, 4, -1], "slot 4 twice"),
        ("replay_decode", "replayssm_write_pos", [0, 4, 1], r"\[0, L=4\), got 4"),
        ("extend", "query_start_loc", [0, 3, 2, 6], "never decrease"),
        ("extend", "query_start_loc", [1, 2, 3, 6], "0 as its first value"),
        ("extend", "query_start_loc", [0, 2, 3, 7], "at most T=6"),
        ("extend", "cache_indices", [1, 1, 2], "slot 1 twice"),
        ("verify", "query_start_loc", [0, 0, 0, 6], "cache_steps=3, got 6"),
        ("verify", "intermediate_state_indices", [0, 0, 1], "row 0 twice"),
        ("verify", "intermediate_state_indices", [0, 9, 1], "got 9"),
        ("conv_extend", "cache_indices", [0, 1, 66], "got 66"),
        ("conv_update", "conv_state_indices", [0, 0, 1], "slot 0 twice"),
    ],
)
def test_meaningless_values_are_refused(triple, operation, name, value, message):
    changes = {name: torch.tensor(value, dtype=torch.int32)}
    with pytest.raises(gdn.InputError, match=f"{name}: .*{message}"):
        getattr(triple, operation)(**arguments(operation, **changes))


def test_case_52_a_linear_decay_passed_as_g_is_refused(triple):
    good = arguments("extend")
    with pytest.raises(gdn.InputError, match="g: expected log decays"):
        triple.extend(**{**good, "g": good["g"].exp()})


def test_a_beta_that_is_no_share_is_refused(triple):
    good = arguments("extend")
    with pytest.raises(gdn.InputError, match="beta"):
        triple.extend(**{**good, "beta": good["beta"] + 1})


@pytest.mark.parametrize("parents", [[0, 1, 0], [0, 0, 2], [0, -1, 0]])
def test_parents_come_first(triple, parents):
    call = arguments("tree_verify", retrieve_parent_token=torch.tensor([parents] * 3))
    call["query_start_loc"] = torch.tensor([0, 0, 3, 6])
    with pytest.raises(gdn.InputError, match="retrieve_parent_token: expected an earlier draft"):
        triple.tree_verify(**call)


def test_host_lengths_agree_with_offsets(triple):
    with pytest.raises(gdn.InputError, match="seq_lens_cpu"):
        triple.extend(**arguments("extend", seq_lens_cpu=[2, 2, 2]))


@pytest.mark.parametrize(
    ("chunks", "slots", "message"),
    [([2, -1, -1], [1, 3, 5], "chunk"), ([1, -1, -1], [4, 3, 5], "slot 4"), ([1, 1, 0], [1, 1, 5], "slot 1 twice")],
)
def test_snapshots_make_sense(triple, chunks, slots, message):
    changes = {"snapshot_chunks": torch.tensor(chunks), "snapshot_slots": torch.tensor(slots)}
    with pytest.raises(gdn.InputError, match=f"snapshot_.*{message}"):
        triple.extend(**arguments("extend", **changes))


def test_refused_calls_write_nothing(triple):
    call = arguments("decode", cache_indices=torch.tensor([0, 0, 1]))
    before = call["ssm_states"].clone()
    with pytest.raises(gdn.InputError):
        triple.decode(**call)
    assert torch.equal(call["ssm_states"].nan_to_num(9), before.nan_to_num(9))
