"""The cutedsl backend passes the conformance suite on the GPU of this machine."""

from __future__ import annotations

import pytest
import torch

from gdn.testing.conformance import BackendConformance

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")


class TestCuteDsl(BackendConformance):
    backend = "cutedsl"
    device = "cuda:0"
