"""The GDN_* variables: one table, read when needed, never at import."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import Final

from gdn.types import CORE_OPERATIONS

logger = logging.getLogger("gdn.resolver")


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable, as the docs list it."""

    name: str
    meaning: str
    default: str = ""


VARIABLES: Final = (
    Variable("GDN_BACKEND", "Backend required for decode, extend and verify where the call requires none."),
    Variable("GDN_BACKEND_DECODE", "The same for decode alone; beats `GDN_BACKEND`."),
    Variable("GDN_BACKEND_EXTEND", "The same for extend alone."),
    Variable("GDN_BACKEND_VERIFY", "The same for verify alone."),
    Variable("GDN_DISABLE_BACKENDS", "Comma-separated backends that must not be used; beats everything else."),
    Variable(
        "GDN_CACHE_DIR", "Folder in which backends keep compiled kernels; `off`: nowhere.", "the user's cache folder"
    ),
    Variable("GDN_PLUGINS", "Comma-separated distributions whose plugins may load beside the built-in ones.", "all"),
    Variable("GDN_STRICT_PLUGINS", "`1`: a plugin that fails to load raises `gdn.PluginError`.", "0"),
)
"""Every variable that gdn reads. A new one is added here first; the docs and the unknown-name check follow."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What the variables say."""

    backend: str | None = None
    backend_by_operation: Mapping[str, str] = field(default_factory=dict)
    disabled: tuple[str, ...] = ()
    plugins: tuple[str, ...] | None = None
    """Distributions allowed to load; None: all."""
    strict_plugins: bool = False
    unknown: tuple[str, ...] = ()
    """Names that no table row has, each with the nearest known one."""


_warned: set[tuple[str, ...]] = set()


def read_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Read all variables; unknown GDN_* names are warned about once per distinct set."""
    known = [variable.name for variable in VARIABLES]
    unknown = tuple(sorted(name for name in environ if name.startswith("GDN_") and name not in known))
    if unknown and unknown not in _warned:
        _warned.add(unknown)
        for name in unknown:
            near = difflib.get_close_matches(name, known, n=1)
            logger.warning("unknown variable %s is ignored%s", name, f"; did you mean {near[0]}?" if near else "")
    by_operation: dict[str, str] = {
        operation: name
        for operation in CORE_OPERATIONS
        if (name := environ.get(f"GDN_BACKEND_{operation.upper()}", "").strip())
    }
    allowed = _names(environ.get("GDN_PLUGINS", ""))
    return Environment(
        backend=environ.get("GDN_BACKEND", "").strip() or None,
        backend_by_operation=by_operation,
        disabled=_names(environ.get("GDN_DISABLE_BACKENDS", "")),
        plugins=allowed or None,
        strict_plugins=environ.get("GDN_STRICT_PLUGINS", "").strip() not in ("", "0"),
        unknown=unknown,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for part in text.split(",") if (name := part.strip()))
