"""Captured steps: static tensors refreshed in place, replayed with other requests, against the same steps run eagerly."""

from __future__ import annotations

import pytest
import torch

import gdn
from tests.serving.stages import make_stage
from tests.serving.stages import prefill

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ROWS, DRAFTS = 5, 4
STEPS = [[1, 4, 2], [0], [4, 3, 2, 1, 0], [], [2, 0]]


def make(layout, **config):
    stage = make_stage("cuda", layout=layout, slots=9, cuda_graph=True, **config)
    return stage, prefill(stage, {slot: slot + 1 for slot in range(5)})


def captured(function):
    """The graph of `function`, warmed up and captured on padding alone."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def assert_same(captured_stage, eager_stage):
    torch.cuda.synchronize()
    for name in ("conv", "recurrent"):
        got, right = getattr(captured_stage.pool, name)[:, :9], getattr(eager_stage.pool, name)[:, :9]
        assert torch.equal(got.nan_to_num(7e7), right.nan_to_num(7e7)), name


def padded(stage, values, fill=-1):
    return stage.tensor([*values, *[fill] * (ROWS - len(values))])


@pytest.mark.parametrize("layout", ["slot_major", "page_major"])
@pytest.mark.parametrize("replay", [0, 3])
def test_decode_with_snapshots(replay, layout):
    (static, _), (eager, truths) = make(layout, replay_window=replay), make(layout, replay_window=replay)
    batch = gdn.Batch(slots=padded(static, []), snapshot_slots=padded(static, []))
    inputs = static.inputs(ROWS)
    parts = [[part.clone() for part in inputs.of_layer(index, "cuda")] for index in range(2)]

    def step():
        return [
            static.attention.forward_decode(layer, batch, *part)
            for layer, part in zip(static.parameters, parts, strict=True)
        ]

    graph, outputs = captured(step)
    for number, slots in enumerate(STEPS):
        fresh = eager.inputs(ROWS)
        for index, part in enumerate(parts):
            for tensor, value in zip(part, fresh.of_layer(index, "cuda"), strict=True):
                tensor.copy_(value)
        snapshots = [6 if number % 2 else -1] * min(1, len(slots))
        batch.refresh(slots=slots, snapshot_slots=snapshots)
        graph.replay()
        plan = gdn.Batch(slots=padded(eager, slots), snapshot_slots=padded(eager, snapshots))
        right = eager.forward("decode", plan, [fresh])
        torch.cuda.synchronize()
        assert torch.equal(torch.stack([output[0] for output in outputs]).cpu(), right)
        assert_same(static, eager)
        for row, slot in enumerate(slots):
            truths[slot] = truths[slot].after(fresh.rows([row]))[0]
            eager.assert_holds(slot, truths[slot])


@pytest.mark.parametrize("layout", ["slot_major", "page_major"])
@pytest.mark.parametrize("tree", [False, True])
def test_verify_and_commit(tree, layout):
    (static, _), (eager, truths) = make(layout), make(layout)
    links = {"retrieve_next_token": [1, 3, -1, -1], "retrieve_next_sibling": [-1, 2, -1, -1]} if tree else {}
    path = [0, 1, 3, 0] if tree else [0, 1, 2, 3]
    batch = gdn.Batch(
        slots=padded(static, []), **{name: static.tensor([[-1] * DRAFTS] * ROWS) for name in links}
    )  # fmt: skip
    accepted, nodes = padded(static, [], 0), static.tensor([path] * ROWS) if tree else None
    inputs = static.inputs(ROWS * DRAFTS)
    parts = [[part.clone() for part in inputs.of_layer(index, "cuda")] for index in range(2)]

    def step():
        outputs = [
            static.attention.forward_verify(layer, batch, *part)
            for layer, part in zip(static.parameters, parts, strict=True)
        ]
        static.attention.commit(batch, accepted, nodes)
        return outputs

    graph, outputs = captured(step)
    for number, slots in enumerate(STEPS):
        fresh = eager.inputs(ROWS * DRAFTS)
        for index, part in enumerate(parts):
            for tensor, value in zip(part, fresh.of_layer(index, "cuda"), strict=True):
                tensor.copy_(value)
        lengths = [(number + row) % (4 if tree else 5) for row in range(len(slots))]
        batch.refresh(slots=slots, **{name: [values] * len(slots) for name, values in links.items()})
        accepted.copy_(padded(static, lengths, 0))
        graph.replay()
        none = [[-1] * DRAFTS] * (ROWS - len(slots))
        plan = {name: eager.tensor([values] * len(slots) + none) for name, values in links.items()}
        eager_batch = gdn.Batch(slots=padded(eager, slots), **plan)
        right = eager.forward("verify", eager_batch, [fresh])
        eager.attention.commit(eager_batch, padded(eager, lengths, 0), nodes)
        torch.cuda.synchronize()
        assert torch.equal(torch.stack([output[0] for output in outputs]).cpu(), right)
        assert_same(static, eager)
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            drafts = fresh.rows([DRAFTS * row + node for node in path[:length]])
            truths[slot] = truths[slot].after(drafts)[0]
            eager.assert_holds(slot, truths[slot])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("layout", ["slot_major", "page_major"])
@pytest.mark.parametrize("replay", [0, 3])
def test_no_step_waits_for_the_device(replay, layout):
    stage, _ = make(layout, replay_window=replay)
    slots, one, four = stage.tensor([0, -1, 2]), stage.inputs(3), stage.inputs(12)
    batches = {
        "decode": gdn.Batch(slots=slots, snapshot_slots=stage.tensor([6, -1, -1])),
        "extend": gdn.Batch(
            slots=slots,
            query_start_loc=stage.tensor([0, 1, 1, 3]),
            has_initial_state=stage.tensor([True, False, False], torch.bool),
            snapshot_slots=stage.tensor([-1, 7, 8]),
            snapshot_lengths=stage.tensor([-1, 0, 1]),
        ),
        "verify": gdn.Batch(
            slots=slots, positions=stage.tensor([5, 5, 5]), snapshot_slots=stage.tensor([6, 7, 8]), snapshot_interval=8
        ),
    }
    inputs = {"decode": one, "extend": one, "verify": four}
    parts = {kind: [inputs[kind].of_layer(index, "cuda") for index in range(2)] for kind in batches}
    accepted = stage.tensor([4, 4, 0])

    def everything():
        for kind, batch in batches.items():
            forward = getattr(stage.attention, f"forward_{kind}")
            for layer, part in zip(stage.parameters, parts[kind], strict=True):
                forward(layer, batch, *part)
        stage.attention.commit(batches["verify"], accepted)
        stage.pool.copy(slots, slots + 6)
        stage.pool.reset(slots)

    everything()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
