"""The self-test survives backends that answer wrong, hang or die."""

from __future__ import annotations

import importlib
import sys
import textwrap

import pytest

import gdn
from gdn.testing.selftest import run_selftest

CONFIG = gdn.GdnConfig(
    num_k_heads=2, num_v_heads=4, head_k_dim=32, head_v_dim=48, activation_dtype="float32", state_dtype="float32"
)
MODULE = """
import os, time
from gdn import BackendManifest, CapabilityRow, hookimpl
from gdn.capabilities import CpuTarget
from gdn.backends.cpu.gating import gating

def factory(context):
    def broken(A_log, a, b, dt_bias):
        g, beta = gating(A_log, a, b, dt_bias)
        {fault}
        return g, beta
    return broken

def split_factory(context):
    from gdn.backends.cpu.split import factory
    return factory(context)

ROWS = tuple(
    CapabilityRow(op=op, target=CpuTarget(), dtypes=frozenset(["float32"]), strided_state=True, factory=f"{name}:{{function}}")
    for op, function in (("gating", "factory"), ("qkv_split", "split_factory"))
)

@hookimpl
def gdn_backend_manifests():
    return (BackendManifest(name="acme", capabilities=ROWS),)
"""


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """Install a backend whose gating has a fault; returns a function that runs its self-test."""

    def run(name, fault, timeout=60.0):
        (tmp_path / f"{name}.py").write_text(
            textwrap.dedent(MODULE).replace("{name}", name).format(name=name, fault=fault)
        )
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[gdn.backends]\nacme = {name}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        importlib.invalidate_caches()
        from gdn import registry

        monkeypatch.setattr(registry, "_registry", None, raising=False)
        device = gdn.detect_device("cpu")
        results = run_selftest(device, CONFIG, backends=["acme"], timeout=timeout)
        sys.modules.pop(name, None)
        return {result.operation: result for result in results}

    return run


def test_a_good_backend_passes(acme):
    results = acme("acme_good", "pass")
    assert {name for name, result in results.items() if result.passed} == {"gating", "qkv_split"}


def test_wrong_numbers_are_found(acme):
    results = acme("acme_wrong", "g = g * 1.001")
    assert not results["gating"].passed
    assert "g" in results["gating"].detail
    assert results["qkv_split"].passed


def test_a_backend_that_hangs_fails_alone(acme):
    results = acme("acme_hangs", "time.sleep(600)", timeout=15.0)
    assert "no answer within 15 s" in results["gating"].detail
    assert results["qkv_split"].passed


def test_a_backend_that_kills_its_process_fails_alone(acme):
    results = acme("acme_dies", "os.abort()")
    assert "ended with code" in results["gating"].detail
    assert results["qkv_split"].passed


def test_a_backend_that_raises_is_quoted(acme):
    results = acme("acme_raises", "raise OSError('no such symbol')")
    assert "OSError: no such symbol" in results["gating"].detail


def test_an_infinite_error_is_null_in_json(acme):
    results = acme("acme_json", "raise OSError('no such symbol')")
    assert results["gating"].to_dict()["worst_error"] is None
