"""Write the generated parts of the docs; with --check, fail where a file differs from what would be written."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import gdn
from gdn.capabilities import manifest_schema
from gdn.config import presets
from gdn.environment import VARIABLES
from gdn.reasons import REASON_CODES
from gdn.registry import BackendStatus
from gdn.render import markdown

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- generated: {} -->", "<!-- end generated -->"


def backend_table() -> str:
    report = gdn.explain(presets()["qwen3-next-80b-a3b"], device="cpu")
    builtin = tuple(status for status in gdn.backends() if status.builtin)
    return markdown(report, builtin, manifests_only=True)


def example_table() -> str:
    sys.path.insert(0, str(ROOT / "examples/gdn-backend-example"))
    manifest = importlib.import_module("gdn_backend_example").MANIFEST
    status = BackendStatus(manifest.name, True, "example", "gdn-backend-example", None, None, False, manifest)
    return markdown(gdn.explain(presets()["qwen3-next-80b-a3b"], device="cpu"), (status,), manifests_only=True)


def reason_table() -> str:
    rows = [f"| `{code}` | {meaning} |" for code, meaning in REASON_CODES.items()]
    return "\n".join(["| code | meaning |", "|---|---|", *rows]) + "\n"


def environment_table() -> str:
    rows = [f"| `{v.name}` | {v.meaning} | {v.default or 'unset'} |" for v in VARIABLES]
    return "\n".join(["| variable | meaning | default |", "|---|---|---|", *rows]) + "\n"


def preset_table() -> str:
    rows = [
        f"| `{n}` | {c.num_k_heads} | {c.num_v_heads} | {c.head_k_dim} | {c.head_v_dim} |" for n, c in presets().items()
    ]
    return "\n".join(["| preset | HK | HV | K | V |", "|---|---|---|---|---|", *rows]) + "\n"


SECTIONS = {
    "docs/backends.md": {"backends": backend_table},
    "docs/write-a-backend.md": {"example": example_table},
    "docs/reasons.md": {"reasons": reason_table},
    "docs/environment.md": {"environment": environment_table},
    "docs/command-line.md": {"presets": preset_table},
}


def filled(text: str, name: str, content: str) -> str:
    """`text` with the generated section `name` replaced."""
    begin = BEGIN.format(name)
    before, found, rest = text.partition(begin)
    if not found or END not in rest:
        raise SystemExit(f"no section {begin} ... {END}")
    after = rest.partition(END)[2]
    return f"{before}{begin}\n{content}{END}{after}"


def generated() -> dict[Path, str]:
    files = {}
    for file, sections in SECTIONS.items():
        text = (ROOT / file).read_text()
        for name, write in sections.items():
            text = filled(text, name, write())
        files[ROOT / file] = text
    files[ROOT / "docs/manifest-v1.schema.json"] = json.dumps(manifest_schema(), indent=2, sort_keys=True) + "\n"
    return files


def main() -> int:
    stale = [path for path, text in generated().items() if path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run `make regenerate`")
        return 1 if stale else 0
    for path, text in generated().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
