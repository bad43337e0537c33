"""Compiled kernels: one for each set of constants, kept in memory and, as object files, on disk.

Batch, pool size, slot count and strides are arguments of a compiled kernel, so a server compiles a handful. An object
file is read back without compiling; its name is a hash of all that it depends on. `GDN_CACHE_DIR` says where they lie.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from collections.abc import Hashable
from importlib import metadata
from pathlib import Path
from typing import Any
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import load_module
from cutlass.cute.runtime import make_fake_stream
from cutlass.cute.runtime import make_fake_tensor

logger = logging.getLogger("gdn.cutedsl")

CUTE_DTYPES = {
    torch.float32: cutlass.Float32,
    torch.float16: cutlass.Float16,
    torch.bfloat16: cutlass.BFloat16,
    torch.int32: cutlass.Int32,
    torch.int64: cutlass.Int64,
}

_SYMBOL = "gdn_kernel"
_lock = threading.RLock()
_functions: dict[Hashable, Callable[..., None]] = {}
_owners: list[Any] = []
"""What holds the code of the functions."""


class Argument(NamedTuple):
    """What a compiled kernel assumes of one tensor; it refuses a tensor that is otherwise."""

    dtype: torch.dtype
    sizes: tuple[int | None, ...]
    """None: any."""
    strides: tuple[int | None, ...]
    """Of elements; None: any multiple of `divisor`."""
    alignment: int
    """Bytes to which its address is aligned."""
    divisor: int = 1

    @classmethod
    def any_strides(cls, tensor: torch.Tensor, sizes: tuple[int | None, ...]) -> Argument:
        """Of these sizes, with any strides, aligned to its elements only."""
        return cls(tensor.dtype, sizes, (None,) * len(sizes), tensor.element_size())

    def fake(self) -> Any:
        """A stand-in that has no memory."""
        sizes = tuple(cute.sym_int() if size is None else size for size in self.sizes)
        strides = tuple(
            cute.sym_int64(divisibility=self.divisor) if stride is None else stride for stride in self.strides
        )
        return make_fake_tensor(CUTE_DTYPES[self.dtype], sizes, strides, assumed_align=self.alignment)


def function_of(kernel: Any, arguments: tuple[Argument, ...], architecture: str) -> Callable[..., None]:
    """The compiled kernel, called as function(*tensors, scale) on the current stream.

    Args:
        kernel: a frozen dataclass of constants whose `__call__` is a `cute.jit` function of the tensors, the fp32 scale
            and a stream.
    """
    key = (kernel, arguments, architecture)
    function = _functions.get(key)
    if function is None:
        with _lock:
            function = _functions.get(key)
            if function is None:
                function = _functions[key] = _from_disk(key) or _compiled(key)
    return function


def compile_kernel(kernel: Any, arguments: tuple[Argument, ...], architecture: str, *options: Any) -> Any:
    """What `cute.compile` makes of it, without any cache."""
    compiler = cute.compile[(cute.EnableTVMFFI(True), cute.GPUArch(architecture), *options)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return compiler(kernel, *(argument.fake() for argument in arguments), cutlass.Float32(1.0), stream)


def architecture_of(sm: int) -> str:
    """The compiler's target for a compute capability, with the features of that very chip from SM90 on."""
    return f"sm_{sm}a" if sm >= 90 else f"sm_{sm}"


def _compiled(key: tuple[Any, tuple[Argument, ...], str]) -> Callable[..., None]:
    compiled = compile_kernel(*key)
    file = _file(key)
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=file.parent) as folder:
                compiled.export_to_c(f"{folder}/kernel.o", function_name=_SYMBOL)
                os.replace(f"{folder}/kernel.o", file)
        except Exception as error:
            logger.warning("compiled kernel is not kept in %s: %s", file.parent, error)
    function: Callable[..., None] | None = compiled._tvm_ffi_function
    if function is None:
        raise RuntimeError(f"a process of the CuTe DSL runs one architecture, and this one's is not {key[2]}")
    _owners.append(compiled)
    return function


def _from_disk(key: Hashable) -> Callable[..., None] | None:
    file = _file(key)
    if file is None or not file.exists():
        return None
    try:
        module = load_module(str(file), enable_tvm_ffi=True)
        function: Callable[..., None] = getattr(module, _SYMBOL)
    except Exception as error:
        logger.warning("compiled kernel %s can't be loaded, so it is compiled anew: %s", file, error)
        return None
    _owners.append(module)
    return function


def _file(key: Hashable) -> Path | None:
    chosen = os.environ.get("GDN_CACHE_DIR", "")
    if chosen == "off":
        return None
    root = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdn"
    return root / "cutedsl" / f"{hashlib.sha256(f'{_surroundings()} {key}'.encode()).hexdigest()[:32]}.o"


@functools.cache
def _surroundings() -> str:
    """What every object file depends on: this package's source, and the versions that compiled it and run it."""
    source = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        source.update(file.read_bytes())
    versions = [metadata.version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi", "torch")]
    return " ".join((source.hexdigest(), *versions, sys.implementation.cache_tag or ""))
