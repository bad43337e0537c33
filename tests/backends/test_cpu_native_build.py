"""What can go wrong between the C++ source and a loaded library: the torch rows serve, and the report says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gdn.backends.cpu.native.build import SOURCE
from gdn.backends.cpu.native.build import InstructionPath
from gdn.backends.cpu.native.build import Settings
from gdn.backends.cpu.native.build import Unavailable
from gdn.backends.cpu.native.build import cache_folder
from gdn.backends.cpu.native.build import paths_for
from gdn.device import CpuInfo

RESOLVE = """
import gdn, torch
triple = gdn.resolve(gdn.GdnConfig(num_k_heads=1, num_v_heads=1, head_k_dim=32, head_v_dim=32), device="cpu")
g, beta = triple.gating(torch.zeros(1), torch.zeros(2, 1), torch.zeros(2, 1), torch.zeros(1))
assert float(beta[0, 0, 0]) == 0.5
print("native" in triple.decode.__module__)
for rejection in triple.report.reasons("decode", "cpu"):
    print(rejection.code, rejection.message)
"""


def resolve(cache: Path, **variables: str) -> tuple[bool, str]:
    """In a process of its own: whether decode is native, and why not."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), **variables}
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    native, _, why = done.stdout.partition("\n")
    return native == "True", why


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A cache that holds a library."""
    cache = tmp_path_factory.mktemp("cache")
    native, why = resolve(cache)
    assert native, why
    assert why == ""
    return cache


def libraries(cache: Path) -> list[Path]:
    return sorted((cache / "gdn" / "cpu").glob("*.so"))


def test_a_second_process_compiles_nothing(built):
    (library,) = libraries(built)
    made = library.stat().st_mtime_ns
    assert resolve(built)[0]
    assert library.stat().st_mtime_ns == made
    assert [entry.name for entry in library.parent.iterdir()] == [library.name]


def test_a_variable_forbids_native_kernels(built):
    native, why = resolve(built, GDN_CPU_NATIVE="0")
    assert not native
    assert "bind_refused no native kernels: switched off by GDN_CPU_NATIVE=0" in why


def test_no_compiler(tmp_path):
    native, why = resolve(tmp_path, PATH="/nowhere")
    assert not native
    assert "none of g++, c++, clang++ is a program on PATH" in why


def test_a_compiler_that_is_none(tmp_path):
    native, why = resolve(tmp_path, GDN_CPU_CXX="acme-c++")
    assert not native
    assert "GDN_CPU_CXX=acme-c++ is no program on PATH" in why


def test_a_compiler_that_fails(tmp_path):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'fatal error: no rule for this' >&2\nexit 1\n")
    broken.chmod(0o755)
    native, why = resolve(tmp_path / "cache", GDN_CPU_CXX=str(broken))
    assert not native
    assert "failed: fatal error: no rule for this" in why
    assert libraries(tmp_path / "cache") == []


def test_flags_that_the_compiler_refuses(tmp_path):
    native, why = resolve(tmp_path, GDN_CPU_FLAGS="-fno-such-flag", GDN_CPU_PATH="portable")
    assert not native
    assert "no-such-flag" in why


def test_a_compiler_without_the_best_path_gives_the_next(tmp_path):
    names = [path.name for path in paths_for_this_cpu()]
    if len(names) < 2:
        pytest.skip("this processor has one path")
    real = shutil.which("g++") or shutil.which("c++")
    best = paths_for_this_cpu()[0].flags[-1]
    old = tmp_path / "c++"
    old.write_text(
        f'#!/bin/sh\ncase "$*" in *{best}*) echo "error: unknown {best}" >&2; exit 1;; esac\nexec {real} "$@"\n'
    )
    old.chmod(0o755)
    native, why = resolve(tmp_path / "cache", GDN_CPU_CXX=str(old))
    assert native, why
    (library,) = libraries(tmp_path / "cache")
    assert library.name.startswith(f"{names[1]}-")


def paths_for_this_cpu() -> tuple[InstructionPath, ...]:
    from gdn.cpu_facts import read_cpu

    return paths_for(read_cpu(), Settings(allowed=True, path="", compiler="", flags=()))


def test_a_cache_that_is_a_file(tmp_path):
    (tmp_path / "gdn").write_text("in the way")
    native, why = resolve(tmp_path)
    assert not native
    assert "can't be written" in why


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root writes anywhere")
def test_a_read_only_home(tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    if os.geteuid() == 0:
        home = Path("/proc/sys")  # read-only for root too
    native, why = resolve(home)
    assert not native
    assert "can't be written" in why


@pytest.mark.parametrize("kept", [0, 40, 1000, 100_000])
def test_a_library_cut_short_is_built_again(built, tmp_path, kept):
    cache = tmp_path / "cache"
    shutil.copytree(built, cache)
    (library,) = libraries(cache)
    whole = library.stat().st_size
    library.write_bytes(library.read_bytes()[:kept])
    native, why = resolve(cache)
    assert native, why
    assert library.stat().st_size == whole


def test_several_processes_at_once(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "GDN_CPU_PATH": "portable", "GDN_CPU_FLAGS": "-O0"}
    started = [
        subprocess.Popen([sys.executable, "-c", RESOLVE], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in started]
    assert outputs == ["True\n"] * 3
    assert len(libraries(tmp_path)) == 1
    assert len(list((tmp_path / "gdn" / "cpu").iterdir())) == 1


@pytest.mark.parametrize(("path", "why"), [("amx", "needs amx_bf16"), ("sse", "is none of amx,")])
def test_a_path_beyond_the_processor_or_unknown(path, why):
    cpu = CpuInfo(machine="x86_64", features=frozenset({"avx2", "avx512", "avx512_bf16"}))
    with pytest.raises(Unavailable, match=why):
        paths_for(cpu, Settings.read({"GDN_CPU_PATH": path}))


def test_paths_by_processor():
    settings = Settings.read({})

    def names(*features):
        return [path.name for path in paths_for(CpuInfo(machine="x86_64", features=frozenset(features)), settings)]

    assert names() == ["portable"]
    assert names("avx2") == ["avx2", "portable"]
    assert names("avx2", "avx512", "avx512_bf16") == ["avx512_bf16", "avx512", "avx2", "portable"]
    assert names("neon") == ["portable"]


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "gdn" / "cpu"


def test_the_source_ships_with_the_package():
    assert {file.name for file in SOURCE.iterdir()} >= {"library.cpp", "abi.h"}
