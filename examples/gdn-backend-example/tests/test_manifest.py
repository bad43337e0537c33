"""The manifest reads where torch can't be imported."""

import subprocess
import sys

CODE = """
import sys
sys.modules["torch"] = None
from gdn_backend_example import MANIFEST
print(MANIFEST.name, *(row.op for row in MANIFEST.capabilities))
"""


def test_the_manifest_needs_no_torch():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["example", "decode"]
