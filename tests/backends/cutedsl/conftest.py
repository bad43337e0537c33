"""A process of the CuTe DSL runs one architecture, and without a GPU it must be told which, before its first import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
