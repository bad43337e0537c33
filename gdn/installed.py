"""Which distributions are installed, and what-if overlays."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from functools import lru_cache
from importlib import metadata
from typing import Final

from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gdn.errors import ConfigError

NEWEST: Final = "99999"
"""The version of a distribution that is assumed installed without one: newer than any lower bound."""


@lru_cache(maxsize=256)
def installed_version(name: str) -> str | None:
    """The version of an installed distribution, or None. Cached; `cache_clear()` after installing at run time."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def assume_installed(requirements: Iterable[str]) -> Callable[[str], str | None]:
    """`installed_version` with more distributions: "flashinfer-python==0.7.4", or a bare name for the newest.

    Raises:
        ConfigError: a text that is neither a name nor `name==version`.
    """
    assumed: dict[str, str] = {}
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise ConfigError(f"assume_installed: {text!r} is not a requirement: {error}") from error
        exact = [specifier.version for specifier in requirement.specifier if specifier.operator == "=="]
        if len(requirement.specifier) != len(exact) or len(exact) > 1:
            raise ConfigError(f"assume_installed: {text!r} must be NAME or NAME==VERSION")
        assumed[canonicalize_name(requirement.name)] = exact[0] if exact else NEWEST

    def version(name: str) -> str | None:
        return assumed.get(canonicalize_name(name)) or installed_version(name)

    return version
