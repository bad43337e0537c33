"""gdn: one interface to every Gated DeltaNet kernel.

`gdn.resolve(config)` picks the backends that serve a model on this machine and returns bound operations;
`gdn.explain(config)` says why, for any machine. Importing gdn imports no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING
from typing import Any
from typing import Final

from gdn._version import __version__

if TYPE_CHECKING:
    from gdn import distributed
    from gdn.api import backends
    from gdn.api import clear_cache
    from gdn.api import explain
    from gdn.api import resolve
    from gdn.binding import BindContext
    from gdn.capabilities import BackendManifest
    from gdn.capabilities import CapabilityRow
    from gdn.config import GdnConfig
    from gdn.config import presets
    from gdn.device import DeviceInfo
    from gdn.device import detect_device
    from gdn.errors import BackendRefused
    from gdn.errors import ConfigError
    from gdn.errors import GdnError
    from gdn.errors import InputError
    from gdn.errors import InstallationError
    from gdn.errors import NoBackendError
    from gdn.errors import PluginError
    from gdn.errors import RankError
    from gdn.errors import RequirementError
    from gdn.errors import ResolutionError
    from gdn.errors import SlotError
    from gdn.errors import UnknownBackendError
    from gdn.errors import UnknownDeviceError
    from gdn.hookspecs import GDN_PLUGIN_API
    from gdn.hookspecs import hookimpl
    from gdn.ops import ExtendResult
    from gdn.registry import BackendStatus
    from gdn.report import Rejection
    from gdn.report import ResolutionReport
    from gdn.serving.attention import GdnAttention
    from gdn.serving.batch import Batch
    from gdn.serving.parameters import LayerParams
    from gdn.serving.pool import StatePool
    from gdn.triple import ResolvedTriple
    from gdn.types import StateContract

_HOMES: Final = {
    "gdn.api": ("backends", "clear_cache", "explain", "resolve"),
    "gdn.binding": ("BindContext",),
    "gdn.capabilities": ("BackendManifest", "CapabilityRow"),
    "gdn.config": ("GdnConfig", "presets"),
    "gdn.device": ("DeviceInfo", "detect_device"),
    "gdn.errors": (
        "BackendRefused",
        "ConfigError",
        "GdnError",
        "InputError",
        "InstallationError",
        "NoBackendError",
        "PluginError",
        "RankError",
        "RequirementError",
        "ResolutionError",
        "SlotError",
        "UnknownBackendError",
        "UnknownDeviceError",
    ),
    "gdn.hookspecs": ("GDN_PLUGIN_API", "hookimpl"),
    "gdn.ops": ("ExtendResult",),
    "gdn.registry": ("BackendStatus",),
    "gdn.report": ("Rejection", "ResolutionReport"),
    "gdn.serving.attention": ("GdnAttention",),
    "gdn.serving.batch": ("Batch",),
    "gdn.serving.parameters": ("LayerParams",),
    "gdn.serving.pool": ("StatePool",),
    "gdn.triple": ("ResolvedTriple",),
    "gdn.types": ("StateContract",),
}
"""Where each public name lives. Modules are imported when one of their names is first used: `import gdn` stays cheap in
programs that only pass it on.
"""

__all__ = [
    "GDN_PLUGIN_API",
    "BackendManifest",
    "BackendRefused",
    "BackendStatus",
    "Batch",
    "BindContext",
    "CapabilityRow",
    "ConfigError",
    "DeviceInfo",
    "ExtendResult",
    "GdnAttention",
    "GdnConfig",
    "GdnError",
    "InputError",
    "InstallationError",
    "LayerParams",
    "NoBackendError",
    "PluginError",
    "RankError",
    "Rejection",
    "RequirementError",
    "ResolutionError",
    "ResolutionReport",
    "ResolvedTriple",
    "SlotError",
    "StateContract",
    "StatePool",
    "UnknownBackendError",
    "UnknownDeviceError",
    "__version__",
    "backends",
    "clear_cache",
    "detect_device",
    "distributed",
    "explain",
    "hookimpl",
    "presets",
    "resolve",
]


def __getattr__(name: str) -> Any:
    if name == "distributed":
        return importlib.import_module("gdn.distributed")
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
