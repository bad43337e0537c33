"""Why a backend doesn't serve an operation: a stable code and a message with what was got and what is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from typing import Literal

ReasonCode = Literal[
    "device_type", "sm_range", "requires_missing", "requires_version", "runtime_version",
    "head_dim", "head_ratio", "activation_dtype", "state_dtype", "op_not_declared",
    "packed_decode", "tree_verify", "replay", "draft_tokens",
    "strided_state", "state_checkpoints", "conv_width", "deterministic", "cuda_graph",
    "excluded", "disabled", "experimental", "bind_refused", "plugin_broken", "policy",
]  # fmt: skip

REASON_CODES: Final[dict[ReasonCode, str]] = {
    "device_type": "The row is for another kind of device, chip or CPU feature set.",
    "sm_range": "The GPU's compute capability is outside the row's closed ranges.",
    "requires_missing": "A distribution that the row requires is not installed.",
    "requires_version": "A required distribution is installed in a version that the row excludes.",
    "runtime_version": "The CUDA runtime that torch was built with is outside the row's range, or unknown.",
    "head_dim": "K or V is not served.",
    "head_ratio": "HV // HK is not served.",
    "activation_dtype": "The activation dtype is not served.",
    "state_dtype": "The dtype or layout of the shared state pool is not served.",
    "op_not_declared": "The manifest has no row for the operation: the backend has no such kernel.",
    "packed_decode": "The backend that serves decode has no kernel over packed mixed_qkv.",
    "tree_verify": "The row verifies chains only.",
    "replay": "The config asks for a ReplaySSM ring, or the operation is replay_decode, and the row has none.",
    "draft_tokens": "The config verifies more draft tokens than the row takes.",
    "strided_state": "The config's pool is strided and the row needs a contiguous one.",
    "state_checkpoints": "The config needs states at chunk boundaries and the row delivers none.",
    "conv_width": "The convolution's width is not served.",
    "deterministic": "The config asks for determinism and the row doesn't promise it.",
    "cuda_graph": "The operation will be captured in a CUDA graph and the row doesn't promise that it can.",
    "excluded": "The call's `exclude` names the backend.",
    "disabled": "`GDN_DISABLE_BACKENDS` names the backend.",
    "experimental": "The row is experimental: it is used only where `require` or `prefer` names the backend.",
    "bind_refused": "The row matched, but its factory refused or failed when it was asked to build the kernel.",
    "plugin_broken": "The plugin failed to load; the message says at which stage and why.",
    "policy": "The row matches but another backend is ranked before it, or another one is required.",
}
"""Every code with its meaning. Codes are stable; messages may be reworded."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One constraint that failed."""

    code: ReasonCode
    message: str
