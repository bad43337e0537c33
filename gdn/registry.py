"""Find backend plugins through their entry points and load each on its own, so that none can break another."""

from __future__ import annotations

import itertools
import logging
import threading
import traceback
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any
from typing import Final
from typing import Literal
from typing import cast

import pluggy
from packaging.utils import canonicalize_name
from pydantic import ValidationError

from gdn import hookspecs
from gdn.capabilities import SCHEMA_VERSION
from gdn.capabilities import BackendManifest
from gdn.environment import Environment
from gdn.environment import read_environment
from gdn.errors import InstallationError
from gdn.errors import PluginError

logger = logging.getLogger("gdn.registry")

Stage = Literal["load", "register", "hook", "version", "validate", "collision"]
OWN_DISTRIBUTION: Final = "gdn"


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """One backend plugin: loaded, or failed at a stage."""

    name: str
    """The backend's name, or the entry point's where the plugin failed before it named one."""
    ok: bool
    entry_point: str
    distribution: str | None
    version: str | None
    path: str | None
    builtin: bool
    manifest: BackendManifest | None = None
    stage: Stage | None = None
    error: str | None = None
    traceback: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.name,
            "ok": self.ok,
            "builtin": self.builtin,
            "entry_point": self.entry_point,
            "distribution": self.distribution,
            "version": self.version,
            "path": self.path,
            "stage": self.stage,
            "error": self.error,
            "manifest": self.manifest.model_dump(mode="json") if self.manifest else None,
        }


class _Failed(Exception):
    """Carries a failure of one plugin from its stage to its status."""

    def __init__(self, stage: Stage, cause: BaseException, name: str | None = None) -> None:
        super().__init__(stage)
        self.stage: Stage = stage
        self.cause = cause
        self.name = name


EntryPoints = Callable[[], Iterable[metadata.EntryPoint]]
_generations = itertools.count(1)


def _installed_entry_points() -> Iterable[metadata.EntryPoint]:
    return metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP)


class Registry:
    """The plugins of this process. Loads once; `load(force=True)` again after installing at run time."""

    def __init__(self, entry_points: EntryPoints = _installed_entry_points) -> None:
        self._entry_points = entry_points
        self._lock = threading.RLock()
        self._statuses: tuple[BackendStatus, ...] | None = None
        self._manifests: tuple[BackendManifest, ...] = ()
        self.generation = 0
        """Differs after every load, across registries too: caches of what plugins gave are keyed by it."""

    @property
    def statuses(self) -> tuple[BackendStatus, ...]:
        """Every plugin, by name."""
        if self._statuses is None:
            self.load()
        assert self._statuses is not None
        return self._statuses

    @property
    def manifests(self) -> tuple[BackendManifest, ...]:
        """The manifests of those that loaded, by name."""
        if self._statuses is None:
            self.load()
        return self._manifests

    def load(self, *, force: bool = False) -> None:
        """Find and load the plugins.

        Raises:
            InstallationError: the built-in backends' entry points can't be found.
            PluginError: a plugin failed and GDN_STRICT_PLUGINS is set.
        """
        with self._lock:
            if self._statuses is not None and not force:
                return
            environment = read_environment()
            found = [point for point in _distinct(self._entry_points()) if _allowed(point, environment)]
            if not any(_is_builtin(point) for point in found):
                raise InstallationError(
                    f"no entry point of {OWN_DISTRIBUTION!r} in group {hookspecs.ENTRY_POINT_GROUP!r}: gdn is not "
                    "installed in this environment, or a stale *.egg-info or *.dist-info hides it; "
                    "install it again (pip install gdn, or pip install -e . in a checkout)"
                )
            statuses = _without_collisions([s for point in found for s in _load_plugin(point)])
            failed = [status for status in statuses if not status.ok]
            if failed and environment.strict_plugins:
                raise PluginError("; ".join(_failure_text(status) for status in failed))
            for status in failed:
                logger.warning("%s", _failure_text(status))
            self._manifests = tuple(s.manifest for s in statuses if s.ok and s.manifest is not None)
            self._statuses = statuses
            self.generation = next(_generations)


def _distinct(points: Iterable[metadata.EntryPoint]) -> list[metadata.EntryPoint]:
    """Each entry point once: a checkout and its install may both list the same one."""
    return list({(p.name, p.value, p.dist.name if p.dist else None): p for p in points}.values())


def _is_builtin(point: metadata.EntryPoint) -> bool:
    return point.dist is not None and canonicalize_name(point.dist.name) == OWN_DISTRIBUTION


def _allowed(point: metadata.EntryPoint, environment: Environment) -> bool:
    if environment.plugins is None or _is_builtin(point):
        return True
    return point.dist is not None and canonicalize_name(point.dist.name) in map(canonicalize_name, environment.plugins)


