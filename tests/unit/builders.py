"""Small manifests, devices and facts for tests of the framework."""

from gdn.capabilities import BackendManifest
from gdn.config import GdnConfig
from gdn.device import CpuInfo
from gdn.device import DeviceInfo
from gdn.resolver import Facts

H200 = DeviceInfo(type="cuda", index=0, name="H200", sm=90, runtime="13.0")
CPU = DeviceInfo(type="cpu", cpu=CpuInfo(features=frozenset({"avx2"})))

CONFIG = GdnConfig(num_k_heads=2, num_v_heads=4, head_k_dim=64, head_v_dim=128)


def cuda(low, high=None, **changes):
    return {"platform": "cuda", "sm_range": (low, high or low), **changes}


def row(op="decode", **changes):
    """One row that serves CONFIG on an H200, with `changes`."""
    base = {
        "op": op,
        "target": cuda(80, 121),
        "dtypes": {"bfloat16", "float16"},
        "factory": "fake.module:build",
        "cuda_graph": True,
        "evidence": "contract",
    }
    return {**base, **changes}


def triple_rows(**changes):
    return [row(op, **changes) for op in ("decode", "extend", "verify")]


def backend(name, rows, **changes):
    return BackendManifest.model_validate({"name": name, "capabilities": rows, **changes})


def facts(*manifests, installed=None, **changes):
    packages = installed or {}
    return Facts(manifests=manifests, installed=packages.get, **changes)


def codes(report, backend_name, operation="decode"):
    return [r.code for r in report.reasons(operation, backend_name)]
