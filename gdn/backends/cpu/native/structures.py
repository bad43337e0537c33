"""The arguments of the native functions, as `src/abi.h` lays them out."""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_int64
from typing import TYPE_CHECKING
from typing import Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

DTYPES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int32: 3, torch.int64: 4, torch.bool: 5}


class View(ctypes.Structure):
    """Element type and strides."""

    _fields_ = (("dtype", c_int64), ("stride", c_int64 * 4))


class Heads(ctypes.Structure):
    """HK, HV, K, V."""

    _fields_ = (("HK", c_int64), ("HV", c_int64), ("K", c_int64), ("V", c_int64))


def view(tensor: Tensor | None, *axes: int) -> View:
    """The strides of some axes of a tensor, in order; all of them by default. None: zeros."""
    if tensor is None:
        return View()
    strides = tensor.stride() if not axes else [tensor.stride(axis) for axis in axes]
    return View(DTYPES[tensor.dtype], (c_int64 * 4)(*strides))


def _plan(numbers: str, views: str, *, heads: bool = True, last: str = "") -> tuple[tuple[str, type], ...]:
    return (
        *((name, c_int64) for name in numbers.split()),
        *((("heads", Heads),) if heads else ()),
        *((name, View) for name in views.split()),
        *((name, c_int64) for name in last.split()),
    )


class DecodePlan(ctypes.Structure):
    _fields_ = _plan(
        "tokens requests slots has_offsets",
        "q k v a b A_log dt_bias state index offsets ring_d ring_k ring_g write_pos flush",
        last="window has_flush",
    )


class VerifyPlan(ctypes.Structure):
    _fields_ = _plan(
        "tokens requests slots rows steps has_buffer has_parents parent_columns",
        "q k v a b A_log dt_bias state index offsets buffer buffer_row parents",
    )


class ExtendPlan(ctypes.Structure):
    _fields_ = _plan(
        "tokens requests slots has_snapshots", "q k v g beta state index offsets snapshot_chunk snapshot_slot"
    )


class GatingPlan(ctypes.Structure):
    _fields_ = _plan("tokens heads", "a b A_log dt_bias", heads=False)


class SplitPlan(ctypes.Structure):
    _fields_ = _plan("tokens bytes key_columns value_columns", "rows", heads=False)


class ConvExtendPlan(ctypes.Structure):
    _fields_ = _plan(
        "dim tokens width requests slots has_bias has_flags silu",
        "x out weight bias state index offsets flags",
        heads=False,
    )


class ConvUpdatePlan(ctypes.Structure):
    _fields_ = _plan(
        "requests dim drafts width slots rows has_bias has_index has_window has_row has_tree has_parents silu",
        "x out weight bias state index window row child sibling parents",
        heads=False,
    )


def _call(pointers: int, *, scale: bool) -> struct.Struct:
    """Addresses, then the scale where there is one, then the number of threads."""
    return struct.Struct(f"={pointers}Q{'d' if scale else ''}q")


ARGUMENTS: Final[dict[str, tuple[type[ctypes.Structure], struct.Struct]]] = {
    "decode": (DecodePlan, _call(16, scale=True)),
    "replay": (DecodePlan, _call(16, scale=True)),
    "verify": (VerifyPlan, _call(14, scale=True)),
    "extend": (ExtendPlan, _call(12, scale=True)),
    "gating": (GatingPlan, _call(6, scale=False)),
    "split": (SplitPlan, _call(4, scale=False)),
    "conv_extend": (ConvExtendPlan, _call(8, scale=False)),
    "conv_update": (ConvUpdatePlan, _call(11, scale=False)),
}
"""Plan and call of every native function."""
