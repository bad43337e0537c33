"""Compile the C++ source once for each path of instructions, into the user's cache. Needs no torch.

A library's name holds the hash of its source, compiler, flags and processor, so nothing is ever stale; it is written
under another name and renamed, so processes that build at the same time don't disturb each other.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gdn.device import CpuInfo

SOURCE: Final = Path(__file__).parent / "src"
COMPILERS: Final = ("g++", "c++", "clang++")
TIMEOUT: Final = 600.0
"""Seconds that a compiler may take; it takes about six."""

FLAGS: Final = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden",
    "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
"""Not -ffast-math: it reorders sums, drops NaN, and some compilers then switch off subnormals in the whole process."""


class Unavailable(Exception):
    """No native kernels here; the text says why."""


@dataclass(frozen=True, slots=True)
class InstructionPath:
    """One way to compile the source.

    Attributes:
        features: those of `CpuInfo.features` that the processor must have.
        flags: added to `FLAGS`.
    """

    name: str
    features: frozenset[str]
    flags: tuple[str, ...]


_V4: Final = "-march=x86-64-v4"
PATHS: Final = (
    InstructionPath(
        "amx", frozenset({"avx512", "avx512_bf16", "amx_bf16"}), (_V4, "-mavx512bf16", "-mamx-tile", "-mamx-bf16")
    ),
    InstructionPath("avx512_bf16", frozenset({"avx512", "avx512_bf16"}), (_V4, "-mavx512bf16")),
    InstructionPath("avx512", frozenset({"avx512"}), (_V4,)),
    InstructionPath("avx2", frozenset({"avx2"}), ("-march=x86-64-v3",)),
    InstructionPath("portable", frozenset(), ()),
)
"""Best first. `portable` is compiled for the oldest processor of the architecture."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says."""

    allowed: bool
    path: str
    compiler: str
    flags: tuple[str, ...]

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """From the `GDN_CPU_*` variables."""
        return cls(
            allowed=environ.get("GDN_CPU_NATIVE", "").strip() != "0",
            path=environ.get("GDN_CPU_PATH", "").strip(),
            compiler=environ.get("GDN_CPU_CXX", "").strip(),
            flags=tuple(shlex.split(environ.get("GDN_CPU_FLAGS", ""))),
        )


def paths_for(cpu: CpuInfo, settings: Settings) -> tuple[InstructionPath, ...]:
    """What may be tried on this processor, best first.

    Raises:
        Unavailable: native kernels are switched off, or the path asked for is unknown or beyond the processor.
    """
    if not settings.allowed:
        raise Unavailable("switched off by GDN_CPU_NATIVE=0")
    if not settings.path:
        return tuple(path for path in PATHS if path.features <= cpu.features)
    for path in PATHS:
        if path.name == settings.path:
            if missing := path.features - cpu.features:
                raise Unavailable(f"GDN_CPU_PATH={path.name} needs {','.join(sorted(missing))}, which this CPU lacks")
            return (path,)
    raise Unavailable(f"GDN_CPU_PATH={settings.path} is none of {', '.join(path.name for path in PATHS)}")


def build(path: InstructionPath, cpu: CpuInfo, settings: Settings) -> Path:
    """The compiled library, from the cache where it is there.

    Raises:
        Unavailable: no compiler, it failed, or the cache can't be written.
    """
    compiler = find_compiler(settings)
    flags = (*FLAGS, *path.flags, *settings.flags)
    target = cache_folder() / f"{path.name}-{_key(compiler, flags, cpu)}.so"
    if target.is_file() and is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
            made = Path(folder) / target.name
            _compile([str(compiler), *flags, str(SOURCE / "library.cpp"), "-o", str(made)])
            os.replace(made, target)
    except OSError as error:
        raise Unavailable(f"the cache {target.parent} can't be written: {error}") from error
    return target


def cache_folder() -> Path:
    """Where this user's libraries are kept."""
    from platformdirs import user_cache_path

    return user_cache_path("gdn", appauthor=False) / "cpu"


def find_compiler(settings: Settings) -> Path:
    """The C++ compiler to use: `GDN_CPU_CXX`, else the first of `COMPILERS` on PATH."""
    names = (settings.compiler,) if settings.compiler else COMPILERS
    for name in names:
        if found := shutil.which(name):
            return Path(found).resolve()
    asked = f"GDN_CPU_CXX={settings.compiler} is no" if settings.compiler else f"none of {', '.join(names)} is a"
    raise Unavailable(f"{asked} program on PATH, so the native kernels can't be compiled")


def is_whole(library: Path) -> bool:
    """False for an ELF file cut short, which would kill the process that loads it. Its last part is a table."""
    with library.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return True  # the loader refuses it politely
    (table,) = struct.unpack_from("=Q", header, 0x28)
    entry_bytes, entries = struct.unpack_from("=HH", header, 0x3A)
    return library.stat().st_size >= table + entry_bytes * entries


def _key(compiler: Path, flags: tuple[str, ...], cpu: CpuInfo) -> str:
    about = compiler.stat()
    facts = [str(compiler), str(about.st_size), str(about.st_mtime_ns), *flags, cpu.machine, cpu.model]
    digest = hashlib.sha256("\0".join(facts).encode())
    for file in sorted(SOURCE.iterdir()):
        if file.suffix in (".h", ".cpp"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:20]


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} did not end within {TIMEOUT:.0f} s") from error
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        why = complaints[0].strip() if complaints else f"exit code {done.returncode}"
        raise Unavailable(f"{command[0]} failed: {why}")
