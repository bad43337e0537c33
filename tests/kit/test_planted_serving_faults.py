"""The random server finds what goes wrong in serving layers: each fault is planted, and must be seen."""

from __future__ import annotations

import pytest

import gdn
from gdn.serving import decode
from gdn.serving import drafts
from gdn.serving import pool
from gdn.serving import ring
from gdn.serving import snapshots
from gdn.serving import verify
from gdn.testing.serving import Scenario

CONFIG = gdn.GdnConfig(
    num_k_heads=1,
    num_v_heads=2,
    head_k_dim=16,
    head_v_dim=24,
    activation_dtype="float32",
    max_draft_tokens=4,
    tree_drafts=True,
)


def wrapped(change):
    """A patch that hands the original's result, or its arguments, to `change`."""
    return lambda original: lambda *args, **options: change(original, *args, **options)


def without_links(plan):
    return plan._replace(next_token=None, next_sibling=None) if plan.parents is None else plan


NOTHING = wrapped(lambda original, *args, **options: None)
FAULTS = {
    "a fresh slot keeps its tenant": (pool.StatePool, "clear", NOTHING, 0),
    "a commit one step early": (
        drafts.DraftBuffers, "find", wrapped(lambda find, self, rows, steps: find(self, rows, steps - 1)), 0,
    ),
    "a commit indexed by slot": (
        pool.StatePool, "commit",
        wrapped(lambda commit, self, slots, steps, rows=None: commit(self, slots, steps, rows=slots)), 0,
    ),
    "a snapshot one chunk late": (snapshots, "CHUNK", lambda chunk: 2 * chunk, 0),
    "a chain that moves the window": (
        verify.VerifyStep, "_open",
        wrapped(lambda plan, *args: without_links(plan(*args))), 0,
    ),
    "decode snapshots are forgotten": (pool.StatePool, "move", NOTHING, 0),
    "the cursor stands still": (ring.ReplayRing, "advance", NOTHING, 4),
    "the ring of a reused slot is kept": (ring.ReplayRing, "forget", NOTHING, 4),
    "an extend that ignores the ring": (pool.StatePool, "fold", NOTHING, 4),
    "a snapshot without a flush": (
        decode.DecodeStep, "_open",
        wrapped(lambda plan, *args: (made := plan(*args))._replace(force_flush=made.force_flush * 0)), 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("replay", [0, 4])
def test_without_a_fault_nothing_is_found(replay):
    Scenario(CONFIG.model_copy(update={"replay_window": replay}), "cpu", layers=2).run(150)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_found(fault, monkeypatch):
    home, name, patch, replay = FAULTS[fault]
    monkeypatch.setattr(home, name, patch(getattr(home, name)))
    with pytest.raises(AssertionError):
        Scenario(CONFIG.model_copy(update={"replay_window": replay}), "cpu", layers=2).run(150)
