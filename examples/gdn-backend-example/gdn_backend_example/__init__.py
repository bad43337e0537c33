"""Manifest of the example backend. Data only: this module is imported to list backends, where torch may be missing."""

from gdn import BackendManifest
from gdn import hookimpl

DECODE = {
    "op": "decode",
    "target": {"platform": "cpu"},
    "dtypes": ["float32", "float16", "bfloat16"],
    "state_dtypes": ["float32", "float16", "bfloat16"],
    "strided_state": True,
    "requires": ["torch>=2.9"],
    "factory": "gdn_backend_example.decode:factory",
    "evidence": "ran:cpu",
}

MANIFEST = BackendManifest(name="example", summary="decode, all requests of a batch at once", capabilities=[DECODE])


@hookimpl
def gdn_backend_manifests():
    return [MANIFEST]
