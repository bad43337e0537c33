"""Plan strings, and the bound functions behind them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from gdn.errors import GdnError

_plans: dict[str, Mapping[str, Callable[..., Any]]] = {}
_lock = threading.Lock()


def register(key: str, functions: Mapping[str, Callable[..., Any]]) -> str:
    """The plan of these functions: `key`, or `key#1` and so on where other functions have that name already.

    Plans are kept for the life of the process: a compiled graph may name them at any time.
    """
    with _lock:
        for plan in itertools.chain((key,), (f"{key}#{number}" for number in itertools.count(1))):
            if _plans.setdefault(plan, dict(functions)) == functions:
                return plan
    raise AssertionError("names never run out")


def function_of(plan: str, operation: str) -> Callable[..., Any]:
    """The function that `plan` binds to `operation`.

    Raises:
        GdnError: nothing in this process has registered the plan.
    """
    try:
        return _plans[plan][operation]
    except KeyError:
        raise GdnError(
            f"no {operation} of plan {plan!r} in this process: a compiled graph needs the triple it was compiled with; "
            "call gdn.resolve(...).compilable() before the graph runs"
        ) from None