def _load_plugin(point: metadata.EntryPoint) -> list[BackendStatus]:
    """The backends of one entry point, or its failure."""
    try:
        manifests = _manifests_of(point)
    except _Failed as failure:
        error = f"{type(failure.cause).__name__}: {failure.cause}"
        text = "".join(traceback.format_exception(failure.cause))
        return [_status(point, failure.name or point.name, stage=failure.stage, error=error, traceback=text)]
    return [_status(point, manifest.name, manifest=manifest) for manifest in manifests]


def _status(point: metadata.EntryPoint, name: str, **outcome: Any) -> BackendStatus:
    dist = point.dist
    return BackendStatus(
        name=name,
        ok=outcome.get("manifest") is not None,
        entry_point=f"{point.name} = {point.value}",
        distribution=dist.name if dist else None,
        version=dist.version if dist else None,
        path=str(dist.locate_file("")) if dist else None,
        builtin=_is_builtin(point),
        **outcome,
    )


def _manifests_of(point: metadata.EntryPoint) -> list[BackendManifest]:
    try:
        plugin = point.load()
    except (Exception, SystemExit) as error:
        raise _Failed("load", error) from error
    implementations = _register(point, plugin)
    if not implementations:
        raise _Failed("hook", TypeError(f"{point.value} implements no hook of gdn (gdn_backend_manifests)"))
    manifests: list[BackendManifest] = []
    for implementation in implementations:
        manifests += _call(implementation)
    return manifests


def _register(point: metadata.EntryPoint, plugin: Any) -> list[pluggy.HookImpl]:
    """Check the plugin's hook implementations with pluggy; a manager of its own keeps it apart from all others."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name=point.value)
        manager.check_pending()
    except (Exception, SystemExit) as error:
        raise _Failed("register", error) from error
    implementations = manager.hook.gdn_backend_manifests.get_hookimpls()
    if any(implementation.hookwrapper or implementation.wrapper for implementation in implementations):
        raise _Failed("register", TypeError("gdn_backend_manifests may not be a hook wrapper"))
    return implementations


def _call(implementation: pluggy.HookImpl) -> list[BackendManifest]:
    arguments = {"gdn_api": hookspecs.GDN_PLUGIN_API} if "gdn_api" in implementation.argnames else {}
    try:
        returned = list(cast("Iterable[Any]", implementation.function(**arguments)))
    except (Exception, SystemExit) as error:
        raise _Failed("hook", error) from error
    return [_validated(raw) for raw in returned]


def _validated(raw: Any) -> BackendManifest:
    if isinstance(raw, BackendManifest):
        return raw
    name = raw.get("name") if isinstance(raw, Mapping) and isinstance(raw.get("name"), str) else None
    if not isinstance(raw, Mapping):
        raise _Failed("validate", TypeError(f"expected a BackendManifest or a mapping, got {type(raw).__name__}"))
    version = raw.get("schema_version", SCHEMA_VERSION)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        newer = ValueError(f"manifest has schema_version {version}, this gdn reads {SCHEMA_VERSION}: needs a newer gdn")
        raise _Failed("version", newer, name)
    try:
        return BackendManifest.model_validate(raw)
    except ValidationError as error:
        raise _Failed("validate", error, name) from error


def _without_collisions(statuses: list[BackendStatus]) -> tuple[BackendStatus, ...]:
    """Of several plugins with one backend name the built-in one stays; of third parties none does."""
    kept: list[BackendStatus] = []
    for status in statuses:
        rivals = [other for other in statuses if other.name == status.name and other is not status and other.ok]
        if not status.ok or not rivals or status.builtin:
            kept.append(status)
            continue
        names = ", ".join(sorted({f"{s.distribution} ({s.entry_point})" for s in (status, *rivals)}))
        error = f"backend name {status.name!r} is registered more than once: {names}"
        kept.append(
            BackendStatus(
                status.name,
                False,
                status.entry_point,
                status.distribution,
                status.version,
                status.path,
                status.builtin,
                stage="collision",
                error=error,
            )
        )
    return tuple(sorted(kept, key=lambda s: (s.name, not s.ok, s.entry_point)))


def _failure_text(status: BackendStatus) -> str:
    remedy = f"; pip uninstall {status.distribution} removes it" if status.distribution and not status.builtin else ""
    return (
        f"backend plugin {status.entry_point} of {status.distribution} {status.version} ({status.path}) failed at "
        f"stage {status.stage}: {status.error}{remedy}"
    )


_registry: Registry | None = None
_registry_lock = threading.Lock()


def get_registry() -> Registry:
    """The process-wide registry."""
    global _registry
    if _registry is None:
        with _registry_lock:
            if _registry is None:
                _registry = Registry()
    return _registry


def clear_registry() -> None:
    """Forget the loaded plugins, so that the next use finds them anew."""
    global _registry
    with _registry_lock:
        _registry = None
