"""FlashInfer's functions, fetched at bind time and checked against what the adapters pass."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any
from typing import Final

from gdn.errors import BackendRefused

ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    "gdn_prefill:chunk_gated_delta_rule": (
        "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "cu_seqlens",
        "use_qk_l2norm_in_kernel", "output", "output_state", "state_checkpoints", "checkpoint_cu_starts",
        "checkpoint_every_n_tokens", "use_cp", "state_indices", "backend", "output_state_indices",
        "checkpoint_state_indices",
    ),
    "gdn_decode:gated_delta_rule_decode_pretranspose": (
        "q", "k", "v", "state", "A_log", "a", "dt_bias", "b", "scale", "output", "use_qk_l2norm", "initial_state",
        "initial_state_indices", "intermediate_states_buffer", "disable_state_update", "backend",
    ),
    "gdn_decode:gated_delta_rule_mtp": (
        "q", "k", "v", "initial_state", "initial_state_indices", "A_log", "a", "dt_bias", "b", "scale", "output",
        "intermediate_states_buffer", "disable_state_update", "use_qk_l2norm",
    ),
    "gdn_kernels:gated_delta_rule_mtp_wy_output_only": (
        "A_log", "a", "dt_bias", "q", "k", "v", "b", "initial_state_source", "initial_state_indices",
        "disable_state_update", "use_qk_l2norm_in_kernel", "scale", "output",
    ),
}  # fmt: skip
"""Every function that an adapter calls, and the arguments that it passes, by name."""

BF16_KERNELS: Final = "gated_delta_rule"
"""Symbol of `flashinfer.gdn_kernels` that is None where the kernels for bf16 pools failed to import."""
FP32_DECODE_KERNEL: Final = "run_pretranspose_decode"
FP32_VERIFY_KERNEL: Final = "run_mtp_decode"


def function(name: str, *, kernel: str | None = None) -> Callable[..., Any]:
    """The function "module:name" of the package.

    Args:
        name: a key of `ARGUMENTS`.
        kernel: a symbol of `flashinfer.gdn_kernels` without which the function would fail when called.

    Raises:
        BackendRefused: it isn't there, or doesn't take the arguments that the adapters pass.
    """
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] | None = getattr(_module(module), attribute, None)
    if found is None:
        raise BackendRefused(f"flashinfer.{module}.{attribute} is missing: its imports failed or it was renamed")
    if kernel is not None and getattr(_module("gdn_kernels"), kernel, None) is None:
        raise BackendRefused(f"flashinfer.gdn_kernels.{kernel} is missing: CuTe DSL failed to import there")
    taken = inspect.signature(found).parameters
    if missing := [argument for argument in ARGUMENTS[name] if argument not in taken]:
        raise BackendRefused(f"flashinfer.{module}.{attribute} takes no argument {', '.join(missing)}")
    return found


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"flashinfer.{name}")
    except ImportError as error:
        raise BackendRefused(f"flashinfer.{name} can't be imported: {error}") from error
