"""Precisions of products on tensor cores, by dtype and device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl

if TYPE_CHECKING:
    from gdn.device import DeviceInfo

_TRITON_DTYPE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def fp32_precision(device: DeviceInfo | None) -> str:
    """Of fp32 products that must be as good as fp32 arithmetic."""
    return "tf32x3" if _has_tf32(device) else "ieee"


def chunk_precision(dtype: torch.dtype, device: DeviceInfo | None) -> str:
    """Of a chunk's fp32 products: as precise as the activations need. fp16 goes through tf32, whose range a state can't
    leave.
    """
    return "tf32" if dtype != torch.float32 and _has_tf32(device) else "ieee"


def raw_product(activations: torch.dtype, stored: torch.dtype, device: DeviceInfo | None) -> tuple[tl.dtype, str]:
    """Operand dtype and precision of `raw_dot`, for raw activations times a state: as good as fp32 arithmetic.
    16-bit numbers are exact in tf32.
    """
    if activations == stored and activations in _TRITON_DTYPE:
        return _TRITON_DTYPE[activations], "ieee"
    if activations.itemsize == 2 and _has_tf32(device):
        return tl.float32, "tf32" if stored.itemsize == 2 else "split"
    return tl.float32, fp32_precision(device)


def _has_tf32(device: DeviceInfo | None) -> bool:
    return device is not None and device.type == "cuda"
