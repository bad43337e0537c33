"""The operations as `torch.ops.gdn.*`, for `torch.compile`: one host-owned operator each, whatever backend is bound.

An operator's first argument is a plan, a string that finds the bound function; a compiled graph names no backend and
no address. The string is equal in every process that resolves alike, so a graph from a cache finds its function once
`ResolvedTriple.compilable` has been called there.

Schemas say which arguments are written. Outputs of the recurrent operators are arguments too (`out`), allocated by the
caller, so that every operator either writes or returns fresh memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gdn.torch_ops.callables import CALLABLES
from gdn.torch_ops.plans import register
from gdn.torch_ops.registration import register_operators


def compilable(key: str, config: Any, functions: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """For each bound operation a function that calls it directly in eager mode, and through its operator in a graph.

    Args:
        key: names the triple, equal wherever the same backends are bound for the same config and device.
        config: that the functions are bound to.
        functions: by operation.
    """
    register_operators()
    plan = register(key, functions)
    return {operation: CALLABLES[operation](function, plan, config) for operation, function in functions.items()}
