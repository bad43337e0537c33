"""A thousand steps of a random server, each compared with an fp64 simulation of every request."""

from __future__ import annotations

import pytest

import gdn
from gdn.testing.serving import Scenario
from tests.serving.devices import DEVICES

STEPS = 1000
CONFIG = gdn.GdnConfig(
    num_k_heads=1,
    num_v_heads=2,
    head_k_dim=16,
    head_v_dim=24,
    activation_dtype="float32",
    max_draft_tokens=5,
    tree_drafts=True,
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("replay", [0, 4])
@pytest.mark.parametrize("layout", ["slot_major", "page_major"])
def test_every_step_agrees_with_the_simulation(layout, replay, device):
    config = CONFIG.model_copy(update={"replay_window": replay, "strided_state": layout == "page_major"})
    scenario = Scenario(config, device, layout=layout, seed=replay)
    scenario.run(STEPS)
    happened = {"extend", "decode", "verify", "evict", "resumed", "chain", "tree", "dropped verify"}
    happened |= {"extend snapshots", "decode snapshots", "commit snapshots"}
    assert min(scenario.done.get(what, 0) for what in happened) >= 10, scenario.done
