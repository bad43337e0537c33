"""Warm-up runs every bound operation, on tensors of its own, and says how long each took."""

import logging
from dataclasses import replace

import pytest

import gdn
from gdn.device import DeviceInfo
from gdn.errors import ConfigError

CONFIG = gdn.GdnConfig(
    num_k_heads=1, num_v_heads=2, head_k_dim=32, head_v_dim=16, max_draft_tokens=3, tree_drafts=True, replay_window=4
)


def test_every_operation_runs_once_per_batch_and_is_timed(caplog):
    triple = gdn.resolve(CONFIG, device="cpu")
    calls = []

    def counted(name, function):
        def call(**arguments):
            calls.append(name)
            return function(**arguments)

        return call

    watched = replace(triple, **{name: counted(name, function) for name, function in triple.operations().items()})
    with caplog.at_level(logging.INFO, logger="gdn.warmup"):
        seconds = watched.warmup(batches=(1, 5))
    assert sorted(calls) == sorted(list(triple.operations()) * 2)
    assert seconds.keys() == triple.operations().keys()
    assert all(second > 0 for second in seconds.values())
    for name in seconds:
        assert f"warming up {name} of cpu" in caplog.text
        assert f"{name} of cpu ready in " in caplog.text


def test_lines_go_where_the_caller_asks(caplog):
    lines = []
    with caplog.at_level(logging.INFO, logger="gdn.warmup"):
        gdn.resolve(CONFIG, device="cpu").warmup(progress=lines.append)
    assert len(lines) == 2 * 10
    assert not caplog.records


def test_a_machine_that_is_not_here_or_an_empty_batch_is_refused():
    triple = gdn.resolve(CONFIG, device="cpu")
    with pytest.raises(ConfigError, match="not a device of this host"):
        replace(triple, device=DeviceInfo.parse("sm90")).warmup()
    for batches in ((), (0,), (4, -1)):
        with pytest.raises(ConfigError, match="positive"):
            triple.warmup(batches)
