"""Extend steps: prefill in one piece and in several, fresh slots, snapshots at chunk boundaries."""

from __future__ import annotations

import itertools

import pytest
import torch

import gdn
from gdn.serving import extend
from tests.serving.devices import DEVICES
from tests.serving.stages import make_stage
from tests.serving.stages import prefill
from tests.serving.stages import storage

ON_DEVICES = pytest.mark.parametrize("device", DEVICES)
LAYOUTS = pytest.mark.parametrize("layout", ["slot_major", "page_major"])


@ON_DEVICES
@LAYOUTS
@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 70])
def test_a_fresh_request_starts_from_zero_in_a_slot_full_of_nan(length, layout, device):
    prefill(make_stage(device, layout=layout), {3: length, 0: 65})


@ON_DEVICES
@LAYOUTS
@pytest.mark.parametrize("cuts", [(0, 130), (1, 129), (64, 66), (63, 2, 65), (2, 0, 1, 127), (130, 0)])
def test_a_prompt_in_parts_is_the_whole_prompt(cuts, layout, device):
    stage = make_stage(device, layout=layout)
    inputs, truth = stage.inputs(130), stage.fresh()
    whole, right = truth.after(inputs)
    outputs, begin = [], 0
    for part in cuts:
        batch = gdn.Batch(
            slots=stage.tensor([-1, 2]),
            query_start_loc=stage.tensor([0, 0, part]),
            has_initial_state=stage.tensor([False, begin > 0 or len(outputs) > 0], torch.bool),
        )
        outputs.append(stage.forward("extend", batch, [inputs.rows(slice(begin, begin + part))]))
        begin += part
    stage.assert_close(torch.cat(outputs, dim=1), right, "outputs")
    stage.assert_holds(2, whole)


@ON_DEVICES
def test_decode_rows_and_prompts_in_one_step(device):
    stage = make_stage(device)
    truths = prefill(stage, {4: 5, 1: 70})
    prefill(stage, {4: 1, 0: 66, 1: 1, 2: 1}, truths)


@ON_DEVICES
def test_padding_and_tokens_after_the_last_request(device):
    stage = make_stage(device)
    truth = prefill(stage, {4: 5})[4]
    inputs, rest = stage.inputs(3), stage.inputs(6)
    rest.x.fill_(torch.nan)
    before = storage(stage)
    batch = gdn.Batch(
        slots=stage.tensor([-1, 4, 6]),
        query_start_loc=stage.tensor([0, 2, 5, 6]),
        has_initial_state=stage.tensor([False, True, False], torch.bool),
    )
    got = stage.forward("extend", batch, [rest.rows(slice(0, 2)), inputs, rest.rows(slice(2, 6))])
    after, right = truth.after(inputs)
    stage.assert_close(got[:, 2:5], right, "outputs")
    assert not got[:, [0, 1, 5, 6, 7, 8]].any()
    stage.assert_holds(4, after)
    for old, new in zip(before, storage(stage), strict=True):
        assert torch.equal(old[:, [0, 1, 2, 3, 5]], new[:, [0, 1, 2, 3, 5]])


@ON_DEVICES
@pytest.mark.parametrize("requests", [0, 2])
def test_a_step_without_tokens(requests, device):
    stage = make_stage(device)
    batch = gdn.Batch(
        slots=stage.tensor([1, 2][:requests]),
        query_start_loc=stage.tensor([0] * (requests + 1)),
        has_initial_state=stage.tensor([False, True][:requests], torch.bool),
        snapshot_slots=stage.tensor([3, -1][:requests]),
        snapshot_lengths=stage.tensor([0, -1][:requests]),
    )
    assert stage.forward("extend", batch, []).shape == (2, 0, 2, 24)
    if requests:
        stage.assert_holds(1, stage.fresh())
        stage.assert_holds(3, stage.fresh())
        assert bool(stage.pool.conv[:, 2].isnan().all())


