"""The devices that the serving tests run on: the CPU, and the GPU where there is one."""

from __future__ import annotations

import pytest
import torch

_HAS_GPU = torch.cuda.is_available()

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not _HAS_GPU, reason="needs a GPU")])
DEVICES = [pytest.param("cpu"), GPU]
