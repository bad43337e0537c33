"""Stands in for a GPU: `function_of` of `gdn.backends.cutedsl.compiled`, over CPU tensors and `ptx_machine`."""

from __future__ import annotations

import ctypes
import functools
import struct
import tempfile
from typing import TYPE_CHECKING
from typing import Any

import cutlass.cute as cute
import numpy as np
from cutlass.base_dsl.compiler import DumpDir

from gdn.backends.cutedsl.compiled import Argument
from gdn.backends.cutedsl.compiled import compile_kernel
from tests.backends.cutedsl.ptx_machine import Machine
from tests.backends.cutedsl.ptx_machine import Region
from tests.backends.cutedsl.ptx_program import Program
from tests.backends.cutedsl.ptx_program import parse

if TYPE_CHECKING:
    import torch

INDICES = 8
"""Place of cache_indices among a kernel's tensors."""


def function_of(kernel: Any, arguments: tuple[Argument, ...], architecture: str):
    """Compiles, and runs the PTX on each call, warps in one order and then in the other."""
    program = _program(kernel, arguments, architecture)

    def function(*given: Any) -> None:
        *tensors, scale = given
        for tensor, argument in zip(tensors, arguments, strict=True):
            _check(tensor, argument)
        packed = [_packed(tensor, argument) for tensor, argument in zip(tensors, arguments, strict=True)]
        packed.append(struct.pack("f", scale))
        regions = {region.begin: region for tensor in tensors for region in _regions(tensor)}
        grid = kernel.blocks(tensors[INDICES])
        kept = [region.data.copy() for region in regions.values()]
        for reverse in (False, True):
            for region, data in zip(regions.values(), kept, strict=True):
                region.data[:] = data
            Machine(program, grid, packed, list(regions.values()), reverse=reverse).run()

    return function


def ptx_of(kernel: Any, arguments: tuple[Argument, ...], architecture: str) -> str:
    """What the kernel is compiled to."""
    with tempfile.TemporaryDirectory() as folder:
        kept = cute.KeepPTX(True), DumpDir(folder)
        text: str = compile_kernel(kernel, arguments, architecture, *kept).__ptx__
    return text


@functools.cache
def _program(kernel: Any, arguments: tuple[Argument, ...], architecture: str) -> Program:
    return parse(ptx_of(kernel, arguments, architecture))


def _check(tensor: torch.Tensor, argument: Argument) -> None:
    """What TVM-FFI checks at a launch."""
    assert tensor.dtype == argument.dtype
    assert tensor.data_ptr() % argument.alignment == 0
    for size, expected in zip(tensor.shape, argument.sizes, strict=True):
        assert expected in (None, size)
    for size, stride, expected in zip(tensor.shape, tensor.stride(), argument.strides, strict=True):
        assert expected == stride or size == 1 or (expected is None and stride % argument.divisor == 0)


def _packed(tensor: torch.Tensor, argument: Argument) -> bytes:
    """A tensor as a kernel gets it: its address, then the sizes and the strides that are not constants."""
    sizes = [size for size, known in zip(tensor.shape, argument.sizes, strict=True) if known is None]
    strides = [stride for stride, known in zip(tensor.stride(), argument.strides, strict=True) if known is None]
    line = f"q{len(sizes)}i"
    line += "4x" if len(sizes) % 2 and strides else ""
    line += f"{len(strides)}q"
    packed = struct.pack("<" + line, tensor.data_ptr(), *sizes, *strides)
    return packed.ljust(-(-len(packed) // 8) * 8, b"\0")


def _regions(tensor: torch.Tensor) -> list[Region]:
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return []
    data = np.frombuffer((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()), dtype=np.uint8)
    return [Region(storage.data_ptr(), data)]
