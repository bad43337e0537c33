"""The front door: resolve, explain, list backends. Detects, caches, binds and logs around the pure resolver."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING
from typing import Any

from gdn.bind import Refusal
from gdn.bind import bind
from gdn.config import GdnConfig
from gdn.device import DeviceInfo
from gdn.device import detect_device
from gdn.environment import VARIABLES
from gdn.environment import read_environment
from gdn.errors import ConfigError
from gdn.errors import UnknownDeviceError
from gdn.installed import assume_installed as installed_with
from gdn.installed import installed_version
from gdn.outcome import failure
from gdn.outcome import log
from gdn.outcome import triple_of
from gdn.registry import BackendStatus
from gdn.registry import Registry
from gdn.registry import get_registry
from gdn.resolver import Facts
from gdn.resolver import Refusals
from gdn.resolver import explain as explain_facts
from gdn.selection import Prefer
from gdn.selection import Require
from gdn.selection import Selection
from gdn.selection import build_selection
from gdn.triple import ResolvedTriple
from gdn.types import Operation

if TYPE_CHECKING:
    from gdn.report import ResolutionReport

DeviceLike = Any
"""None, "cuda:1", a torch.device or a DeviceInfo."""

_raw_environment: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
"""What os.environ wraps: its own `get` raises and catches a KeyError for each variable that isn't set."""
_VARIABLE_KEYS = tuple(map(getattr(os.environ, "encodekey", str), (variable.name for variable in VARIABLES)))
_cache: dict[Any, ResolvedTriple] = {}
_reports: dict[Any, ResolutionReport] = {}
_MOST_REPORTS = 1024
_lock = threading.RLock()


def resolve(
    config: GdnConfig | Mapping[str, Any],
    *,
    device: DeviceLike = None,
    require: Require = None,
    prefer: Prefer = None,
    exclude: str | Iterable[str] = (),
) -> ResolvedTriple:
    """Choose and bind the backends that serve `config` on `device`, all over one state contract.

    The same arguments give the same triple object. Thread-safe.

    Args:
        config: geometry and needs of one rank.
        device: None detects: the current GPU or NPU if there is one, else the CPU.
        require: a backend name for decode, extend and verify, or a name per operation; unmet, it raises.
        prefer: a name, names in order, or the same per operation; unmet, the next candidate is taken with a WARNING.
        exclude: backends not to use.

    Raises:
        RequirementError: a required backend can't serve.
        NoBackendError: nobody serves a needed operation; the text holds every reason.
        UnknownBackendError, UnknownDeviceError, ConfigError: a name or a combination that makes no sense.
    """
    registry = get_registry()
    prefer, exclude = _hashable(prefer, exclude)
    key = _cache_key(config, device, require, prefer, exclude, registry)
    if key is not None and (triple := _cache.get(key)) is not None:
        return triple
    with _lock:
        if key is not None and (triple := _cache.get(key)) is not None:
            return triple
        triple = _resolve(as_config(config), device, require, prefer, exclude, registry)
        if key is not None:
            _cache[key] = triple
        return triple


def explain(
    config: GdnConfig | Mapping[str, Any],
    *,
    device: DeviceLike = None,
    require: Require = None,
    prefer: Prefer = None,
    exclude: str | Iterable[str] = (),
    assume_installed: Iterable[str] = (),
) -> ResolutionReport:
    """What `resolve` would choose and why, for any machine. Imports no kernel; needs no torch and no GPU.

    Args:
        device: as for `resolve`, or `DeviceInfo.parse("sm100", cuda="13.0")` and its text forms for a machine that
            isn't here.
        assume_installed: requirements such as "flashinfer-python==0.7.4" to take as installed.
    """
    registry = get_registry()
    prefer, exclude = _hashable(prefer, exclude)
    assumed = tuple(assume_installed)
    key = _cache_key(config, device, require, prefer, exclude, registry)
    if key is not None and (report := _reports.get((key, assumed))) is not None:
        return report
    selection = selection_of(registry, require, prefer, exclude)
    report = explain_facts(as_config(config), as_device(device), facts_of(registry, selection, assumed))
    if key is not None:
        if len(_reports) >= _MOST_REPORTS:
            _reports.clear()
        _reports[key, assumed] = report
    return report


def backends() -> tuple[BackendStatus, ...]:
    """Every backend plugin found, loaded or failed."""
    return get_registry().statuses


