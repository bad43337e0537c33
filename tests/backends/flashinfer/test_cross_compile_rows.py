"""The kernels that stage and mask rows compile for every architecture of the manifest. No GPU needed."""

from __future__ import annotations

import os

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles for real: unset TRITON_INTERPRET", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gdn.backends.flashinfer import _rows_kernel
from gdn.backends.flashinfer import _staging_kernel

pytestmark = pytest.mark.cross_compile

PACKED = {"WIDTH": 4096, "COLUMNS": 1024, "HALVINGS": 7}
POINTS = [
    (_rows_kernel.silence_kernel, {**PACKED, "ROWS": 16}, {"out": "bf16", "offsets": "i32", "indices": "i32"}),
    (_rows_kernel.silence_kernel, {**PACKED, "ROWS": 16}, {"out": "fp16", "offsets": "i64", "indices": "i64"}),
    (
        _rows_kernel.silence_each_kernel,
        {"WIDTH": 4096, "ROWS": 16, "COLUMNS": 1024},
        {"out": "bf16", "indices": "i32"},
    ),
    (
        _rows_kernel.spread_kernel,
        {**PACKED, "KEPT": 4, "STEPS": 4},
        {"given": "bf16", "offsets": "i32", "indices": "i64", "out": "bf16"},
    ),
    (
        _rows_kernel.store_drafts_kernel,
        {"KEPT": 4, "STEPS": 4, "SIZE": 524288, "COLUMNS": 4096},
        {"states": "fp32", "offsets": "i32", "indices": "i64", "rows": "i32", "buffer": "fp32"},
    ),
    (_rows_kernel.store_kernel, {"COLUMNS": 4096}, {"values": "bf16", "places": "i64", "into": "bf16"}),
    (_staging_kernel.slots_kernel, {"BLOCK": 1024}, {"indices": "i64", "slots": "i32"}),
    (
        _staging_kernel.prefill_kernel,
        {"HEADS": 16, "RATIO": 3, "RATIO_PADDED": 4, "K": 128, "ROWS": 16},
        {"q": "bf16", "k": "bf16", "g": "fp32", "indices": "i64", "unit_q": "bf16", "unit_k": "bf16", "decay": "fp32",
         "slots": "i32"},
    ),
    (
        _staging_kernel.drafts_kernel,
        {"STEPS": 4, "KEYS": 16, "VALUES": 48, "K": 128, "V": 128, "HEADS_PADDED": 64, "COLUMNS": 1024},
        {**dict.fromkeys(("q", "k", "v", "a", "b", "dense_q", "dense_k", "dense_v", "dense_a", "dense_b"), "bf16"),
         "offsets": "i32", "indices": "i64", "slots": "i32"},
    ),
]  # fmt: skip


@pytest.mark.parametrize("architecture", [80, 89, 90, 100, 120])
@pytest.mark.parametrize(("kernel", "constants", "pointers"), POINTS)
def test_compiles(architecture, kernel, constants, pointers):
    signature = {
        argument: "constexpr" if argument in constants else f"*{pointers[argument]}" if argument in pointers else "i32"
        for argument in kernel.arg_names
    }
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", architecture, 32))
    assert compiled.asm["cubin"]
