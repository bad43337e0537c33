"""Manifest of the cpu backend. Data only: no kernel is imported here."""

from typing import Final

from gdn.capabilities import BackendManifest
from gdn.capabilities import CapabilityRow
from gdn.capabilities import CpuTarget
from gdn.hookspecs import hookimpl
from gdn.types import DType

_PACKAGE: Final = "gdn.backends.cpu"
_DTYPES: Final[frozenset[DType]] = frozenset({"float32", "float16", "bfloat16"})
_TARGET: Final = CpuTarget()
_REQUIRES: Final = ("torch>=2.9",)
_EVIDENCE: Final = ("ran:cpu",)

_ROWS: Final = (
    CapabilityRow(
        op="decode",
        target=_TARGET,
        dtypes=_DTYPES,
        strided_state=True,
        packed_decode=True,
        replay=True,
        requires=_REQUIRES,
        deterministic=True,
        factory=f"{_PACKAGE}.decode:factory",
        packed_factory=f"{_PACKAGE}.packed:factory",
        replay_factory=f"{_PACKAGE}.replay:factory",
        evidence=_EVIDENCE,
    ),
    CapabilityRow(
        op="extend",
        target=_TARGET,
        dtypes=_DTYPES,
        strided_state=True,
        state_checkpoints=True,
        requires=_REQUIRES,
        deterministic=True,
        factory=f"{_PACKAGE}.extend:factory",
        evidence=_EVIDENCE,
    ),
    CapabilityRow(
        op="verify",
        target=_TARGET,
        dtypes=_DTYPES,
        strided_state=True,
        tree=True,
        requires=_REQUIRES,
        deterministic=True,
        factory=f"{_PACKAGE}.verify:factory",
        tree_factory=f"{_PACKAGE}.verify:factory",
        evidence=_EVIDENCE,
    ),
    CapabilityRow(
        op="conv_extend",
        target=_TARGET,
        dtypes=_DTYPES,
        strided_state=True,
        requires=_REQUIRES,
        deterministic=True,
        factory=f"{_PACKAGE}.conv:extend_factory",
        evidence=_EVIDENCE,
    ),
    CapabilityRow(
        op="conv_update",
        target=_TARGET,
        dtypes=_DTYPES,
        strided_state=True,
        requires=_REQUIRES,
        deterministic=True,
        factory=f"{_PACKAGE}.conv:update_factory",
        evidence=_EVIDENCE,
    ),
    CapabilityRow(
        op="gating",
        target=_TARGET,
        dtypes=_DTYPES,
        strided_state=True,
        requires=_REQUIRES,
        deterministic=True,
        factory=f"{_PACKAGE}.gating:factory",
        evidence=_EVIDENCE,
    ),
    CapabilityRow(
        op="qkv_split",
        target=_TARGET,
        dtypes=_DTYPES,
        strided_state=True,
        requires=_REQUIRES,
        deterministic=True,
        factory=f"{_PACKAGE}.split:factory",
        evidence=_EVIDENCE,
    ),
)

MANIFEST = BackendManifest(
    name="cpu", summary="Any CPU, in vectorised torch: every operation, fp32 arithmetic", capabilities=_ROWS
)


@hookimpl
def gdn_backend_manifests() -> tuple[BackendManifest, ...]:
    return (MANIFEST,)
