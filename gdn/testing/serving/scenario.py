"""A server in small: requests come, are prefilled in chunks, decode, verify drafts, share prefixes, leave.

Every step goes through `GdnAttention` and, request by request, through `Truth`. After it, outputs, states and windows
of every request and snapshot must agree, and slots that nobody holds must be as they were: full of NaN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any
from typing import Final
from typing import Literal

import torch

from gdn.config import GdnConfig
from gdn.serving.batch import Batch
from gdn.testing.serving.stage import Stage
from gdn.testing.serving.stage import live_states
from gdn.testing.serving.truth import Inputs
from gdn.testing.serving.truth import Truth
from gdn.types import CHUNK

if TYPE_CHECKING:
    from torch import Tensor

_LENGTHS: Final = (0, 1, 1, 2, 3, 4, 63, 64, 65, 128, 130)
_INTERVAL: Final = 8
"""Tokens between the prefix snapshots of decode and commit."""
_Kind = Literal["admit", "extend", "decode", "verify", "evict"]


@dataclass
class Held:
    """A slot that a request or a snapshot holds. `fresh`: nothing was written there for it yet."""

    truth: Truth
    fresh: bool = False


class Scenario(Stage):
    """A random schedule; arguments as of `Stage`. `config` with `max_draft_tokens` >= 1 gets verify steps, with
    `tree_drafts` some of trees.

    Attributes:
        requests, snapshots: who holds which slot.
        padding: slots of rows that are nobody's.
        done: steps of each kind, and of what happened in them, so that a test can see that nothing was left out.
    """

    def __init__(self, config: GdnConfig, device: Any, *, seed: int = 0, **options: Any) -> None:
        super().__init__(config, device, seed=seed, **options)
        self.random = random.Random(seed)
        self.requests: dict[int, Held] = {}
        self.snapshots: dict[int, Held] = {}
        self.done: dict[str, int] = {}
        self.padding = (-1, self.pool.num_slots)
        for slot in range(self.pool.num_slots):
            self.poison(slot)

    def run(self, steps: int) -> None:
        """Take random steps and check everything after each.

        Raises:
            AssertionError: the serving layer and the simulation disagree; the text says where.
        """
        for _ in range(steps):
            kind = self._next_kind()
            getattr(self, f"_{kind}")()
            self._count(kind)
            self.check()

    def check(self) -> None:
        """Compare every slot of the pool with what it must hold."""
        state, conv = live_states(self.pool), self.pool.conv.cpu()
        for slot in range(self.pool.num_slots):
            held = self.requests.get(slot) or self.snapshots.get(slot)
            if held is None:
                assert bool(state[:, slot].isnan().all()), f"slot {slot} is free and its states were written"
                assert bool(conv[:, slot].isnan().all()), f"slot {slot} is free and its windows were written"
            elif not held.fresh:
                self.assert_close(state[:, slot], held.truth.state, f"state of slot {slot}")
                self.assert_close(conv[:, slot], held.truth.window, f"window of slot {slot}")

    def _next_kind(self) -> _Kind:
        kinds: dict[_Kind, int] = {"extend": 3, "decode": 4, "evict": 1, "admit": 3}
        if self.config.max_draft_tokens:
            kinds["verify"] = 4
        return self.random.choices(list(kinds), list(kinds.values()))[0]

    def _admit(self) -> None:
        """A fresh request, or one that resumes a snapshot: a prefix that several may share."""
        slot = self._acquire()
        if slot is None:
            return
        others = [other for other in self.snapshots if other != slot]
        if others and self.random.random() < 0.5:
            source = self.random.choice(others)
            self.pool.copy(source, slot)
            self.requests[slot] = Held(self.snapshots[source].truth)
            self._count("resumed")
        else:
            self.requests[slot] = Held(self.fresh(), fresh=True)

    def _evict(self) -> None:
        """A request leaves; its state may stay behind as a snapshot in another slot."""
        if not self.requests:
            return
        slot = self.random.choice(list(self.requests))
        if not self.requests[slot].fresh and self.random.random() < 0.5:
            kept = self._acquire()
            if kept is not None:
                self.pool.copy([slot, -1], [kept, slot])
                self.snapshots[kept] = Held(self.requests[slot].truth)
        del self.requests[slot]
        self._free(slot)

    def _extend(self) -> None:
        slots = self._batch_slots(fresh=True)
        lengths = [self.random.choice(_LENGTHS) for _ in slots]
        inputs = [self._inputs(length, slot) for slot, length in zip(slots, lengths, strict=True)]
        plan = [(-1, -1)] * len(slots)
        for row, slot in enumerate(slots):
            if slot in self.requests and self.random.random() < 0.3 and (target := self._acquire()) is not None:
                plan[row] = (target, self.random.choice((0, lengths[row], self.random.randint(0, lengths[row]))))
        batch = Batch(
            slots=self.tensor(slots),
            query_start_loc=self.tensor([sum(lengths[:row]) for row in range(len(slots) + 1)]),
            has_initial_state=self.tensor([not self._is_fresh(slot) for slot in slots], torch.bool),
            snapshot_slots=self.tensor([target for target, _ in plan]),
            snapshot_lengths=self.tensor([length for _, length in plan]),
            seq_lens_cpu=self.random.choice((None, lengths)),
        )
        got = self.forward("extend", batch, inputs)
        for row, slot in enumerate(slots):
            output, got = got[:, : lengths[row]], got[:, lengths[row] :]
            if slot not in self.requests:
                assert bool((output == 0).all()), "outputs of a padded request"
                continue
            target, length = plan[row]
            if target >= 0:
                taken, _ = self.requests[slot].truth.after(inputs[row].rows(slice(length // CHUNK * CHUNK)))
                self.snapshots[target] = Held(taken)
                self._count("extend snapshots")
            self._advance(slot, inputs[row], output)

    def _decode(self) -> None:
        slots = self._batch_slots()
        inputs = [self._inputs(1, slot) for slot in slots]
        targets = [-1] * len(slots)
        for row, slot in enumerate(slots):
            if slot in self.requests and (self.requests[slot].truth.position + 1) % _INTERVAL == 0:
                targets[row] = -1 if (target := self._acquire()) is None else target
        planned = any(target >= 0 for target in targets) or self.random.random() < 0.5
        batch = Batch(slots=self.tensor(slots), snapshot_slots=self.tensor(targets) if planned else None)
        got = self.forward("decode", batch, inputs)
        for row, slot in enumerate(slots):
            if slot not in self.requests:
                assert bool((got[:, row] == 0).all()), "outputs of a padded request"
                continue
            self._advance(slot, inputs[row], got[:, row : row + 1])
            if targets[row] >= 0:
                self.snapshots[targets[row]] = Held(self.requests[slot].truth)
                self._count("decode snapshots")

    def _verify(self) -> None:
        """Drafts, their commit, or none: a step that the server drops must leave no trace."""
        slots, drafts = self._batch_slots(), self.random.randint(1, self.config.max_draft_tokens)
        inputs = [self._inputs(drafts, slot) for slot in slots]
        tree = self.config.tree_drafts and self.random.random() < 0.5
        parents = [[self.random.randrange(t) if tree else t - 1 for t in range(1, drafts)] for _ in slots]
        paths = [self._random_path([-1, *row]) for row in parents]
        accepted = [self.random.randint(0, len(path)) for path in paths]
        targets = [-1] * len(slots)
        for row, slot in enumerate(slots):
            if slot in self.requests:
                before = self.requests[slot].truth.position
                if before // _INTERVAL != (before + accepted[row]) // _INTERVAL:
                    targets[row] = -1 if (target := self._acquire()) is None else target
        links = _links(parents, drafts) if tree else ([], [])
        held = [self.requests[slot].truth.position if slot in self.requests else 7 for slot in slots]
        rows = self.random.sample(range(self.pool.require_drafts().rows.shape[0]), len(slots))
        batch = Batch(
            slots=self.tensor(slots),
            rows=self.tensor(rows) if self.random.random() < 0.5 else None,
            positions=self.tensor(held),
            snapshot_slots=self.tensor(targets),
            snapshot_interval=_INTERVAL,
            retrieve_next_token=self.tensor(links[0]).view(-1, drafts) if tree else None,
            retrieve_next_sibling=self.tensor(links[1]).view(-1, drafts) if tree else None,
        )
        got = self.forward("verify", batch, inputs)
        got = got.view(self.layers, len(slots), drafts, *got.shape[2:])
        for row, slot in enumerate(slots):
            if slot not in self.requests:
                assert bool((got[:, row] == 0).all()), "outputs of a padded request"
                continue
            for node in range(drafts):
                path = _path_to(node, [-1, *parents[row]])
                _, right = self.requests[slot].truth.after(inputs[row].rows(path))
                self.assert_close(got[:, row, node], right[:, -1], f"draft {node} of slot {slot}")
        self.check()
        if self.random.random() < 0.2:
            for target in targets:
                if target >= 0:
                    self._free(target)
            self._count("dropped verify")
            return
        nodes = [[*path, *[0] * (drafts - len(path))] for path in paths]
        path_nodes = self.tensor(nodes).view(-1, drafts) if tree else None
        self.attention.commit(batch, self.tensor(accepted), path_nodes)
        for row, slot in enumerate(slots):
            if slot not in self.requests:
                continue
            truth = self.requests[slot].truth
            if targets[row] >= 0:
                boundary = (truth.position + accepted[row]) // _INTERVAL * _INTERVAL
                crossed = paths[row][: boundary - truth.position]
                self.snapshots[targets[row]] = Held(truth.after(inputs[row].rows(crossed))[0])
                self._count("commit snapshots")
            self.requests[slot].truth = truth.after(inputs[row].rows(paths[row][: accepted[row]]))[0]
        self._count("tree" if tree else "chain")

    def _batch_slots(self, *, fresh: bool = False) -> list[int]:
        """Some requests in any order, among rows of padding; now and then nobody at all."""
        ready = [slot for slot, held in self.requests.items() if fresh or not held.fresh]
        chosen = self.random.sample(ready, self.random.randint(min(1, len(ready)), len(ready)))
        if self.random.random() < 0.03:
            chosen = []
        chosen += [self.random.choice(self.padding) for _ in range(self.random.choice((0, 0, 1, 2)))]
        self.random.shuffle(chosen)
        return chosen

    def _inputs(self, tokens: int, slot: int) -> Inputs:
        inputs = self.inputs(tokens)
        if slot not in self.requests:
            inputs.x.fill_(torch.nan)
        return inputs

    def _advance(self, slot: int, inputs: Inputs, output: Tensor) -> None:
        truth, right = self.requests[slot].truth.after(inputs)
        self.assert_close(output, right, f"outputs of slot {slot}")
        self.requests[slot] = Held(truth)

    def _acquire(self) -> int | None:
        """A free slot, if need be that of the oldest snapshot."""
        if not self.pool.allocator.free:
            if not self.snapshots:
                return None
            oldest = next(iter(self.snapshots))
            del self.snapshots[oldest]
            self._free(oldest)
        return self.pool.acquire()

    def _free(self, slot: int) -> None:
        self.pool.release(slot)
        self.poison(slot)

    def _is_fresh(self, slot: int) -> bool:
        return slot in self.requests and self.requests[slot].fresh

    def _random_path(self, parents: list[int]) -> list[int]:
        return _path_to(self.random.randrange(len(parents)), parents)

    def _count(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1


def _path_to(node: int, parents: list[int]) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def _links(parents: list[list[int]], drafts: int) -> tuple[list[list[int]], list[list[int]]]:
    """First-child and next-sibling links of trees given by the parents of drafts 1 .. D-1."""
    children, siblings = [], []
    for row in parents:
        child, sibling = [-1] * drafts, [-1] * drafts
        youngest: dict[int, int] = {}
        for node, parent in enumerate(row, start=1):
            if parent in youngest:
                sibling[youngest[parent]] = node
            else:
                child[parent] = node
            youngest[parent] = node
        children.append(child)
        siblings.append(sibling)
    return children, siblings
