"""Read what SGLang expects of a GDN kernel out of its wheel, by syntax alone: `python tools/read_sglang.py 0.5.23`.

Writes tests/integrations/sglang_interface.json, against which `gdn.integrations.sglang` is tested.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "tests/integrations/sglang_interface.json"
LINEAR = "sglang/srt/layers/attention/linear"


def signatures(tree: ast.Module, name: str) -> dict[str, Any]:
    """Positional and keyword-only parameters of a class's public methods."""
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        method.name: {
            "positional": [a.arg for a in method.args.args[1:]],
            "keyword": [a.arg for a in method.args.kwonlyargs],
        }
        for method in found.body
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
    }


def calls(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Keywords of every call of a method of `kernel_dispatcher`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Attribute) and owner.attr == "kernel_dispatcher":
                yield node.func.attr, sorted(keyword.arg for keyword in node.keywords if keyword.arg)


def attributes(tree: ast.Module) -> list[str]:
    """Everything read from `kernel_dispatcher`."""
    return sorted(
        {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Attribute)
            and node.value.attr == "kernel_dispatcher"
        }
    )


def main() -> int:
    (version,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, f"sglang=={version}"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            kernel = ast.parse(archive.read(f"{LINEAR}/kernels/kernel_backend.py"))
            backend = ast.parse(archive.read(f"{LINEAR}/gdn_backend.py"))
    (base,) = (node for node in kernel.body if isinstance(node, ast.ClassDef) and node.name == "LinearAttnKernelBase")
    interface = {
        "sglang": version,
        "kernel": signatures(kernel, "LinearAttnKernelBase"),
        "kernel_flags": sorted(n.target.id for n in base.body if isinstance(n, ast.AnnAssign)),
        "dispatcher": signatures(backend, "GDNKernelDispatcher"),
        "calls": list(calls(backend)),
        "read": attributes(backend),
    }
    TARGET.write_text(json.dumps(interface, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
