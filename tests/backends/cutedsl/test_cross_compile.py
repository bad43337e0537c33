"""Every kernel compiles for every architecture that the manifest claims, and keeps its registers. No GPU needed."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")

from gdn.backends.cutedsl import MANIFEST
from gdn.backends.cutedsl import compiled
from gdn.backends.cutedsl import warmup
from gdn.backends.cutedsl.compiled import architecture_of
from gdn.config import GdnConfig
from gdn.device import DeviceInfo
from tests.backends.cutedsl.emulated import ptx_of

pytestmark = pytest.mark.cross_compile

ARCHITECTURES = ("sm90", "sm100", "sm103", "sm120")
VECTORS = ("v4.b32", "v2.b64")
QWEN = GdnConfig(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128, activation_dtype="bfloat16")


def compiled_variants(config, architecture, monkeypatch):
    """PTX of everything that warm-up would compile on that device."""
    found = {}

    def function_of(kernel, arguments, target):
        key = (kernel, arguments)
        if key not in found:
            found[key] = ptx_of(kernel, arguments, target)
        return found[key]

    monkeypatch.setattr(compiled, "function_of", function_of)
    warmup.warmup(config, DeviceInfo.parse(architecture))
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("state", "tree"),
    [
        ("float32", True),
        *(pytest.param(*point, marks=pytest.mark.slow) for point in (("float32", False), ("bfloat16", True))),
    ],
)
def test_all_variants_of_a_server(architecture, state, tree, monkeypatch):
    config = QWEN.model_copy(update={"state_dtype": state, "max_draft_tokens": 4, "tree_drafts": tree})
    found = compiled_variants(config, architecture, monkeypatch)
    assert len(found) >= 6
    for (kernel, _), ptx in found.items():
        assert f".target {architecture.replace('sm', 'sm_')}a" in ptx, kernel
        assert any(f"ld.global.{vector}" in ptx for vector in VECTORS), f"{kernel} doesn't read states in vectors"
        assert ".local" not in ptx, f"{kernel} keeps an array in memory"


def test_one_compile_serves_every_batch_pool_and_stride(monkeypatch):
    """The key of a compiled kernel holds no batch, no slot count, no stride."""
    found = compiled_variants(QWEN.model_copy(update={"deterministic": True}), "sm90", monkeypatch)
    assert len(found) == 2  # decode and packed decode
    for _, arguments in found:
        assert arguments[7].sizes[0] is None
        assert arguments[7].strides[0] is None
        assert arguments[8].sizes == (None,)


def test_every_claimed_architecture_is_compiled_here():
    claims = {e.removeprefix("compiled:") for row in MANIFEST.capabilities for e in row.evidence}
    assert claims == {architecture_of(int(name.removeprefix("sm"))).replace("_", "") for name in ARCHITECTURES}
