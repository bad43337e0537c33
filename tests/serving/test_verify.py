"""Verify and commit: chains and trees, every accept length, snapshots at crossed boundaries, steps that are dropped."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import gdn
from tests.serving.devices import DEVICES
from tests.serving.stages import make_stage
from tests.serving.stages import prefill
from tests.serving.stages import storage

ON_DEVICES = pytest.mark.parametrize("device", DEVICES)
LAYOUTS = pytest.mark.parametrize("layout", ["slot_major", "page_major"])

#        0          the root
#       / \
#      1   2
#      |  / \
#      3 4   5       listed in an order that mixes the branches
NEXT = [1, 3, 4, -1, -1, -1]
SIBLING = [-1, 2, -1, -1, 5, -1]
PATHS = {0: [0], 1: [0, 1], 2: [0, 2], 3: [0, 1, 3], 4: [0, 2, 4], 5: [0, 2, 5]}


def verify(stage, truths, slots, drafts, **plan):
    """A chain of drafts for each slot; checks the outputs and gives the batch and the inputs."""
    inputs = [stage.inputs(drafts) for _ in slots]
    batch = gdn.Batch(slots=stage.tensor(slots), **plan)
    got = stage.forward("verify", batch, inputs).unflatten(1, (-1, drafts))
    for row, slot in enumerate(slots):
        if slot in truths:
            stage.assert_close(got[:, row], truths[slot].after(inputs[row])[1], f"drafts of row {row}")
        else:
            assert not got[:, row].any()
    return batch, inputs


@ON_DEVICES
@LAYOUTS
@pytest.mark.parametrize("drafts", [1, 2, 4])
@pytest.mark.parametrize("rows", [None, [5, 0, 7, 3]])
def test_every_accept_length_of_a_chain(rows, drafts, layout, device):
    for accepted in range(drafts + 1):
        stage = make_stage(device, layout=layout)
        truths = prefill(stage, {4: 5, 1: 70, 2: 2})
        plan = {} if rows is None else {"rows": stage.tensor(rows)}
        batch, inputs = verify(stage, truths, [2, -1, 4, 1], drafts, **plan)
        lengths = [accepted, drafts, drafts - accepted, 0]
        stage.attention.commit(batch, stage.tensor(lengths))
        stage.assert_holds(2, truths[2].after(inputs[0].rows(slice(accepted)))[0])
        stage.assert_holds(4, truths[4].after(inputs[2].rows(slice(drafts - accepted)))[0])
        stage.assert_holds(1, truths[1])


@ON_DEVICES
def test_the_next_step_of_any_kind_goes_on_from_the_committed_one(device):
    stage = make_stage(device)
    truths = prefill(stage, {4: 5, 1: 70, 2: 2})
    batch, inputs = verify(stage, truths, [2, 4, 1], 4)
    stage.attention.commit(batch, stage.tensor([3, 1, 2]))
    truths = {
        slot: truths[slot].after(part.rows(slice(n)))[0]
        for slot, part, n in zip([2, 4, 1], inputs, [3, 1, 2], strict=True)
    }
    token = stage.inputs(1)
    truths[2], right = truths[2].after(token)
    stage.assert_close(stage.forward("decode", gdn.Batch(slots=stage.tensor([2])), [token]), right, "decode")
    prefill(stage, {4: 66}, truths)
    verify(stage, truths, [1, 2], 3)


@ON_DEVICES
@LAYOUTS
@pytest.mark.parametrize("tree", [False, True])
def test_a_verify_that_is_never_committed_leaves_the_pool_as_it_was(tree, layout, device):
    stage = make_stage(device, layout=layout, max_draft_tokens=6)
    truths = prefill(stage, {4: 5, 1: 70})
    before = storage(stage)
    links = {"retrieve_next_token": NEXT, "retrieve_next_sibling": SIBLING} if tree else {}
    plan = {name: stage.tensor([values] * 3) for name, values in links.items()}
    inputs = [stage.inputs(6) for _ in range(3)]
    batch = gdn.Batch(slots=stage.tensor([4, -1, 1]), **plan)
    first, second = (stage.forward("verify", batch, inputs) for _ in range(2))
    assert torch.equal(first, second)
    assert bool(first[:, :6].any())
    for old, new in zip(before, storage(stage), strict=True):
        assert torch.equal(old, new)
    stage.assert_holds(4, truths[4])


@ON_DEVICES
@pytest.mark.parametrize("leaf", list(PATHS))
def test_every_node_of_a_tree(leaf, device):
    stage = make_stage(device, max_draft_tokens=6)
    truths = prefill(stage, {4: 5, 1: 1})
    inputs = [stage.inputs(6), stage.inputs(6)]
    links = {"retrieve_next_token": stage.tensor([NEXT] * 2), "retrieve_next_sibling": stage.tensor([SIBLING] * 2)}
    batch = gdn.Batch(slots=stage.tensor([4, 1]), **links)
    got = stage.forward("verify", batch, inputs)
    for row, slot in enumerate((4, 1)):
        for node, path in PATHS.items():
            right = truths[slot].after(inputs[row].rows(path))[1][:, -1]
            stage.assert_close(got[:, 6 * row + node], right, f"node {node}")
    path = PATHS[leaf]
    nodes = stage.tensor([path + [0] * (6 - len(path)), PATHS[4] + [0] * 3])
    stage.attention.commit(batch, stage.tensor([len(path), 2]), nodes)
    stage.assert_holds(4, truths[4].after(inputs[0].rows(path))[0])
    stage.assert_holds(1, truths[1].after(inputs[1].rows([0, 2]))[0])


@ON_DEVICES
@LAYOUTS
@pytest.mark.parametrize("accepted", range(5))
@pytest.mark.parametrize("before", [5, 6, 7, 8, 12])
def test_a_snapshot_is_taken_where_the_accepted_tokens_cross_a_boundary(before, accepted, layout, device):
    stage = make_stage(device, layout=layout)
    truths = prefill(stage, {4: before, 1: 3})
    plan = {"positions": [before, 3, 7, 7], "snapshot_slots": [0, 3, 5, 2]}
    tensors = {name: stage.tensor(values) for name, values in plan.items()}
    batch, inputs = verify(stage, truths, [4, 1, -1, 6], 4, snapshot_interval=8, **tensors)
    stage.attention.commit(batch, stage.tensor([accepted, 4, 4, 4]))
    stage.assert_holds(4, truths[4].after(inputs[0].rows(slice(accepted)))[0])
    if before // 8 != (before + accepted) // 8:
        stage.assert_holds(0, truths[4].after(inputs[0].rows(slice(-before % 8)))[0])
    else:
        assert bool(stage.pool.recurrent[:, 0].isnan().all())
    for nobody in (2, 3, 5):
        assert bool(stage.pool.recurrent[:, nobody].isnan().all())
        assert bool(stage.pool.conv[:, nobody].isnan().all())


@ON_DEVICES
def test_a_boundary_on_the_path_of_a_tree(device):
    stage = make_stage(device, max_draft_tokens=6)
    truth = prefill(stage, {4: 6})[4]
    links = {"retrieve_next_token": stage.tensor([NEXT]), "retrieve_next_sibling": stage.tensor([SIBLING])}
    plan = {"positions": stage.tensor([6]), "snapshot_slots": stage.tensor([0])}
    batch, inputs = gdn.Batch(slots=stage.tensor([4]), snapshot_interval=8, **links, **plan), stage.inputs(6)
    stage.forward("verify", batch, [inputs])
    stage.attention.commit(batch, stage.tensor([3]), stage.tensor([[0, 2, 5, 0, 0, 0]]))
    stage.assert_holds(0, truth.after(inputs.rows([0, 2]))[0])
    stage.assert_holds(4, truth.after(inputs.rows([0, 2, 5]))[0])


@ON_DEVICES
def test_empty_batch(device):
    stage = make_stage(device)
    batch = gdn.Batch(slots=stage.tensor([]))
    before = storage(stage)
    assert stage.forward("verify", batch, []).shape == (2, 0, 2, 24)
    stage.attention.commit(batch, stage.tensor([]))
    for old, new in zip(before, storage(stage), strict=True):
        assert torch.equal(old, new)


def test_what_does_not_fit_is_named():
    stage = make_stage(slots=3)
    with pytest.raises(gdn.InputError, match="3 requests times 1 to max_draft_tokens=4 drafts, got 7"):
        stage.forward("verify", gdn.Batch(slots=stage.tensor([0, 1, 2])), [stage.inputs(7)])
    with pytest.raises(gdn.InputError, match="max_draft_tokens=4 drafts, got 5"):
        stage.forward("verify", gdn.Batch(slots=stage.tensor([0])), [stage.inputs(5)])
    with pytest.raises(gdn.InputError, match="at most max_requests=5 requests, got 6"):
        stage.forward("verify", gdn.Batch(slots=stage.tensor([-1] * 6)), [stage.inputs(6)])
    batch = gdn.Batch(slots=stage.tensor([0]), snapshot_slots=stage.tensor([1]), snapshot_interval=8)
    with pytest.raises(gdn.InputError, match="positions: expected"):
        stage.attention.commit(batch, stage.tensor([0]))
    pool = gdn.StatePool(stage.config, 3, "cpu", num_layers=2)
    stage.attention = gdn.GdnAttention(stage.attention.triple, pool)
    with pytest.raises(gdn.ConfigError, match="max_requests >= 1"):
        stage.forward("verify", gdn.Batch(slots=stage.tensor([0])), [stage.inputs(1)])


def test_a_tree_that_nobody_verifies_is_refused():
    stage = make_stage()
    triple = dataclasses.replace(stage.attention.triple, tree_verify=None)
    stage.attention = gdn.GdnAttention(triple, stage.pool)
    links = {"retrieve_next_token": stage.tensor([[-1]]), "retrieve_next_sibling": stage.tensor([[-1]])}
    with pytest.raises(gdn.InputError, match="no backend of this triple verifies trees"):
        stage.forward("verify", gdn.Batch(slots=stage.tensor([0]), **links), [stage.inputs(1)])
