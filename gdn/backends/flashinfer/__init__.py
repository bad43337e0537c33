"""Manifest of the flashinfer backend. Data only: no kernel is imported here.

What each row needs of the library is its version bound: separate rows to read and to write, without which a padded
sequence reads outside the pool, and 64-bit offsets of verify came with 0.7.4; the pool of decode and its explicit
`backend` and `disable_state_update` with 0.7.0. K = V = 128 only, whatever the library's own checks let through. The
library requires its torch and its CuTe DSL; that they and Triton can be imported is checked at bind time.
"""

from typing import Any
from typing import Final

from gdn.capabilities import BackendManifest
from gdn.capabilities import CapabilityRow
from gdn.capabilities import CudaTarget
from gdn.capabilities import Dims
from gdn.capabilities import HeadDims
from gdn.hookspecs import hookimpl

_PACKAGE: Final = "gdn.backends.flashinfer"
_COMMON: Final[dict[str, Any]] = {
    "head_dims": HeadDims(k=Dims(values=(128,)), v=Dims(values=(128,))),
    "strided_state": True,
    "state_alignment": 32,
    "cuda_graph": True,
    "evidence": "contract",
}


_HOPPER: Final = (90, 90)
_BLACKWELL: Final = (100, 103)
_CONSUMER_BLACKWELL: Final = (120, 121)

_EXTEND: Final[dict[str, Any]] = {
    **_COMMON,
    "op": "extend",
    "dtypes": frozenset({"bfloat16", "float16"}),
    "state_dtypes": frozenset({"float32", "bfloat16", "float16"}),
    "state_checkpoints": True,
    "requires": "flashinfer-python>=0.7.4",
    "factory": f"{_PACKAGE}.extend:factory",
}
_DECODE: Final[dict[str, Any]] = {
    **_COMMON,
    "op": "decode",
    "dtypes": frozenset({"bfloat16"}),
    "requires": "flashinfer-python>=0.7.0",
    "maturity": "experimental",
    "factory": f"{_PACKAGE}.decode:factory",
}
_VERIFY: Final[dict[str, Any]] = {
    **_COMMON,
    "op": "verify",
    "dtypes": frozenset({"bfloat16"}),
    "max_draft_tokens": 16,
    "maturity": "experimental",
}

_ROWS: Final = (
    CapabilityRow(**_EXTEND, target=CudaTarget(sm_range=_HOPPER)),
    CapabilityRow(**_EXTEND, target=CudaTarget(sm_range=_BLACKWELL, runtime=">=13")),
    CapabilityRow(**_EXTEND, target=CudaTarget(sm_range=(80, 89)), maturity="experimental"),
    CapabilityRow(
        **{**_EXTEND, "state_dtypes": frozenset({"float32"})},
        target=CudaTarget(sm_range=_CONSUMER_BLACKWELL, runtime=">=13"),
        maturity="experimental",
    ),
    CapabilityRow(**_DECODE, target=CudaTarget(sm_range=(_HOPPER, _BLACKWELL)), state_dtypes=frozenset({"float32"})),
    CapabilityRow(
        **_DECODE,
        target=CudaTarget(sm_range=(_HOPPER, _BLACKWELL, _CONSUMER_BLACKWELL)),
        state_dtypes=frozenset({"bfloat16"}),
        reserved_slots=1,
        note="flashinfer decode over a bf16 pool sends padded rows to a scratch slot: allocate state.slots(usable)",
    ),
    CapabilityRow(
        **_VERIFY,
        target=CudaTarget(sm_range=(_HOPPER, _BLACKWELL)),
        state_dtypes=frozenset({"float32"}),
        requires="flashinfer-python>=0.7.4",
        factory=f"{_PACKAGE}.verify:factory",
    ),
    CapabilityRow(
        **_VERIFY,
        target=CudaTarget(sm_range=_HOPPER),
        state_dtypes=frozenset({"bfloat16"}),
        requires="flashinfer-python>=0.7.4",
        factory=f"{_PACKAGE}.verify:tensor_core_factory",
        note="flashinfer verify without a buffer runs on tensor cores through a kernel that the library keeps private",
    ),
    CapabilityRow(
        **_VERIFY,
        target=CudaTarget(sm_range=(_HOPPER, _BLACKWELL, _CONSUMER_BLACKWELL)),
        state_dtypes=frozenset({"bfloat16"}),
        requires="flashinfer-python>=0.7.0",
        factory=f"{_PACKAGE}.verify:factory",
    ),
)

MANIFEST = BackendManifest(
    name="flashinfer", summary="FlashInfer's Gated DeltaNet kernels for NVIDIA GPUs", capabilities=_ROWS
)


@hookimpl
def gdn_backend_manifests() -> tuple[BackendManifest, ...]:
    return (MANIFEST,)
