"""Launch a Triton kernel without the work that Triton repeats on every call.

Triton inspects each argument at each launch to find the compiled variant, which takes tens of microseconds. A `Launch`
belongs to one argument signature (it lives in a plan of `gdn.signature`), so all that can still differ between calls is
whether every pointer is aligned to 16 bytes: two variants, found once.
"""

from __future__ import annotations

import functools
import operator
import threading
from typing import TYPE_CHECKING
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from collections.abc import Callable

ALIGNMENT_MASK = 15
_lock = threading.RLock()


class Launch:
    """One kernel with its constants and its launch options, for one argument signature on one device.

    The kernel's parameters must come in this order: pointers (tensors or None), runtime numbers, then `tl.constexpr`s.
    Integers are specialised by Triton as usual (1, multiples of 16), so every integer that may differ between calls of
    one signature must be listed in the kernel's `do_not_specialize`.

    Args:
        kernel: what `@triton.jit` returned.
        constants: the values of all its constexpr parameters.
        num_warps, num_stages, options: as Triton takes them.
    """

    __slots__ = ("_aligned", "_any", "_constants", "_kernel", "_options", "_pointers", "_tail", "device_index")

    def __init__(self, kernel: Any, constants: dict[str, Any], *, num_warps: int = 4, **options: Any) -> None:
        self._kernel = kernel
        self._constants = constants
        self._options = {"num_warps": num_warps, **options}
        self._aligned: Callable[..., None] | None = None
        self._any: Callable[..., None] | None = None
        self._tail = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._pointers = -1
        self.device_index = -1

    def __call__(self, grid_x: int, grid_y: int, grid_z: int, *args: Any) -> None:
        """Launch over the grid; an empty grid launches nothing."""
        if not (grid_x and grid_y and grid_z):
            return
        count = self._pointers
        if count >= 0 and _current_device() == self.device_index:
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in args[:count]]
            run = self._any if functools.reduce(operator.or_, addresses, 0) & ALIGNMENT_MASK else self._aligned
            if run is not None:
                stream = _current_stream(self.device_index)
                run(grid_x, grid_y, grid_z, stream, *addresses, *args[count:], *self._tail)
                return
        self._launch_slowly((grid_x, grid_y, grid_z), args)

    def _launch_slowly(self, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        count = sum(arg is None or isinstance(arg, torch.Tensor) for arg in args)
        tensors = [tensor for tensor in args[:count] if tensor is not None]
        if not isinstance(self._kernel, JITFunction):
            self._kernel[grid](*args, **self._constants)
            return
        aligned = all(tensor.data_ptr() & ALIGNMENT_MASK == 0 for tensor in tensors)
        kernel = self._kernel if aligned else _indifferent_to_alignment(self._kernel)
        index = tensors[0].device.index
        with _lock, torch.cuda.device(index):
            compiled = kernel[grid](*args, **self._constants, **self._options)
        run = _direct_run(compiled)
        if aligned:
            self._aligned = run
        else:
            self._any = run
        self.device_index = index
        self._pointers = count


def _direct_run(compiled: Any) -> Callable[..., None]:
    """The compiled kernel's launcher, called as run(x, y, z, stream, *every argument)."""
    launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    bare = getattr(launcher, "launch", None)
    scratch = getattr(launcher, "global_scratch_size", 1) or getattr(launcher, "profile_scratch_size", 1)
    if bare is not None and scratch == 0 and _TRITON_MINOR == (3, 6):
        cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl

        def run_bare(x: int, y: int, z: int, stream: int, *args: Any) -> None:
            bare(x, y, z, stream, function, cooperative, dependent, None, None, metadata, None, None, None, *args)

        return run_bare

    def run(x: int, y: int, z: int, stream: int, *args: Any) -> None:
        launcher(x, y, z, stream, function, metadata, None, None, None, *args)

    return run


_TRITON_MINOR = tuple(int(part) for part in triton.__version__.split(".")[:2])


@functools.cache
def _indifferent_to_alignment(kernel: Any) -> Any:
    """The same kernel, compiled without any assumption on the alignment of its pointers."""
    return triton.jit(
        kernel.fn,
        do_not_specialize=kernel.do_not_specialize,
        do_not_specialize_on_alignment=[parameter.name for parameter in kernel.params if not parameter.is_constexpr],
    )


def _current_device() -> int:
    index: int = torch._C._cuda_getDevice()
    return index


def _current_stream(index: int) -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream
