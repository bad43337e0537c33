"""What the caller and the environment ask for by name: require, prefer, exclude, disabled."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import get_args

from gdn.environment import Environment
from gdn.errors import ConfigError
from gdn.errors import UnknownBackendError
from gdn.types import CORE_OPERATIONS
from gdn.types import OPERATIONS
from gdn.types import ROW_OPERATION
from gdn.types import Operation

Require = str | Mapping[str, str] | None
"""A backend name for decode, extend and verify, or a name per operation."""
Prefer = str | Iterable[str] | Mapping[str, str | Iterable[str]] | None
"""A name or names in order for every operation, or the same per operation."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Names per operation, checked against the loaded backends."""

    require: Mapping[Operation, str] = field(default_factory=dict)
    required_by: Mapping[Operation, str] = field(default_factory=dict)
    """Where each requirement comes from: "require" or the name of a variable."""
    prefer: Mapping[Operation, tuple[str, ...]] = field(default_factory=dict)
    exclude: frozenset[str] = frozenset()
    disabled: frozenset[str] = frozenset()
    companion: str | None = None
    """The backend asked for decode, extend and verify alike: asked first for the operations around them too."""
    overridden: tuple[str, ...] = ()
    """Variables that the call beat, as text."""

    def order(self, operation: Operation) -> tuple[str, ...]:
        """Backends to ask before the ranking table for `operation`."""
        names = (*self.prefer.get(operation, ()), *((self.companion,) if self.companion else ()))
        return tuple(dict.fromkeys(names))

    def named(self, operation: Operation) -> frozenset[str]:
        """Backends that the caller named for `operation`, which opts in to experimental rows."""
        operations = {operation, ROW_OPERATION[operation]}
        required = {self.require[op] for op in operations if op in self.require}
        return frozenset(required.union(*(self.order(op) for op in operations)))


def build_selection(
    environment: Environment,
    known: Iterable[str],
    *,
    require: Require = None,
    prefer: Prefer = None,
    exclude: str | Iterable[str] = (),
) -> Selection:
    """Merge the call's wishes with the environment's.

    Strongest first: `GDN_DISABLE_BACKENDS`, the call's require and exclude, `GDN_BACKEND_<OPERATION>`, `GDN_BACKEND`,
    prefer.

    Raises:
        UnknownBackendError: a name that no plugin registered.
        ConfigError: an unknown operation, or a requirement of an excluded backend.
    """
    known = frozenset(known)
    required, companion = _required(require)
    source: dict[Operation, str] = dict.fromkeys(required, "require")
    overridden: list[str] = []
    for variable, operation, name in _environment_requirements(environment):
        if operation not in required:
            required[operation], source[operation] = name, variable
        elif required[operation] != name and source[operation] == "require":
            overridden.append(f"{variable}={name} is overridden by require={required[operation]!r} for {operation}")
    preferred = _preferred(prefer)
    excluded = frozenset([exclude] if isinstance(exclude, str) else exclude)
    disabled = frozenset(environment.disabled)
    for mentioned, what in (
        (required.values(), "require"),
        ((name for names in preferred.values() for name in names), "prefer"),
        (excluded, "exclude"),
        (disabled, "GDN_DISABLE_BACKENDS"),
    ):
        for name in mentioned:
            _check_known(name, known, what)
    for operation, name in required.items():
        if name in excluded:
            raise ConfigError(
                f"{source[operation]} asks {name!r} for {operation}, and exclude={sorted(excluded)} forbids it"
            )
    return Selection(
        required,
        source,
        preferred,
        excluded,
        disabled,
        companion or environment.backend,
        tuple(dict.fromkeys(overridden)),
    )


def _required(require: Require) -> tuple[dict[Operation, str], str | None]:
    if require is None:
        return {}, None
    if isinstance(require, str):
        return dict.fromkeys(CORE_OPERATIONS, require), require
    return {_operation(key, "require"): name for key, name in require.items()}, None


def _preferred(prefer: Prefer) -> dict[Operation, tuple[str, ...]]:
    if prefer is None:
        return {}
    if isinstance(prefer, Mapping):
        return {_operation(key, "prefer"): _names(names) for key, names in prefer.items()}
    return dict.fromkeys(OPERATIONS, _names(prefer))


def _names(names: str | Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _operation(key: str, what: str) -> Operation:
    if key not in get_args(Operation):
        raise ConfigError(f"{what} names the operation {key!r}; known are {', '.join(OPERATIONS)}")
    return key  # type: ignore[return-value]


def _environment_requirements(environment: Environment) -> Iterable[tuple[str, Operation, str]]:
    for operation in CORE_OPERATIONS:
        if operation in environment.backend_by_operation:
            name = environment.backend_by_operation[operation]
            yield f"GDN_BACKEND_{operation.upper()}", operation, name
    if environment.backend:
        for operation in CORE_OPERATIONS:
            if operation not in environment.backend_by_operation:
                yield "GDN_BACKEND", operation, environment.backend


def _check_known(name: str, known: frozenset[str], what: str) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UnknownBackendError(f"{what} names the backend {name!r}, known are {', '.join(sorted(known))}{hint}")
