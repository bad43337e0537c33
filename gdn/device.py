"""What machine this is: detected, or named for a what-if question."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import Final

from gdn.errors import UnknownDeviceError
from gdn.types import Platform

_EXAMPLES: Final = (
    "sm80",
    "sm90",
    "sm100",
    "sm103",
    "sm120",
    "gfx942",
    "gfx950",
    "ascend910b",
    "cpu",
    "cuda:0",
    "npu:0",
)
_LOCAL: Final = re.compile(r"(cpu|cuda|npu)(:\d+)?")


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """Facts about the host's processor that decide which CPU kernels can run."""

    machine: str = "x86_64"
    vendor: str = ""
    model: str = ""
    cores: int = 1
    features: frozenset[str] = frozenset()
    """Of: avx2, avx512, avx512_bf16, amx_bf16, neon, sve."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device. Equal and hashable by its facts, so that a resolve can be cached by it."""

    type: Platform
    index: int | None = None
    name: str = ""
    sm: int | None = None
    """NVIDIA compute capability as major*10 + minor."""
    gfx: str | None = None
    soc: str | None = None
    runtime: str | None = None
    """Version of CUDA, ROCm or CANN that torch was built with, such as "13.0"."""
    driver: str | None = None
    multiprocessors: int | None = None
    memory_bytes: int | None = None
    shared_memory_bytes: int | None = None
    """Largest shared memory of one block."""
    cpu: CpuInfo = field(default_factory=CpuInfo)
    hypothetical: bool = False
    """Named by the user, not detected: nothing can be bound on it."""
    problems: tuple[str, ...] = ()
    """Probes that failed, as text; never an exception."""

    @property
    def torch_device(self) -> str:
        """The string that torch takes: "cuda:0" also for ROCm."""
        kind = "cuda" if self.type == "rocm" else self.type
        return kind if self.index is None else f"{kind}:{self.index}"

    @property
    def architecture(self) -> str:
        """The short name of the architecture: "SM90", "gfx942", "ascend910b", "x86_64"."""
        if self.sm is not None:
            return f"SM{self.sm}"
        return self.gfx or self.soc or self.cpu.machine

    @classmethod
    def parse(cls, text: str, *, cuda: str | None = None, runtime: str | None = None) -> DeviceInfo:
        """A device by name: "sm90", "SM100", "sm_120a", "gfx942", "ascend910b" for any machine; "cpu", "cuda:0",
        "npu:0" for one of this host.

        Args:
            cuda: CUDA version of a machine that isn't here; short for `runtime`.
            runtime: version of CUDA, ROCm or CANN there.

        Raises:
            UnknownDeviceError: no such name, or no such device on this host.
        """
        name = text.strip().lower()
        version = cuda or runtime
        if (sm := re.fullmatch(r"sm_?(\d{2,3})[af]?", name)) is not None:
            return cls(type="cuda", index=0, sm=int(sm.group(1)), runtime=version, hypothetical=True)
        if re.fullmatch(r"gfx[0-9a-f]{3,5}", name):
            return cls(type="rocm", index=0, gfx=name, runtime=version, hypothetical=True)
        if re.fullmatch(r"ascend\w+", name):
            return cls(type="npu", index=0, soc=name, runtime=version, hypothetical=True)
        if _LOCAL.fullmatch(name):
            return detect_device(name)
        near = difflib.get_close_matches(name, _EXAMPLES, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownDeviceError(f"unknown device {text!r}; known forms are {', '.join(_EXAMPLES)}{hint}")

    def __str__(self) -> str:
        suffix = " hypothetical" if self.hypothetical else ""
        return f"{self.torch_device}({self.architecture}{suffix})"


def detect_device(device: Any = None) -> DeviceInfo:
    """The facts of a device of this host.

    Args:
        device: None takes the current GPU or NPU if torch sees one, else the CPU; or "cuda:1", "cpu", "npu:0", a
            `torch.device`, or a `DeviceInfo`, which is returned as it is.

    Raises:
        UnknownDeviceError: a named device that isn't here, with the reason.
    """
    if isinstance(device, DeviceInfo):
        return device
    from gdn import probes

    if device is None:
        return probes.best_device()
    name = str(device).strip().lower()
    if _LOCAL.fullmatch(name) is None:
        return DeviceInfo.parse(name)
    kind, _, index = name.partition(":")
    return probes.named_device(kind, int(index) if index else None)
