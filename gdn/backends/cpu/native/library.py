"""Load the best native library that this machine can build and run, and keep the answer."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any
from typing import Final
from typing import NamedTuple

import torch  # noqa: TC002 - loads its OpenMP before the library, which then shares its threads

from gdn._arguments import refuse
from gdn.backends.cpu.native.build import InstructionPath
from gdn.backends.cpu.native.build import Settings
from gdn.backends.cpu.native.build import Unavailable
from gdn.backends.cpu.native.build import build
from gdn.backends.cpu.native.build import paths_for
from gdn.backends.cpu.native.structures import ARGUMENTS
from gdn.cpu_facts import read_cpu
from gdn.errors import BackendRefused

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.device import CpuInfo

logger = logging.getLogger("gdn.cpu")

Function = Callable[[int, bytes], int]
"""`(address of the plan, packed call) -> 0, or 1 where offsets don't ascend within the tokens`."""


@dataclass(frozen=True)
class Library:
    """A loaded library.

    Attributes:
        path: the instruction path's name.
        file: what was loaded.
        functions: by the names of `structures.ARGUMENTS`.
    """

    path: str
    file: Path
    functions: dict[str, Function]


class Plan(NamedTuple):
    """What one argument signature needs.

    Attributes:
        address: of `memory`, the plan that the native function reads.
        shape: of the output, where the caller gives none.
        scale: used where the caller gives none.
    """

    address: int
    memory: ctypes.Structure
    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: float = 1.0


def make_plan(memory: ctypes.Structure, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Plan:
    """A plan over `memory`."""
    return Plan(ctypes.addressof(memory), memory, shape, dtype, scale)


def check_on_cpu(name: str, tensor: Tensor) -> None:
    """Refuse tensors whose addresses the CPU can't read. All tensors of a call share one device."""
    if tensor.device.type != "cpu":
        refuse(name, "device cpu", str(tensor.device))


def address(tensor: Tensor | None) -> int:
    """Of the first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def native(name: str) -> Function:
    """One native function.

    Raises:
        BackendRefused: there is no native library here; the text says why.
    """
    return library().functions[name]


def library() -> Library:
    """The library in force under the environment's settings, built and loaded on the first call.

    Raises:
        BackendRefused: there is none; the text says why.
    """
    settings = Settings.read()
    with _lock:
        if settings not in _loaded:
            _loaded[settings] = _load_best(settings)
        found = _loaded[settings]
    if isinstance(found, str):
        raise BackendRefused(found)
    return found


_loaded: Final[dict[Settings, Library | str]] = {}
_lock: Final = threading.Lock()


def _load_best(settings: Settings) -> Library | str:
    """The library, or why there is none."""
    reasons = []
    try:
        cpu = read_cpu()
        for path in paths_for(cpu, settings):
            try:
                found = _load(path, cpu, settings)
            except Unavailable as error:
                logger.warning("no native kernels for path %s: %s", path.name, error)
                reasons.append(str(error))
            else:
                logger.info("native kernels: path %s from %s", found.path, found.file)
                return found
    except Unavailable as error:
        reasons.append(str(error))
    return "no native kernels: " + "; ".join(dict.fromkeys(reasons))


def _load(path: InstructionPath, cpu: CpuInfo, settings: Settings) -> Library:
    file = build(path, cpu, settings)
    try:
        handle = ctypes.CDLL(str(file))
    except OSError:  # cut short by a full disk, or made for another C library: worth one more build
        file.unlink(missing_ok=True)
        file = build(path, cpu, settings)
        try:
            handle = ctypes.CDLL(str(file))
        except OSError as error:
            raise Unavailable(f"{file} can't be loaded: {error}") from error
    if handle.gdn_permit():
        raise Unavailable(f"the kernel does not permit this process the registers of path {path.name}")
    return Library(path.name, file, {name: _function(handle, name) for name in ARGUMENTS})


def _function(handle: Any, name: str) -> Function:
    plan, call = ARGUMENTS[name]
    for what, ours in (("plan", ctypes.sizeof(plan)), ("call", call.size)):
        size = getattr(handle, f"gdn_{name}_{what}_bytes")
        size.restype = ctypes.c_int64
        if size() != ours:
            raise Unavailable(f"the {what} of {name} has {size()} bytes in C++ and {ours} in Python")
    function: Any = getattr(handle, f"gdn_{name}")
    function.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]
