"""Decode steps: every path a triple may bind, the replay ring's cursor, snapshots, padding."""

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


def decode(stage, truths, slots, **plan):
    """One step for `slots`; simulations after it. Slots without a simulation are padding."""
    inputs = [stage.inputs(1) for _ in slots]
    got = stage.forward("decode", gdn.Batch(slots=stage.tensor(slots), **plan), inputs)
    after = dict(truths)
    for row, slot in enumerate(slots):
        if slot in truths:
            after[slot], right = truths[slot].after(inputs[row])
            stage.assert_close(got[:, row : row + 1], right, f"row {row}")
            stage.assert_holds(slot, after[slot])
        else:
            assert not got[:, row].any()
    return after


@ON_DEVICES
@LAYOUTS
def test_rows_of_requests_and_of_padding(layout, device):
    stage = make_stage(device, layout=layout)
    truths = prefill(stage, {4: 5, 1: 70})
    before = storage(stage)
    truths = decode(stage, truths, [-1, 1, 6, 4, 1000])
    decode(stage, truths, [4])
    for old, new in zip(before, storage(stage), strict=True):
        assert torch.equal(old[:, [0, 2, 3, 5]], new[:, [0, 2, 3, 5]])


@ON_DEVICES
def test_without_packed_decode_the_split_path_gives_the_same(device):
    stage = make_stage(device)
    truths = prefill(stage, {4: 5, 1: 70})
    triple = dataclasses.replace(stage.attention.triple, packed_decode=None)
    stage.attention = gdn.GdnAttention(triple, stage.pool)
    decode(stage, truths, [1, -1, 4])


@ON_DEVICES
@pytest.mark.parametrize("replay", [0, 4])
def test_an_empty_batch_and_one_of_padding_only(replay, device):
    stage = make_stage(device, replay_window=replay)
    before = storage(stage)
    assert stage.forward("decode", gdn.Batch(slots=stage.tensor([])), []).shape == (2, 0, 2, 24)
    decode(stage, {}, [-1, 9], snapshot_slots=stage.tensor([0, 1]))
    for old, new in zip(before, storage(stage), strict=True):
        assert torch.equal(old, new)


@ON_DEVICES
@LAYOUTS
@pytest.mark.parametrize("replay", [0, 4])
def test_a_snapshot_is_the_state_after_the_step(replay, layout, device):
    stage = make_stage(device, layout=layout, replay_window=replay)
    truths = decode(stage, prefill(stage, {4: 5, 1: 3}), [4, 1])
    truths = decode(stage, truths, [4, 1, -1], snapshot_slots=stage.tensor([0, -1, 2]))
    stage.assert_holds(0, truths[4])
    assert bool(stage.pool.recurrent[:, 2].isnan().all())
    if replay:
        assert stage.pool.ring.cursors[[0, 1, 4]].tolist() == [0, 2, 0]
    decode(stage, {0: truths[4], **truths}, [0, 4, 1])


@ON_DEVICES
def test_the_cursor_moves_once_a_step_and_wraps_at_the_flush(device):
    stage = make_stage(device, layers=3, replay_window=3)
    truths, seen = prefill(stage, {4: 5, 1: 3}), []
    for step in range(7):
        truths = decode(stage, truths, [4] if step == 3 else [1, -1, 4])
        seen.append(stage.pool.ring.cursors[[4, 1]].tolist())
    assert seen == [[1, 1], [2, 2], [0, 0], [1, 0], [2, 1], [0, 2], [1, 0]]


@ON_DEVICES
def test_the_ring_of_a_reused_slot_starts_empty(device):
    stage = make_stage(device, replay_window=4)
    truths = decode(stage, prefill(stage, {4: 5}), [4])
    truths = decode(stage, truths, [4])
    assert int(stage.pool.ring.cursors[4]) == 2
    decode(stage, prefill(stage, {4: 3}), [4])
    stage.pool.reset(4)
    decode(stage, {4: stage.fresh()}, [4])


@ON_DEVICES
def test_decode_rows_whose_ring_is_full_of_updates_extend_and_verify_from_their_live_state(device):
    stage = make_stage(device, replay_window=4)
    truths = decode(stage, prefill(stage, {4: 5, 1: 3}), [4, 1])
    truths |= prefill(stage, {4: 1, 2: 7}, truths)
    truths = decode(stage, truths, [4, 1])
    inputs = [stage.inputs(2)]
    batch = gdn.Batch(slots=stage.tensor([1]))
    got = stage.forward("verify", batch, inputs)
    after, right = truths[1].after(inputs[0])
    stage.assert_close(got, right, "drafts")
    stage.assert_holds(1, truths[1])
    stage.attention.commit(batch, stage.tensor([2]))
    stage.assert_holds(1, after)


def test_out_is_written_and_returned():
    stage = make_stage()
    prefill(stage, {4: 5})
    x, a, b = stage.inputs(1).of_layer(0, "cpu")
    out = torch.full((1, 1, 2, 24), torch.nan)
    batch = gdn.Batch(slots=stage.tensor([4]))
    assert stage.attention.forward_decode(stage.parameters[0], batch, x, a, b, out=out) is out
    assert bool(out.isfinite().all())
