"""Which slots are taken. Host only: it never looks at what the slots hold."""

from __future__ import annotations

from gdn.errors import SlotError


class SlotAllocator:
    """Hands out the slots 0 .. num_slots-1, the one released longest ago first. Not thread-safe."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free: dict[int, None] = dict.fromkeys(range(num_slots))

    @property
    def free(self) -> int:
        """Slots that can still be acquired."""
        return len(self._free)

    def acquire(self) -> int:
        """A slot that nobody holds. It still holds its last tenant's state: see `Batch.has_initial_state`.

        Raises:
            SlotError: every slot is taken.
        """
        slot = next(iter(self._free), None)
        if slot is None:
            raise SlotError(f"all {self._num_slots} slots are taken: release one first")
        del self._free[slot]
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back.

        Raises:
            SlotError: nobody holds the slot, or there is no such slot.
        """
        if not 0 <= slot < self._num_slots:
            raise SlotError(f"slot {slot} does not exist: the pool has slots 0 to {self._num_slots - 1}")
        if slot in self._free:
            raise SlotError(f"slot {slot} is not taken: it was released twice or never acquired")
        self._free[slot] = None
