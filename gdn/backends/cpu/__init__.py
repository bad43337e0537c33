"""Manifest of the cpu backend. Data only: no kernel is imported here."""

from typing import Any
from typing import Final

from gdn.capabilities import BackendManifest
from gdn.capabilities import CapabilityRow
from gdn.capabilities import CpuTarget
from gdn.capabilities import Dims
from gdn.capabilities import HeadDims
from gdn.hookspecs import hookimpl

_TORCH: Final = "gdn.backends.cpu"
_NATIVE: Final = "gdn.backends.cpu.native"

_COMMON: Final[dict[str, Any]] = {
    "target": CpuTarget(),
    "dtypes": frozenset({"float32", "float16", "bfloat16"}),
    "strided_state": True,
    "requires": ("torch>=2.9",),
    "evidence": ("ran:cpu",),
}

_NATIVE_ROWS: Final[tuple[dict[str, Any], ...]] = (
    {
        "op": "decode",
        "packed_decode": True,
        "replay": True,
        "factory": f"{_NATIVE}.decode:factory",
        "packed_factory": f"{_NATIVE}.decode:packed_factory",
        "replay_factory": f"{_NATIVE}.decode:replay_factory",
    },
    {"op": "extend", "state_checkpoints": True, "factory": f"{_NATIVE}.extend:factory"},
    {
        "op": "verify",
        "tree": True,
        "factory": f"{_NATIVE}.verify:factory",
        "tree_factory": f"{_NATIVE}.verify:factory",
    },
    {"op": "conv_extend", "factory": f"{_NATIVE}.conv:extend_factory"},
    {"op": "conv_update", "factory": f"{_NATIVE}.conv:update_factory"},
    {"op": "gating", "factory": f"{_NATIVE}.gating:factory"},
    {"op": "qkv_split", "factory": f"{_NATIVE}.gating:split_factory"},
)
"""Asked first. They are compiled on first use; where that can't be done, the factories refuse and say why."""

_RECURRENT: Final[tuple[dict[str, Any], ...]] = (
    {
        "op": "decode",
        "packed_decode": True,
        "replay": True,
        "factory": f"{_TORCH}.decode:factory",
        "packed_factory": f"{_TORCH}.packed:factory",
        "replay_factory": f"{_TORCH}.replay:factory",
    },
    {"op": "extend", "state_checkpoints": True, "factory": f"{_TORCH}.extend:factory"},
    {
        "op": "verify",
        "tree": True,
        "factory": f"{_TORCH}.verify:factory",
        "tree_factory": f"{_TORCH}.verify:factory",
    },
)

_ELEMENTWISE: Final[tuple[dict[str, Any], ...]] = (
    {"op": "conv_extend", "factory": f"{_TORCH}.conv:extend_factory"},
    {"op": "conv_update", "factory": f"{_TORCH}.conv:update_factory"},
    {"op": "gating", "factory": f"{_TORCH}.gating:factory"},
    {"op": "qkv_split", "factory": f"{_TORCH}.split:factory"},
)

_WHOLE_VECTORS: Final = Dims(multiple_of=16)
_REPRODUCIBLE: Final[dict[str, Any]] = {
    "head_dims": HeadDims(k=_WHOLE_VECTORS, v=_WHOLE_VECTORS),
    "state_alignment": 64,
    "deterministic": True,
    "note": "cpu: vectorised torch in force; BLAS products give equal bits only over equally aligned memory",
}
_TORCH_NOTE: Final = "cpu: vectorised torch in force"

_ROWS: Final = (
    *(CapabilityRow(**_COMMON, **row, deterministic=True, note="cpu: native kernels in force") for row in _NATIVE_ROWS),
    *(CapabilityRow(**_COMMON, **row, note=_TORCH_NOTE) for row in _RECURRENT),
    *(CapabilityRow(**_COMMON, **row, **_REPRODUCIBLE) for row in _RECURRENT),
    *(CapabilityRow(**_COMMON, **row, deterministic=True, note=_TORCH_NOTE) for row in _ELEMENTWISE),
)

MANIFEST = BackendManifest(
    name="cpu",
    summary="Any CPU: native kernels compiled on first use, else vectorised torch; every operation",
    capabilities=_ROWS,
)


@hookimpl
def gdn_backend_manifests() -> tuple[BackendManifest, ...]:
    return (MANIFEST,)
