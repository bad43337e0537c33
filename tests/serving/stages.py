"""Small stages for the serving tests."""

from __future__ import annotations

from typing import Any

import torch

import gdn
from gdn.testing.serving import Stage

CONFIG = gdn.GdnConfig(
    num_k_heads=1,
    num_v_heads=2,
    head_k_dim=16,
    head_v_dim=24,
    activation_dtype="float32",
    max_draft_tokens=4,
    tree_drafts=True,
)


def make_stage(
    device: str = "cpu", *, layout: Any = "slot_major", slots: int = 6, layers: int = 2, **config: Any
) -> Stage:
    """A stage whose slots are full of NaN."""
    changed = CONFIG.model_copy(update={"strided_state": layout == "page_major", **config})
    stage = Stage(changed, device, slots=slots, layers=layers, layout=layout)
    for slot in range(slots):
        stage.poison(slot)
    return stage


def prefill(stage: Stage, lengths: dict[int, int], truths: dict[int, Any] | None = None) -> dict[int, Any]:
    """Extend fresh requests, or those of `truths`, by slot; check the outputs and return the simulations."""
    slots = list(lengths)
    truths = {} if truths is None else truths
    inputs = [stage.inputs(length) for length in lengths.values()]
    batch = gdn.Batch(
        slots=stage.tensor(slots),
        query_start_loc=stage.tensor([sum(list(lengths.values())[:row]) for row in range(len(slots) + 1)]),
        has_initial_state=stage.tensor([slot in truths for slot in slots], torch.bool),
    )
    got = stage.forward("extend", batch, inputs)
    after = {}
    for slot, part in zip(slots, inputs, strict=True):
        after[slot], right = truths.get(slot, stage.fresh()).after(part)
        rows, got = got[:, : lengths[slot]], got[:, lengths[slot] :]
        stage.assert_close(rows, right, f"outputs of slot {slot}")
        stage.assert_holds(slot, after[slot])
    return after


def storage(stage: Stage) -> tuple[Any, Any]:
    """Copies of everything in the slots of a pool, NaN made comparable."""
    end = stage.pool.num_slots
    return stage.pool.conv[:, :end].nan_to_num(7e7), stage.pool.recurrent[:, :end].nan_to_num(7e7)
