"""The slot allocator, alone and as the owner of a pool's slots, against a model of who holds what."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle
from hypothesis.stateful import RuleBasedStateMachine
from hypothesis.stateful import consumes
from hypothesis.stateful import invariant
from hypothesis.stateful import precondition
from hypothesis.stateful import rule

import gdn
from gdn.serving import SlotAllocator

CONFIG = gdn.GdnConfig(
    num_k_heads=1, num_v_heads=1, head_k_dim=2, head_v_dim=3, activation_dtype="float32", max_draft_tokens=2,
    replay_window=3,
)  # fmt: skip
SLOTS = 4
ANY_SLOT = st.integers(-2, SLOTS + 2)


def test_exhaustion_is_an_error_and_a_release_ends_it():
    allocator = SlotAllocator(2)
    assert {allocator.acquire(), allocator.acquire()} == {0, 1}
    with pytest.raises(gdn.SlotError, match="all 2 slots are taken"):
        allocator.acquire()
    allocator.release(1)
    assert allocator.acquire() == 1


@pytest.mark.parametrize("slot", [0, 1])
def test_a_second_release_is_an_error(slot):
    allocator = SlotAllocator(2)
    assert allocator.acquire() == 0
    if slot == 0:
        allocator.release(0)
    with pytest.raises(gdn.SlotError, match=f"slot {slot} is not taken"):
        allocator.release(slot)
    assert allocator.free == 2 - slot


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_that_does_not_exist_cannot_be_released(slot):
    with pytest.raises(gdn.SlotError, match="slots 0 to 1"):
        SlotAllocator(2).release(slot)


class PoolMachine(RuleBasedStateMachine):
    """Windows and states hold numbers; every method of the pool moves them as the model says, and nothing else."""

    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.pool = gdn.StatePool(CONFIG, SLOTS, "cpu", num_layers=2, max_requests=3, layout="page_major")
        self.windows = torch.zeros(2, SLOTS)
        self.states = torch.zeros(2, SLOTS)
        self.entries = [0] * SLOTS
        self.taken = set()
        self.numbers = itertools.count(1)

    @precondition(lambda self: len(self.taken) < SLOTS)
    @rule(target=held)
    def acquire(self):
        slot = self.pool.acquire()
        assert slot not in self.taken
        self.taken.add(slot)
        return slot

    @precondition(lambda self: len(self.taken) == SLOTS)
    @rule()
    def acquire_too_many(self):
        with pytest.raises(gdn.SlotError):
            self.pool.acquire()

    @rule(slot=consumes(held))
    def release(self, slot):
        self.pool.release(slot)
        self.taken.remove(slot)

    @rule(slot=ANY_SLOT)
    def release_what_nobody_holds(self, slot):
        if slot not in self.taken:
            with pytest.raises(gdn.SlotError):
                self.pool.release(slot)

    @rule(slot=held)
    def write(self, slot):
        window, state = self._fill(self.pool.conv[:, slot], self.pool.recurrent[:, slot])
        self.windows[:, slot], self.states[:, slot] = window, state

    @rule(slot=held, entries=st.integers(0, 2))
    def decode_into_the_ring(self, slot, entries):
        """Entries that add 1 to every element of the state: d = 1, k = 1, no decay."""
        for part, value in ((self.pool.ring.d, 1.0), (self.pool.ring.k, 1.0), (self.pool.ring.g, 0.0)):
            part[:, slot, :, :entries] = value
        self.pool.ring.cursors[slot] = self.entries[slot] = entries

    @rule(slots=st.lists(ANY_SLOT, max_size=3))
    def reset(self, slots):
        self.pool.reset(slots)
        for slot in filter(_exists, slots):
            self.windows[:, slot] = self.states[:, slot] = 0
            self.entries[slot] = 0

    @rule(origin=ANY_SLOT, to=ANY_SLOT)
    def copy(self, origin, to):
        self.pool.copy(origin, to)
        if _exists(origin):
            self.states[:, origin] += self.entries[origin]
            self.entries[origin] = 0
            if _exists(to):
                self.windows[:, to], self.states[:, to] = self.windows[:, origin], self.states[:, origin]
                self.entries[to] = 0

    @rule(order=st.permutations(range(-1, SLOTS)), steps=st.lists(st.integers(-1, 2), min_size=3, max_size=3))
    def commit(self, order, steps):
        slots, drafts = order[:3], self.pool.drafts
        for row, slot in enumerate(slots):
            for step in range(2):
                window, state = self._fill(drafts.windows[:, row, step], drafts.recurrent[:, row, step])
                if step == steps[row] and _exists(slot):
                    self.windows[:, slot], self.states[:, slot] = window, state
                    self.entries[slot] = 0
        self.pool.commit(slots, torch.tensor(steps))

    @invariant()
    def every_slot_holds_what_the_model_says(self):
        assert self.pool.allocator.free == SLOTS - len(self.taken)
        assert self.pool.ring.cursors[:SLOTS].tolist() == self.entries
        for layer, slot in itertools.product(range(2), range(SLOTS)):
            state = self.pool.layer(layer)
            assert bool((state.recurrent[slot] == self.states[layer, slot]).all())
            assert bool((state.conv[slot] == self.windows[layer, slot]).all())

    def _fill(self, window, state):
        """New numbers, two for each layer, written and returned."""
        numbers = torch.tensor([float(next(self.numbers)) for _ in range(4)]).view(2, 2)
        window.copy_(numbers[0].view(2, 1, 1).expand_as(window))
        state.copy_(numbers[1].view(2, 1, 1, 1).expand_as(state))
        return numbers


def _exists(slot):
    return 0 <= slot < SLOTS


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