@ON_DEVICES
@LAYOUTS
@pytest.mark.parametrize("history", [0, 1, 70])
@pytest.mark.parametrize(
    ("length", "at"), [*itertools.product([131], [0, 2, 63, 64, 100, 128, 131]), (128, 128), (64, 64), (1, 1), (1, 0)]
)
def test_a_snapshot_lies_at_the_last_chunk_boundary(length, at, history, layout, device):
    stage = make_stage(device, layout=layout)
    truth = prefill(stage, {4: history})[4] if history else stage.fresh()
    inputs, other = stage.inputs(length), stage.inputs(66)
    batch = gdn.Batch(
        slots=stage.tensor([2, 4, -1]),
        query_start_loc=stage.tensor([0, 66, 66 + length, 66 + length]),
        has_initial_state=stage.tensor([False, history > 0, True], torch.bool),
        snapshot_slots=stage.tensor([-1, 0, 1]),
        snapshot_lengths=stage.tensor([64, at, 0]),
    )
    stage.forward("extend", batch, [other, inputs])
    stage.assert_holds(0, truth.after(inputs.rows(slice(at // 64 * 64)))[0])
    stage.assert_holds(4, truth.after(inputs)[0])
    stage.assert_holds(2, stage.fresh().after(other)[0])
    assert bool(stage.pool.recurrent[:, 1].isnan().all())
    assert bool(stage.pool.conv[:, 1].isnan().all())


@pytest.mark.parametrize("at", [-1, 71])
def test_a_snapshot_outside_the_tokens_is_none(at):
    stage = make_stage()
    batch = gdn.Batch(
        slots=stage.tensor([2]),
        query_start_loc=stage.tensor([0, 70]),
        has_initial_state=stage.tensor([False], torch.bool),
        snapshot_slots=stage.tensor([0]),
        snapshot_lengths=stage.tensor([at]),
    )
    stage.forward("extend", batch, [stage.inputs(70)])
    assert bool(stage.pool.recurrent[:, 0].isnan().all())
    assert bool(stage.pool.conv[:, 0].isnan().all())


@ON_DEVICES
def test_a_snapshot_of_16_bit_activations_is_the_fp32_state(device):
    stage = make_stage(device, activation_dtype="bfloat16")
    inputs = stage.inputs(130)
    for slot, length, at in ((1, 64, -1), (2, 130, 64)):
        batch = gdn.Batch(
            slots=stage.tensor([slot]),
            query_start_loc=stage.tensor([0, length]),
            has_initial_state=stage.tensor([False], torch.bool),
            snapshot_slots=stage.tensor([3]),
            snapshot_lengths=stage.tensor([at]),
        )
        stage.forward("extend", batch, [inputs.rows(slice(length))])
    final, snapshot = stage.pool.recurrent[:, 1], stage.pool.recurrent[:, 3]
    assert not torch.equal(final, final.bfloat16().float())
    torch.testing.assert_close(snapshot, final, rtol=1e-5, atol=1e-6)
    assert torch.equal(stage.pool.conv[:, 1], stage.pool.conv[:, 3])


@ON_DEVICES
def test_resuming_a_snapshot_is_the_straight_run(device):
    stage = make_stage(device)
    inputs = stage.inputs(200)
    batch = gdn.Batch(
        slots=stage.tensor([1]),
        query_start_loc=stage.tensor([0, 200]),
        has_initial_state=stage.tensor([False], torch.bool),
        snapshot_slots=stage.tensor([3]),
        snapshot_lengths=stage.tensor([150]),
    )
    straight = stage.forward("extend", batch, [inputs])
    stage.pool.copy([3, 3], [0, 2])
    batch = gdn.Batch(slots=stage.tensor([2, 0]), query_start_loc=stage.tensor([0, 72, 144]))
    resumed = stage.forward("extend", batch, [inputs.rows(slice(128, 200))] * 2)
    for half in (resumed[:, :72], resumed[:, 72:]):
        torch.testing.assert_close(half, straight[:, 128:], rtol=1e-4, atol=1e-5)


def test_without_the_fused_split_views_do():
    stage = make_stage()
    stage.attention._extend._split = None
    prefill(stage, {3: 70, 0: 5})


def test_what_a_batch_lacks_is_named(monkeypatch):
    stage = make_stage()
    with pytest.raises(gdn.InputError, match=r"query_start_loc: expected \[N\+1\]"):
        stage.forward("extend", gdn.Batch(slots=stage.tensor([0])), [stage.inputs(1)])
    batch = gdn.Batch(slots=stage.tensor([0]), query_start_loc=stage.tensor([0, 1]), snapshot_slots=stage.tensor([1]))
    with pytest.raises(gdn.InputError, match="snapshot_lengths: expected"):
        stage.forward("extend", batch, [stage.inputs(1)])
    row = extend.chosen_row(stage.attention.triple, "extend").model_copy(update={"state_checkpoints": False})
    monkeypatch.setattr(extend, "chosen_row", lambda *_: row)
    stage.attention = gdn.GdnAttention(stage.attention.triple, stage.pool)
    batch.snapshot_lengths = stage.tensor([0])
    with pytest.raises(gdn.ConfigError, match="state_checkpoints=True"):
        stage.forward("extend", batch, [stage.inputs(1)])
