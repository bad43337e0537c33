"""The kernels that mask rows compile for every architecture of the manifest. No GPU needed."""

from __future__ import annotations

import os

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles for real: unset TRITON_INTERPRET", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gdn.backends.flashinfer import _rows_kernel

pytestmark = pytest.mark.cross_compile

SILENCE = {"WIDTH": 4096, "ROWS": 16, "COLUMNS": 1024, "HALVINGS": 7}


@pytest.mark.parametrize("architecture", [80, 89, 90, 100, 120])
@pytest.mark.parametrize(
    ("name", "constants", "pointers"),
    [
        ("silence_kernel", SILENCE, {"out": "bf16", "offsets": "i32", "indices": "i32"}),
        ("silence_kernel", SILENCE, {"out": "fp16", "offsets": "i64", "indices": "i64"}),
        ("store_kernel", {"COLUMNS": 1024}, {"values": "fp32", "places": "i64", "into": "fp32"}),
        ("store_kernel", {"COLUMNS": 1024}, {"values": "bf16", "places": "i64", "into": "bf16"}),
    ],
)
def test_compiles(architecture, name, constants, pointers):
    kernel = getattr(_rows_kernel, name)
    signature = {
        argument: "constexpr" if argument in constants else f"*{pointers[argument]}" if argument in pointers else "i32"
        for argument in kernel.arg_names
    }
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", architecture, 32))
    assert compiled.asm["cubin"]
