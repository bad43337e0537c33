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

from gdn.api import resolve
from gdn.config import GdnConfig
from gdn.serving.attention import GdnAttention
from gdn.serving.batch import Batch
from gdn.serving.pool import StatePool
from gdn.serving.storage import Layout
from gdn.testing.serving.truth import Inputs
from gdn.testing.serving.truth import Truth
from gdn.testing.serving.truth import Weights
from gdn.types import CHUNK

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE: Final = 2e-4
"""Largest error of an output or a state, relative to the largest value beside it. All dtypes are fp32; the recurrence
forgets, so errors don't add up over the steps."""

_LENGTHS: Final = (0, 1, 1, 2, 3, 4, 63, 64, 65, 128, 130)
_INTERVAL: Final = 8
"""Tokens between the prefix snapshots of decode and commit."""
_Kind = Literal["admit", "extend", "decode", "verify", "evict"]


@dataclass
class Held:
    """A slot that a request or a snapshot holds. `fresh`: nothing was written there for it yet."""

    truth: Truth
    fresh: bool = False


class Scenario:
    """A random schedule over one pool.

    Args:
        config: fp32 activations and states; `max_draft_tokens` >= 1 for verify steps, `tree_drafts` for trees.
        device: as for `gdn.resolve`.
        layers: layers of the pool.
        layout: of the pool.
        slots: slots of the pool.
        seed: of everything.
        selection: `require`, `prefer`, `exclude` of `gdn.resolve`.
    """

    def __init__(
        self, config: GdnConfig, device: str, *, layers: int = 3, layout: Layout = "slot_major", slots: int = 9,
        seed: int = 0, **selection: Any,
    ) -> None:  # fmt: skip
        self.config = config.model_copy(update={"state_checkpoints": True})
        self.device = device
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.layers = layers
        triple = resolve(self.config, device=device, **selection)
        self.pool = StatePool(
            self.config, slots, device, num_layers=layers, max_requests=slots + 2, layout=layout, contract=triple.state
        )  # fmt: skip
        self.attention = GdnAttention(triple, self.pool)
        self.weights = Weights.random(self.config, layers, self.generator)
        self.parameters = self.weights.layers(device)
        self.requests: dict[int, Held] = {}
        self.snapshots: dict[int, Held] = {}
        self.done: dict[str, int] = {}
        """Steps of each kind, and of what happened in them, so that a test can see that nothing was left out."""
        for slot in range(slots):
            self._poison(slot)

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
                _assert_close(state[:, slot], held.truth.state, f"state of slot {slot}")
                _assert_close(conv[:, slot], held.truth.window, f"window of slot {slot}")

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
            self.requests[slot] = Held(Truth.fresh(self.weights), fresh=True)

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
            slots=self._tensor(slots),
            query_start_loc=self._tensor([sum(lengths[:row]) for row in range(len(slots) + 1)]),
            has_initial_state=self._tensor([not self._is_fresh(slot) for slot in slots], torch.bool),
            snapshot_slots=self._tensor([target for target, _ in plan]),
            snapshot_lengths=self._tensor([length for _, length in plan]),
            seq_lens_cpu=self.random.choice((None, lengths)),
        )
        got = self._forward(self.attention.forward_extend, batch, inputs)
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
        batch = Batch(slots=self._tensor(slots), snapshot_slots=self._tensor(targets) if planned else None)
        got = self._forward(self.attention.forward_decode, batch, inputs)
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
            slots=self._tensor(slots),
            rows=self._tensor(rows) if self.random.random() < 0.5 else None,
            positions=self._tensor(held),
            snapshot_slots=self._tensor(targets),
            snapshot_interval=_INTERVAL,
            retrieve_next_token=self._tensor(links[0]).view(-1, drafts) if tree else None,
            retrieve_next_sibling=self._tensor(links[1]).view(-1, drafts) if tree else None,
        )
        got = self._forward(self.attention.forward_verify, batch, inputs)
        got = got.view(self.layers, len(slots), drafts, *got.shape[2:])
        for row, slot in enumerate(slots):
            if slot not in self.requests:
                assert bool((got[:, row] == 0).all()), "outputs of a padded request"
                continue
            for node in range(drafts):
                path = _path_to(node, [-1, *parents[row]])
                _, right = self.requests[slot].truth.after(inputs[row].rows(path))
                _assert_close(got[:, row, node], right[:, -1], f"draft {node} of slot {slot}")
        self.check()
        if self.random.random() < 0.2:
            for target in targets:
                if target >= 0:
                    self._free(target)
            self._count("dropped verify")
            return
        nodes = [[*path, *[0] * (drafts - len(path))] for path in paths]
        self.attention.commit(
            batch, self._tensor(accepted), self._tensor(nodes).view(-1, drafts) if tree else None
        )  # fmt: skip
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
        chosen += [self.random.choice((-1, self.pool.num_slots)) for _ in range(self.random.choice((0, 0, 1, 2)))]
        self.random.shuffle(chosen)
        return chosen

    def _forward(self, forward: Any, batch: Batch, inputs: list[Inputs]) -> Tensor:
        """Outputs `[layers, T, HV, V]` of all layers."""
        packed = Inputs.cat([Inputs.random(self.config, self.layers, 0, self.generator), *inputs])
        outputs = [
            forward(layer, batch, *(part[layer.layer_id].to(self.device) for part in (packed.x, packed.a, packed.b)))
            for layer in self.parameters
        ]
        return torch.cat(outputs).cpu()

    def _inputs(self, tokens: int, slot: int) -> Inputs:
        inputs = Inputs.random(self.config, self.layers, tokens, self.generator)
        if slot not in self.requests:
            inputs.x.fill_(torch.nan)
        return inputs

    def _advance(self, slot: int, inputs: Inputs, output: Tensor) -> None:
        truth, right = self.requests[slot].truth.after(inputs)
        _assert_close(output, right, f"outputs of slot {slot}")
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
        self._poison(slot)

    def _poison(self, slot: int) -> None:
        """What the last tenant leaves: NaN everywhere, and a ring with any number of entries."""
        parts = [self.pool.conv, self.pool.recurrent]
        if self.pool.ring is not None:
            parts += [self.pool.ring.d, self.pool.ring.k, self.pool.ring.g]
            self.pool.ring.cursors[slot] = self.random.randrange(self.pool.ring.length)
        for part in parts:
            part[:, slot] = torch.nan

    def _is_fresh(self, slot: int) -> bool:
        return slot in self.requests and self.requests[slot].fresh

    def _random_path(self, parents: list[int]) -> list[int]:
        return _path_to(self.random.randrange(len(parents)), parents)

    def _tensor(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _count(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1


def live_states(pool: StatePool) -> Tensor:
    """States `[layers, slots, HV, V, K]` in fp64 on the CPU, with the updates that a replay ring still holds."""
    states = pool.recurrent.cpu().double()
    if pool.ring is None:
        return states
    d, k, g = (part.cpu().double() for part in (pool.ring.d, pool.ring.k, pool.ring.g))
    k = k.repeat_interleave(d.shape[2] // k.shape[2], dim=2)
    for slot, entries in enumerate(pool.ring.cursors.tolist()):
        for entry in range(entries):
            update = d[:, slot, :, entry].unsqueeze(-1) * k[:, slot, :, entry].unsqueeze(-2)
            states[:, slot] = states[:, slot] * g[:, slot, :, entry, None, None].exp() + update
    return states


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


def _assert_close(got: Tensor, right: Tensor, what: str) -> None:
    if not right.numel():
        return
    error = float((got.double() - right).abs().max() / right.abs().max().clamp(min=1e-3))
    assert error <= TOLERANCE, f"{what}: error {error:.1e}, allowed {TOLERANCE:.0e}"