def clear_cache() -> None:
    """Forget resolved triples and detected devices. For tests, and after installing packages at run time."""
    with _lock:
        _cache.clear()
        _reports.clear()
        _detected.clear()
        installed_version.cache_clear()


def _resolve(
    config: GdnConfig,
    device: DeviceLike,
    require: Require,
    prefer: Prefer,
    exclude: str | Iterable[str],
    registry: Registry,
) -> ResolvedTriple:
    machine = as_device(device)
    if machine.hypothetical:
        raise UnknownDeviceError(f"{machine} is not a device of this host; gdn.explain answers what-if questions")
    selection = selection_of(registry, require, prefer, exclude)
    manifests = {manifest.name: manifest for manifest in registry.manifests}
    refused: dict[tuple[str, Operation, int], str] = {}
    built: dict[Any, Any] = {}
    while True:  # ends: each round but the last adds one refused row of finitely many
        report = explain_facts(config, machine, facts_of(registry, selection, (), refused))
        if not report.complete:
            raise failure(report, selection)
        outcome = bind(report, manifests, built)
        if not isinstance(outcome, Refusal):
            break
        refused[outcome.backend, outcome.operation, outcome.row] = outcome.message
    triple = triple_of(report, outcome)
    log(report)
    return triple


def facts_of(
    registry: Registry,
    selection: Selection,
    assumed: Iterable[str] = (),
    refused: Refusals = MappingProxyType({}),
) -> Facts:
    """What the resolver needs to know about this process."""
    loaded = {manifest.name for manifest in registry.manifests}
    return Facts(
        manifests=registry.manifests,
        installed=installed_with(assumed) if assumed else installed_version,
        selection=selection,
        third_party=frozenset(s.name for s in registry.statuses if s.ok and not s.builtin),
        broken={
            s.name: f"plugin failed at stage {s.stage}: {s.error}"
            for s in registry.statuses
            if not s.ok and s.name not in loaded
        },
        refused=refused,
    )


def selection_of(registry: Registry, require: Require, prefer: Prefer, exclude: str | Iterable[str]) -> Selection:
    """The call's wishes and the environment's, checked against the backends known here."""
    known = {manifest.name for manifest in registry.manifests} | {status.name for status in registry.statuses}
    return build_selection(read_environment(), known, require=require, prefer=prefer, exclude=exclude)


def as_config(config: GdnConfig | Mapping[str, Any]) -> GdnConfig:
    """A config from a config or its fields; ConfigError where it is neither."""
    if isinstance(config, GdnConfig):
        return config
    if isinstance(config, Mapping):
        try:
            return GdnConfig(**config)
        except ValueError as error:
            raise ConfigError(f"not a GdnConfig: {error}") from error
    raise ConfigError(f"config: expected a GdnConfig or a mapping, got {type(config).__name__}")


_detected: dict[Any, DeviceInfo] = {}


def as_device(device: DeviceLike) -> DeviceInfo:
    """The device's facts; detected once per process for each name."""
    if isinstance(device, DeviceInfo):
        return device
    key = (str(device) if device is not None else None, _current_index())
    if key not in _detected:
        _detected[key] = detect_device(device)
    return _detected[key]


def _current_index() -> int | None:
    """The current CUDA device, read only where CUDA is already in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    index: int = torch.cuda.current_device()
    return index


def _cache_key(
    config: Any, device: DeviceLike, require: Require, prefer: Prefer, exclude: tuple[str, ...], registry: Registry
) -> Any:
    """What a triple depends on, or None where an argument can't be hashed."""
    key = (
        config,
        device if device is None or isinstance(device, DeviceInfo) else str(device),
        _current_index() if device is None or device == "cuda" else None,
        require if require is None or isinstance(require, str) else tuple(require.items()),
        _frozen(prefer),
        exclude,
        tuple(map(_raw_environment.get, _VARIABLE_KEYS)),
        registry.generation,
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _hashable(prefer: Prefer, exclude: str | Iterable[str]) -> tuple[Prefer, tuple[str, ...]]:
    """Names in order as tuples, read once: the caller may have given iterators."""
    if prefer is not None and not isinstance(prefer, str | Mapping):
        prefer = tuple(prefer)
    return prefer, (exclude,) if isinstance(exclude, str) else tuple(exclude)


def _frozen(prefer: Prefer) -> Any:
    if isinstance(prefer, Mapping):
        return tuple((op, names if isinstance(names, str) else tuple(names)) for op, names in prefer.items())
    return prefer
