"""Every error that gdn raises on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdn.report import ResolutionReport


class GdnError(Exception):
    """Base of all errors of this package."""


class ConfigError(GdnError, ValueError):
    """A configuration, a selection or an environment variable contradicts itself or can't be read."""


class InputError(GdnError, ValueError):
    """An operation was called with an argument of the wrong rank, shape, dtype or device.

    Raised before anything is written. The text names the argument, what was expected and what was got.
    """


class SlotError(GdnError, RuntimeError):
    """A slot was released that nobody holds, or acquired where none is free."""


class UnknownBackendError(GdnError, LookupError):
    """A backend name that no loaded plugin registered; the text names the nearest one."""


class UnknownDeviceError(GdnError, ValueError):
    """A device string that names no machine, or a device that this host lacks."""


class InstallationError(GdnError, RuntimeError):
    """The entry points of the built-in backends can't be found: gdn is not installed, or a stale install hides it."""


class PluginError(GdnError, RuntimeError):
    """A backend plugin failed to load and GDN_STRICT_PLUGINS asks for an error."""


class ResolutionError(GdnError, RuntimeError):
    """No triple could be built. `report` holds every reason."""

    def __init__(self, message: str, report: ResolutionReport) -> None:
        super().__init__(message)
        self.report = report


class NoBackendError(ResolutionError):
    """No backend serves one of the operations that the config needs."""


class RequirementError(ResolutionError):
    """A required backend can't serve its operation."""


class RankError(GdnError, RuntimeError):
    """Another rank of the group failed while all of them resolved together; the text names it and its error."""


class BackendRefused(GdnError, RuntimeError):
    """Raised by a backend's factory that can't serve this config on this device after all.

    The resolver takes it as one more reason (code `bind_refused`) and tries the next candidate.
    """
