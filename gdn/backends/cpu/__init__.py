"""Manifest of the cpu backend. Data only: no kernel is imported here."""

from typing import Any
from typing import Final

from gdn.capabilities import BackendManifest
from gdn.capabilities import CapabilityRow
from gdn.capabilities import CpuTarget
from gdn.capabilities import Dims
from gdn.capabilities import HeadDims
from gdn.hookspecs import hookimpl

_PACKAGE: Final = "gdn.backends.cpu"

_COMMON: Final[dict[str, Any]] = {
    "target": CpuTarget(),
    "dtypes": frozenset({"float32", "float16", "bfloat16"}),
    "strided_state": True,
    "requires": ("torch>=2.9",),
    "evidence": ("ran:cpu",),
}

_RECURRENT: Final[tuple[dict[str, Any], ...]] = (
    {
        "op": "decode",
        "packed_decode": True,
        "replay": True,
        "factory": f"{_PACKAGE}.decode:factory",
        "packed_factory": f"{_PACKAGE}.packed:factory",
        "replay_factory": f"{_PACKAGE}.replay:factory",
    },
    {"op": "extend", "state_checkpoints": True, "factory": f"{_PACKAGE}.extend:factory"},
    {
        "op": "verify",
        "tree": True,
        "factory": f"{_PACKAGE}.verify:factory",
        "tree_factory": f"{_PACKAGE}.verify:factory",
    },
)

_ELEMENTWISE: Final[tuple[dict[str, Any], ...]] = (
    {"op": "conv_extend", "factory": f"{_PACKAGE}.conv:extend_factory"},
    {"op": "conv_update", "factory": f"{_PACKAGE}.conv:update_factory"},
    {"op": "gating", "factory": f"{_PACKAGE}.gating:factory"},
    {"op": "qkv_split", "factory": f"{_PACKAGE}.split:factory"},
)

_WHOLE_VECTORS: Final = Dims(multiple_of=16)
_REPRODUCIBLE: Final[dict[str, Any]] = {
    "head_dims": HeadDims(k=_WHOLE_VECTORS, v=_WHOLE_VECTORS),
    "state_alignment": 64,
    "deterministic": True,
    "note": "BLAS products give equal bits only over equally aligned memory",
}

_ROWS: Final = (
    *(CapabilityRow(**_COMMON, **row) for row in _RECURRENT),
    *(CapabilityRow(**_COMMON, **row, **_REPRODUCIBLE) for row in _RECURRENT),
    *(CapabilityRow(**_COMMON, **row, deterministic=True) for row in _ELEMENTWISE),
)

MANIFEST = BackendManifest(
    name="cpu", summary="Any CPU, in vectorised torch: every operation, fp32 arithmetic", capabilities=_ROWS
)


@hookimpl
def gdn_backend_manifests() -> tuple[BackendManifest, ...]:
    return (MANIFEST,)
