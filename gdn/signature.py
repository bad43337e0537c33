"""Do once per argument signature what depends on nothing else: validation, and the plan of a launch.

A signature holds, for every tensor, its type, dtype, shape, strides and device, and for every other argument its type
and value. Contents and addresses of tensors are no part of it, so no plan may depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any
from typing import Generic
from typing import TypeVar

import torch

TensorGuards: Any
try:  # torch's own compiled check of one signature: a third of the time that reading it from Python takes
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None

Plan = TypeVar("Plan")


def planned(build: Callable[..., Plan], *, capacity: int = 512) -> Callable[..., Plan]:
    """`build(*args)`, called once for each signature of its positional arguments, always the same number of them.

    Args:
        build: makes a plan or raises `gdn.InputError`; an error is not remembered.
        capacity: signatures kept; the oldest goes first.
    """
    return _Plans(build, capacity)


def validated(check: Callable[..., None], *, capacity: int = 512) -> Callable[..., None]:
    """`check(*args)`, called once for each signature of its positional arguments."""
    return _Plans(check, capacity)


class _Plans(Generic[Plan]):
    """Plans by signature, with a fast test for the last one. Safe to call from several threads."""

    def __init__(self, build: Callable[..., Plan], capacity: int) -> None:
        self._build = build
        self._capacity = capacity
        self._plans: dict[Any, _Entry[Plan]] = {}
        self._last: _Entry[Plan] | None = None

    def __call__(self, *args: Any) -> Plan:
        last = self._last
        if last is not None and last.matches(args):
            return last.plan
        key = tuple(map(_signature, args))
        try:
            entry = self._plans.get(key)
        except TypeError:  # an argument that can't be hashed has no signature: the builder will refuse it
            return self._build(*args)
        if entry is None:
            entry = _Entry(args, self._build(*args))
            while len(self._plans) >= self._capacity:
                self._plans.pop(next(iter(self._plans)), None)
            self._plans[key] = entry
        elif not entry.matches(args):
            entry.renew(args)
        self._last = entry
        return entry.plan


class _Entry(Generic[Plan]):
    """A plan, and a compiled test whether other arguments have its signature."""

    __slots__ = ("_check", "_constants", "_pick_constants", "_pick_tensors", "plan")

    def __init__(self, args: tuple[Any, ...], plan: Plan) -> None:
        self.plan = plan
        tensors = [index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        constants = [index for index in range(len(args)) if index not in tensors]
        self._pick_tensors = _picker(tensors)
        self._pick_constants = _picker(constants)
        self._constants = [(type(args[index]), args[index]) for index in constants]
        self.renew(args)

    def renew(self, args: tuple[Any, ...]) -> None:
        """Compile the test anew: it also depends on the thread's mode (inference mode, say), which may have changed."""
        self._check = _tensor_check(self._pick_tensors(args))

    def matches(self, args: tuple[Any, ...]) -> bool:
        check = self._check
        if check is None:
            return False
        for value, (kind, constant) in zip(self._pick_constants(args), self._constants, strict=False):
            if value is not constant and (type(value) is not kind or value != constant):
                return False
        return check(*self._pick_tensors(args))


def _picker(indices: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    if len(indices) > 1:
        return itemgetter(*indices)
    if indices:
        only = indices[0]
        return lambda args: (args[only],)
    return lambda args: ()


def _tensor_check(tensors: tuple[Any, ...]) -> Callable[..., bool] | None:
    """None where there is no compiled check, or where its examples are not real tensors."""
    if TensorGuards is None or not tensors or any(type(tensor) not in _PLAIN for tensor in tensors):
        return None
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        return _repeated_tensor_check(tensors)
    sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check if check(*tensors) else None


def _repeated_tensor_check(tensors: tuple[Any, ...]) -> Callable[..., bool] | None:
    """torch's check refuses one tensor given twice: the later places get a check of their own."""
    seen: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        seen.setdefault(id(tensor), index)
    first = sorted(seen.values())
    later = [index for index in range(len(tensors)) if index not in first]
    pick_first, pick_later = _picker(first), _picker(later)
    check_first, check_later = _tensor_check(pick_first(tensors)), _tensor_check(pick_later(tensors))
    if check_first is None or check_later is None:
        return None

    def check(*given: Any) -> bool:
        return check_first(*pick_first(given)) and check_later(*pick_later(given))

    return check


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _signature(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return type(arg), arg.dtype, arg.shape, arg.stride(), arg.device
    return type(arg), arg
