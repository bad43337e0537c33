"""Break one argument of a good call at a time: every way must be refused by the argument's name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gdn.testing.calls import Call


def broken_calls(call: Call) -> Iterator[tuple[str, Call]]:
    """The argument's name (as an error must show it) and the broken call."""
    tensors = [name for name, value in call.arguments.items() if isinstance(value, torch.Tensor)]
    for name in tensors:
        value = call.arguments[name]
        broken_values = [*_broken(value), *([value.to("meta")] if len(tensors) > 1 else [])]
        for broken in broken_values:
            yield name, Call(call.operation, call.case, {**call.copy().arguments, name: broken})
    for name, broken in _MEANINGLESS.items():
        if name in call.arguments:
            yield name, Call(call.operation, call.case, {**call.copy().arguments, name: broken})
    if call.operation in ("decode", "extend", "verify", "tree_verify") and call.arguments["v"].shape[2] > 1:
        yield "v", _indivisible(call)


_MEANINGLESS: dict[str, Any] = {"activation": "tanh", "cache_steps": 0, "num_v_heads": 999, "head_v_dim": 999}


def _broken(value: torch.Tensor) -> Iterator[Any]:
    yield value.unsqueeze(0)
    yield value.to(torch.complex64 if value.is_floating_point() else torch.float32)
    yield value.tolist()


def _indivisible(call: Call) -> Call:
    """Two key heads and five value heads."""
    arguments = call.copy().arguments
    keys, values = (arguments[name][:, :, :1].expand(-1, -1, heads, -1) for name, heads in (("k", 2), ("v", 5)))
    return Call(call.operation, call.case, {**arguments, "q": keys, "k": keys, "v": values})
