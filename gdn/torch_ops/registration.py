"""Define the operators, once in a process, and let each call the function that its plan names."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any
from typing import Final

import torch

from gdn.torch_ops.fakes import FAKES
from gdn.torch_ops.plans import function_of
from gdn.torch_ops.schemas import SCHEMAS

if TYPE_CHECKING:
    from torch import Tensor

_libraries: list[torch.library.Library] = []
"""The library whose life is that of its operators."""
_lock = threading.Lock()


def register_operators() -> None:
    """Define `torch.ops.gdn.*`; again is nothing."""
    with _lock:
        if _libraries:
            return
        library: Any = torch.library.Library("gdn", "DEF")  # type: ignore[no-untyped-call]
        for operation, schema in SCHEMAS.items():
            library.define(operation + schema, tags=(torch.Tag.needs_exact_strides,))
            library.impl(operation, _KERNELS[operation](operation), "CompositeExplicitAutograd")
            torch.library.register_fake(f"gdn::{operation}", FAKES[operation], lib=library)
        _libraries.append(library)


def _names(operation: str) -> tuple[str, ...]:
    """The arguments of an operator behind its plan, as the operation itself names them."""
    inside = SCHEMAS[operation].partition(" -> ")[0].strip("()")
    return tuple(re.findall(r"(\w+)(?:,|$)", inside))[1:]


def _writing(operation: str) -> Callable[..., None]:
    """An operation whose result is its `out`."""
    names = _names(operation)

    def run(plan: str, *args: Any) -> None:
        function_of(plan, operation)(**dict(zip(names, args, strict=True)))

    return run


def _extending(operation: str) -> Callable[..., Tensor]:
    names = _names(operation)

    def run(plan: str, *args: Any) -> Tensor:
        named = dict(zip(names, args, strict=True))
        chunk_states: Tensor | None = function_of(plan, operation)(**named).chunk_states
        if chunk_states is None:
            pool: Tensor = named["ssm_states"]
            return pool.new_empty((1, 0, *pool.shape[1:]))
        return _fresh((chunk_states.contiguous(),), args)[0]

    return run


def _like_x(operation: str) -> Callable[..., Tensor]:
    """A convolution, whose result is laid out like its input."""
    names = _names(operation)

    def run(plan: str, x: Tensor, *args: Any) -> Tensor:
        result = function_of(plan, operation)(**dict(zip(names, (x, *args), strict=True)))
        if result.stride() != torch.empty_like(x, device="meta").stride():
            return torch.empty_like(x).copy_(result)
        return _fresh((result,), (x, *args))[0]

    return run


def _gating(operation: str) -> Callable[..., tuple[Tensor, ...]]:
    def run(plan: str, *args: Tensor) -> tuple[Tensor, ...]:
        return _fresh(tuple(part.contiguous() for part in function_of(plan, operation)(*args)), args)

    return run


def _splitting(operation: str) -> Callable[..., tuple[Tensor, ...]]:
    def run(plan: str, mixed_qkv: Tensor, *heads: int) -> tuple[Tensor, ...]:
        return _fresh(function_of(plan, operation)(mixed_qkv), (mixed_qkv,))

    return run


def _fresh(results: tuple[Tensor, ...], inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The results, each in memory of its own: what an operator returns may be no view of what it got or returned."""
    taken = {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, torch.Tensor) and x.numel()}
    fresh = []
    for result in results:
        storage = result.untyped_storage().data_ptr()
        fresh.append(result.clone() if result.numel() and storage in taken else result)
        taken.add(storage)
    return tuple(fresh)


_KERNELS: Final[dict[str, Callable[[str], Callable[..., Any]]]] = {
    "decode": _writing,
    "packed_decode": _writing,
    "replay_decode": _writing,
    "verify": _writing,
    "tree_verify": _writing,
    "extend": _extending,
    "conv_extend": _like_x,
    "conv_update": _like_x,
    "gating": _gating,
    "qkv_split": _splitting,
}
