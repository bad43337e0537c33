"""The built-in backends. Called, `gdn.backends()` lists every backend plugin found, as `gdn.api.backends` does.

Loading any backend makes Python bind this package to the name that `gdn` gives to that function, so the package answers
for both.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self) -> Any:
        """Every backend plugin found, loaded or failed: a tuple of `gdn.BackendStatus`."""
        return importlib.import_module("gdn.api").backends()


sys.modules[__name__].__class__ = _CallablePackage
