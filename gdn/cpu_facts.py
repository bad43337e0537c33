"""Facts about the host's processor, read from the operating system, without torch."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Final

from gdn.device import CpuInfo

_X86: Final[dict[str, tuple[str, ...]]] = {
    "avx2": ("avx2", "fma"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "avx512_bf16": ("avx512_bf16",),
    "amx_bf16": ("amx_tile", "amx_bf16"),
}
_ARM: Final[dict[str, tuple[str, ...]]] = {"neon": ("asimd",), "sve": ("sve",)}


def read_cpu(cpuinfo: str | None = None, machine: str | None = None) -> CpuInfo:
    """The host's processor.

    Args:
        cpuinfo: text in the form of Linux's /proc/cpuinfo; read from the system by default.
        machine: as `platform.machine()`.
    """
    machine = machine or platform.machine()
    fields = _fields(cpuinfo if cpuinfo is not None else _system_text())
    flags = set(fields.get("flags", fields.get("features", "")).lower().split())
    wanted = _ARM if machine.lower() in ("aarch64", "arm64") else _X86
    features = {name for name, needed in wanted.items() if flags.issuperset(needed)}
    if machine.lower() == "arm64":
        features.add("neon")  # every 64-bit Apple processor has it and sysctl doesn't say so
    return CpuInfo(
        machine=machine,
        vendor=fields.get("vendor_id", fields.get("cpu implementer", "")),
        model=fields.get("model name", platform.processor() or machine),
        cores=_usable_cores(),
        features=frozenset(features),
    )


def _fields(text: str) -> dict[str, str]:
    """Name to value of the first processor listed."""
    pairs = [line.split(":", 1) for line in text.splitlines() if ":" in line]
    return {name.strip().lower(): value.strip() for name, value in reversed(pairs)}


def _system_text() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        return path.read_text(errors="replace")
    return _macos_text() if platform.system() == "Darwin" else ""


def _macos_text() -> str:
    names = {"model name": "machdep.cpu.brand_string", "flags": "machdep.cpu.leaf7_features"}
    lines = []
    for field, key in names.items():
        asked = subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, check=False)
        lines.append(f"{field}: {asked.stdout.strip()}")
    return "\n".join(lines)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
