"""Third-party backend distributions: one that works, and one for each way to fail."""

from __future__ import annotations

from pathlib import Path

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{name}"
version = "1.2.3"
[project.entry-points."gdn.backends"]
{entry} = "{module}"
[tool.hatch.build.targets.wheel]
packages = ["{module}.py"]
"""

GOOD = """
from gdn import BackendManifest, CapabilityRow, hookimpl
from gdn.capabilities import CpuTarget

ROWS = tuple(
    CapabilityRow(op=op, target=CpuTarget(), dtypes=["bfloat16"], factory="gdn_acme:build", evidence="contract")
    for op in ("decode", "extend", "verify")
)

def build(context):
    def operation(*args, **kwargs):
        return context.operation
    return operation

@hookimpl
def gdn_backend_manifests(gdn_api):
    assert gdn_api >= 1
    return [BackendManifest(name="acme", summary="a third party", capabilities=ROWS)]
"""

NAMED = """
from gdn import hookimpl

@hookimpl
def gdn_backend_manifests():
    return [{manifest}]
"""

MODULES = {
    "acme": GOOD,
    "missing-library": "import library_that_is_not_here",
    "bad-symbol": "raise OSError('libacme.so: undefined symbol: gdn_go')",
    "exits": "import sys; sys.exit(3)",
    "unknown-hook": "from gdn import hookimpl\n@hookimpl\ndef gdn_backend_manifest():\n    return []",
    "no-hook": "x = 1",
    "raising-hook": "from gdn import hookimpl\n@hookimpl\ndef gdn_backend_manifests():\n    raise RuntimeError('no config')",
    "too-new": NAMED.format(manifest={"name": "future", "schema_version": 99, "capabilities": []}),
    "invalid": NAMED.format(manifest={"name": "invalid", "capabilities": [{"op": "decode"}]}),
    "not-a-manifest": NAMED.format(manifest=42),
    "shadow": NAMED.format(manifest={"name": "cpu"}),
    "twin-one": NAMED.format(manifest={"name": "twin"}),
    "twin-two": NAMED.format(manifest={"name": "twin"}),
}

STAGES = {
    "missing-library": ("load", "ModuleNotFoundError: No module named 'library_that_is_not_here'"),
    "bad-symbol": ("load", "OSError: libacme.so: undefined symbol"),
    "exits": ("load", "SystemExit: 3"),
    "unknown-hook": ("register", "gdn_backend_manifest"),
    "no-hook": ("hook", "implements no hook"),
    "raising-hook": ("hook", "RuntimeError: no config"),
    "too-new": ("version", "schema_version 99"),
    "invalid": ("validate", "target"),
    "not-a-manifest": ("validate", "got int"),
    "shadow": ("collision", "'cpu' is registered more than once"),
    "twin-one": ("collision", "gdn-twin-two"),
    "twin-two": ("collision", "gdn-twin-one"),
}


def write_distributions(folder: Path) -> list[Path]:
    """Source trees, ready for pip."""
    trees = []
    for entry, code in MODULES.items():
        module = f"gdn_{entry.replace('-', '_')}"
        tree = folder / entry
        tree.mkdir()
        (tree / "pyproject.toml").write_text(PYPROJECT.format(name=f"gdn-{entry}", entry=entry, module=module))
        (tree / f"{module}.py").write_text(code)
        trees.append(tree)
    return trees
