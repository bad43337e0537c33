"""The triton backend passes the conformance suite on the GPU of this machine."""

from __future__ import annotations

import pytest
import torch

from gdn.testing.conformance import BackendConformance

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


class TestTriton(BackendConformance):
    backend = "triton"
    device = "cuda:0"
