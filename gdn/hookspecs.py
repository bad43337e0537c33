"""The one hook that a backend package implements."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Any
from typing import Final

import pluggy

if TYPE_CHECKING:
    from gdn.capabilities import BackendManifest

PROJECT: Final = "gdn"
ENTRY_POINT_GROUP: Final = "gdn.backends"
GDN_PLUGIN_API: Final = 1
"""Version of the plugin interface, given to the hook. It rises when a hook changes incompatibly."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def gdn_backend_manifests(gdn_api: int) -> Iterable[BackendManifest | Mapping[str, Any]]:  # type: ignore[empty-body]
    """Return the manifests of this distribution.

    Pure data: import no framework and query no device here. A plain mapping is accepted in place of a model, so that
    a manifest written for a newer schema is reported as such instead of failing in its own import.

    Args:
        gdn_api: the host's plugin interface version, `GDN_PLUGIN_API`.
    """
