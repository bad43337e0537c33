"""Bind one backend's operations on one device, row by row, without the resolver's choice between backends."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from gdn.binding import BindContext
from gdn.capabilities import BackendManifest
from gdn.capabilities import CapabilityRow
from gdn.config import GdnConfig
from gdn.device import DeviceInfo
from gdn.errors import UnknownBackendError
from gdn.installed import installed_version
from gdn.matching import match
from gdn.registry import get_registry
from gdn.testing.case import Case
from gdn.types import OPERATIONS
from gdn.types import ROW_OPERATION
from gdn.types import Operation
from gdn.types import StateContract


def manifest_of(backend: str) -> BackendManifest:
    """The manifest of a loaded backend."""
    for manifest in get_registry().manifests:
        if manifest.name == backend:
            return manifest
    raise UnknownBackendError(f"no loaded backend is named {backend!r}")


def declared_operations(backend: str) -> tuple[Operation, ...]:
    """Operations that any row of the backend declares, for any device."""
    rows = manifest_of(backend).capabilities
    return tuple(op for op in OPERATIONS if any(factory_of(row, op) for row in rows))


def factory_of(row: CapabilityRow, operation: Operation) -> str | None:
    """The import string behind `operation`, or None where the row doesn't declare it."""
    if row.op != ROW_OPERATION[operation]:
        return None
    match operation:
        case "packed_decode":
            return row.packed_factory
        case "replay_decode":
            return row.replay_factory
        case "tree_verify":
            return row.tree_factory
        case _:
            return row.factory


def serving_config(operation: Operation, case: Case, **changes: Any) -> GdnConfig:
    """What a server would ask with, to make a call like `case`."""
    drafts = case.drafts if operation in ("verify", "tree_verify") else 0
    return case.config(max_draft_tokens=drafts, **changes)


def rows_serving(
    backend: str, operation: Operation, config: GdnConfig, device: DeviceInfo
) -> Iterator[tuple[CapabilityRow, StateContract]]:
    """The rows of the backend that take `config` on `device`, each with the state contract it asks for."""
    for row in manifest_of(backend).capabilities:
        state = StateContract(
            dtype="float32" if config.state_dtype == "auto" else config.state_dtype,
            alignment=row.state_alignment,
            reserved_slots=row.reserved_slots,
        )
        if factory_of(row, operation) and not match(row, operation, config, device, state, installed_version):
            yield row, state


def bound_operation(
    backend: str, operation: Operation, config: GdnConfig, device: DeviceInfo
) -> Callable[..., Any] | None:
    """The backend's function for `config`, or None where no row takes it."""
    for row, state in rows_serving(backend, operation, config, device):
        factory = factory_of(row, operation)
        assert factory is not None
        module, _, name = factory.partition(":")
        function: Callable[..., Any] = getattr(import_module(module), name)(
            BindContext(operation, config, device, state, row)
        )
        return function
    return None
