"""Manifest of the cutedsl backend. Data only: no kernel is imported here."""

from typing import Any
from typing import Final

from gdn.capabilities import BackendManifest
from gdn.capabilities import CapabilityRow
from gdn.capabilities import CudaTarget
from gdn.capabilities import Dims
from gdn.capabilities import HeadDims
from gdn.hookspecs import hookimpl

_PACKAGE: Final = "gdn.backends.cutedsl"

_COMMON: Final[dict[str, Any]] = {
    "target": CudaTarget(sm_range=((90, 90), (100, 100), (103, 103), (120, 120))),
    "head_dims": HeadDims(k=Dims(values=(32, 64, 128, 256)), v=Dims(min=16, max=256, multiple_of=16)),
    "dtypes": frozenset({"float16", "bfloat16"}),
    "strided_state": True,
    "state_alignment": 16,
    "requires": ("torch>=2.9", "nvidia-cutlass-dsl>=4.8", "apache-tvm-ffi"),
    "deterministic": True,
    "cuda_graph": True,
    "evidence": ("compiled:sm90a", "compiled:sm100a", "compiled:sm103a", "compiled:sm120a"),
    "note": "compiles its kernels on first use, and keeps them in GDN_CACHE_DIR",
}

_ROWS: Final = (
    CapabilityRow(
        **_COMMON,
        op="decode",
        packed_decode=True,
        factory=f"{_PACKAGE}.decode:factory",
        packed_factory=f"{_PACKAGE}.decode:packed_factory",
    ),
    CapabilityRow(
        **_COMMON,
        op="verify",
        max_draft_tokens=16,
        tree=True,
        factory=f"{_PACKAGE}.verify:factory",
        tree_factory=f"{_PACKAGE}.verify:factory",
    ),
)

MANIFEST = BackendManifest(
    name="cutedsl", summary="CuTe DSL kernels for NVIDIA GPUs", maturity="experimental", capabilities=_ROWS
)
"""Experimental as a whole: nothing of it has run on a GPU yet."""


@hookimpl
def gdn_backend_manifests() -> tuple[BackendManifest, ...]:
    return (MANIFEST,)
