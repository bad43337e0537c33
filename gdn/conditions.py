"""Conditions under which a default holds, as data: each names a fact of the question and the values it may have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from gdn.config import GdnConfig
from gdn.device import DeviceInfo
from gdn.types import StateContract


@dataclass(frozen=True, slots=True)
class Question:
    """What a default may depend on."""

    config: GdnConfig
    device: DeviceInfo
    state: StateContract
    named: tuple[str, ...] = ()
    """Backends that the caller or the environment requires or prefers for the operation, sorted."""

    @property
    def runtime_major(self) -> int | None:
        """Major version of the device's CUDA or HIP runtime."""
        return int(self.device.runtime.split(".")[0]) if self.device.runtime else None


@dataclass(frozen=True, slots=True)
class Condition:
    """One fact with its accepted values: exactly `value`, or within the closed range `least` to `most`."""

    fact: str
    """Attribute of a `Question`, dotted."""
    value: Any = None
    least: int | None = None
    most: int | None = None

    def failure(self, question: Question) -> str | None:
        """What was got and what is needed, or None where the condition is met. An unknown fact meets no range."""
        got = attrgetter(self.fact)(question)
        name = self.fact.removeprefix("config.")
        if self.least is None and self.most is None:
            return None if got == self.value else f"{name}={got!r}, needs {self.value!r}"
        inside = (
            got is not None and (self.least is None or got >= self.least) and (self.most is None or got <= self.most)
        )
        return None if inside else f"{name}={got}, needs {self._range()}"

    def _range(self) -> str:
        if self.most is None:
            return f">={self.least}"
        return f"<={self.most}" if self.least is None else f"{self.least} to {self.most}"


def failures(conditions: tuple[Condition, ...], question: Question) -> Iterator[str]:
    """Every condition that isn't met, as text."""
    for condition in conditions:
        if (failure := condition.failure(question)) is not None:
            yield failure
