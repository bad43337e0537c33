"""CUDA graphs: capture once, replay with other slots, lengths and padding; replay must equal the eager call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gdn.testing.calls import WRITTEN
from gdn.testing.calls import Call
from gdn.testing.calls import build_call
from gdn.testing.case import Case
from gdn.testing.case import Heads
from gdn.testing.harness import Harness
from gdn.types import Operation

_WIDE = Heads(2, 4, 128, 128)


class GraphCapture(Harness):
    """For rows that declare `cuda_graph`."""

    def test_case_32_graph_replay_equals_eager(self, operation: Operation) -> None:
        if not self.torch_device().startswith("cuda"):
            pytest.skip(f"CUDA graphs need a GPU, this is {self.device_info()}")
        captured, *replays = (self.fitted(operation, case) or case for case in _cases(operation))
        function = self.bind(operation, captured.config(cuda_graph=True))
        if function is None:
            pytest.skip(f"{self.backend} declares no {operation} that can be captured")
        static = build_call(operation, captured, seed=0, device=self.torch_device())
        function(**static.copy().arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = function(**static.arguments)
        for seed, case in enumerate(replays, start=1):
            fresh = build_call(operation, case, seed=seed, device=self.torch_device())
            eager = fresh.copy()
            _refill(static, fresh)
            graph.replay()
            expected = function(**eager.arguments)
            torch.cuda.synchronize()
            for got, right in zip(_tensors(result), _tensors(expected), strict=True):
                assert torch.equal(got, right), case
            for name in WRITTEN & static.arguments.keys():
                got, right = static.arguments[name], eager.arguments[name]
                if got is not None:
                    assert torch.equal(got.nan_to_num(7e7), right.nan_to_num(7e7)), (name, case)


def _refill(static: Call, fresh: Call) -> None:
    """Write another call's values into the tensors that the graph reads."""
    for name, value in fresh.arguments.items():
        if isinstance(value, torch.Tensor):
            static.arguments[name].copy_(value)


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    yield from (part for part in (result if isinstance(result, tuple) else (result,)) if part is not None)


def _cases(operation: Operation) -> Iterator[Case]:
    """The captured case, then cases of the same shapes: the same rows, fewer rows, then all again."""
    plain = Case("graph", heads=_WIDE, activation="bfloat16", pool_slots=24, lengths=(1,) * 8, drafts=4)
    plain = plain.but(slots=(3, 1, 4, 15, 9, 2, 6, 5))
    padded = plain.but("padded", slots=(8, 1, 20, 15, 9, -1, -1, -1))
    if operation in ("extend", "conv_extend"):
        yield plain.but(lengths=(64, 1, 0, 130, 5, 0, 0, 0))
        yield padded.but(lengths=(1, 128, 65, 3, 3, 0, 0, 0))
        yield plain.but(lengths=(200, 0, 0, 0, 0, 0, 0, 0))
        yield padded.but(lengths=(0, 90, 0, 10, 0, 0, 0, 0), tail=100)
        return
    if operation in ("verify", "tree_verify"):
        yield plain.but(lengths=(4,) * 8)
        yield padded.but(lengths=(4, 4, 4, 4, 4, 0, 0, 0), tail=12)
        yield plain.but(lengths=(4, 1, 3, 4, 2, 4, 4, 4), tail=6)
        return
    if operation in ("gating", "qkv_split"):
        yield from (plain.but(lengths=(9,)),) * 3
        return
    yield plain
    yield padded
    yield plain.but(slots=(5, 1, 2, 3, 4, 6, 8, 7))
