"""Manifest of the triton backend. Data only: no kernel is imported here."""

from itertools import product
from typing import Any
from typing import Final

from gdn.capabilities import BackendManifest
from gdn.capabilities import CapabilityRow
from gdn.capabilities import CudaTarget
from gdn.capabilities import Dims
from gdn.capabilities import HeadDims
from gdn.capabilities import RocmTarget
from gdn.hookspecs import hookimpl

_PACKAGE: Final = "gdn.backends.triton"

_TARGETS: Final[tuple[tuple[Any, tuple[str, ...]], ...]] = (
    (
        CudaTarget(sm_range=(80, 121)),
        ("compiled:sm80", "compiled:sm89", "compiled:sm100", "compiled:sm120", "interpreted"),
    ),
    (RocmTarget(gfx=("gfx942", "gfx950")), ("compiled:gfx942", "compiled:gfx950", "interpreted")),
)

_COMMON: Final[dict[str, Any]] = {
    "dtypes": frozenset({"float32", "float16", "bfloat16"}),
    "head_dims": HeadDims(k=Dims(min=16, max=256), v=Dims(min=16, max=256)),
    "strided_state": True,
    "requires": ("torch>=2.9", "triton>=3.4"),
    "deterministic": True,
    "cuda_graph": True,
}

_OPERATIONS: Final[tuple[dict[str, Any], ...]] = (
    {
        "op": "decode",
        "packed_decode": True,
        "replay": True,
        "factory": f"{_PACKAGE}.decode:factory",
        "packed_factory": f"{_PACKAGE}.decode:packed_factory",
        "replay_factory": f"{_PACKAGE}.replay:factory",
    },
    {"op": "extend", "state_checkpoints": True, "factory": f"{_PACKAGE}.extend:factory"},
    {
        "op": "verify",
        "tree": True,
        "factory": f"{_PACKAGE}.verify:factory",
        "tree_factory": f"{_PACKAGE}.verify:factory",
    },
    {"op": "conv_extend", "conv_widths": Dims(min=2, max=8), "factory": f"{_PACKAGE}.conv:extend_factory"},
    {"op": "conv_update", "conv_widths": Dims(min=2, max=8), "factory": f"{_PACKAGE}.conv:update_factory"},
    {"op": "gating", "factory": f"{_PACKAGE}.gating:factory"},
    {"op": "qkv_split", "factory": f"{_PACKAGE}.split:factory"},
)

_RERUN_DUE: Final = frozenset({"extend", "verify"})
"""Operations whose present kernels have not passed the whole suite on SM90 (benchmarks/results/h200-conformance.md)."""


def _evidence(operation: str, target: Any, compiled: tuple[str, ...]) -> tuple[str, ...]:
    if target.platform != "cuda":
        return compiled
    return ("compiled:sm90" if operation in _RERUN_DUE else "ran:sm90", *compiled)


_ROWS: Final = tuple(
    CapabilityRow(**_COMMON, **operation, target=target, evidence=_evidence(operation["op"], target, compiled))
    for operation, (target, compiled) in product(_OPERATIONS, _TARGETS)
)

MANIFEST = BackendManifest(name="triton", summary="Triton kernels for NVIDIA and AMD GPUs", capabilities=_ROWS)


@hookimpl
def gdn_backend_manifests() -> tuple[BackendManifest, ...]:
    return (MANIFEST,)
