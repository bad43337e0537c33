"""Steps that all ranks of a group take together: what one raises, all raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from typing import Generic
from typing import TypeVar

from gdn.errors import ConfigError
from gdn.errors import RankError

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class _Raised:
    """An exception on another rank."""

    text: str


@dataclass(frozen=True, slots=True)
class _Shared(Generic[Value]):
    value: Value


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a `torch.distributed` group, by their numbers in the whole world."""

    group: Any
    numbers: tuple[int, ...]
    own: int

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """Those of `group`, None for all. ConfigError where there is no such group or this rank is outside of it."""
        from torch import distributed

        if not (distributed.is_available() and distributed.is_initialized()):
            raise ConfigError("torch.distributed is not initialised: call init_process_group first, or gdn.resolve")
        own = distributed.get_rank()
        numbers = () if group == distributed.GroupMember.NON_GROUP_MEMBER else _numbers(group)
        if own not in numbers:
            raise ConfigError(f"rank {own} is not in the group")
        return cls(group, numbers, own)

    @property
    def first(self) -> bool:
        """Whether this rank chooses."""
        return self.own == self.numbers[0]

    def gather(self, step: Callable[[], Value]) -> list[Value]:
        """`step()` of every rank, in order. Where it raises on one, all raise."""
        from torch import distributed

        mine: _Shared[Value] | _Raised
        problem: Exception | None = None
        try:
            mine = _Shared(step())
        except Exception as error:  # raised again below, once the others know
            mine, problem = _Raised(f"{type(error).__name__}: {error}"), error
        everyone: list[Any] = [None] * len(self.numbers)
        distributed.all_gather_object(everyone, mine, group=self.group)
        if problem is not None:
            raise problem
        for rank, theirs in zip(self.numbers, everyone, strict=True):
            if isinstance(theirs, _Raised):
                raise RankError(f"rank {rank} failed while all ranks resolved together: {theirs.text}")
        return [theirs.value for theirs in everyone]

    def share(self, step: Callable[[], Value]) -> Value:
        """`step()` of this rank, which every rank takes at the same time."""
        kept: list[Value] = []
        self.gather(lambda: kept.append(step()))
        return kept[0]


def _numbers(group: Any) -> tuple[int, ...]:
    from torch import distributed

    return tuple(distributed.get_process_group_ranks(group if group is not None else distributed.group.WORLD))
