"""The flashinfer backend passes the conformance suite on the GPU of this machine."""

from __future__ import annotations

import pytest
import torch

from gdn.installed import installed_version
from gdn.testing.conformance import BackendConformance

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
if installed_version("flashinfer-python") is None:
    pytest.skip("needs flashinfer-python", allow_module_level=True)


class TestFlashInfer(BackendConformance):
    backend = "flashinfer"
    device = "cuda:0"
