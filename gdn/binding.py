"""What a backend's factory gets: everything that was decided before kernels are built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gdn.capabilities import CapabilityRow
from gdn.config import GdnConfig
from gdn.device import DeviceInfo
from gdn.types import Operation
from gdn.types import StateContract


@dataclass(frozen=True, slots=True)
class BindContext:
    """The argument of every factory. A factory returns the operation's callable or raises `gdn.BackendRefused`.

    The returned function is stored in the triple as it is. It must hold no hidden mutable state beyond caches of
    compiled code, keyed by everything that the code depends on.
    """

    operation: Operation
    config: GdnConfig
    device: DeviceInfo
    state: StateContract
    row: CapabilityRow


Factory = Callable[[BindContext], Callable[..., Any]]
