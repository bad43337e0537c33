"""This backend's own Triton kernels, each launched by one plan per argument signature."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING
from typing import NamedTuple

import torch

from gdn.errors import BackendRefused

if TYPE_CHECKING:
    from gdn._triton_launch import Launch


class Launched(NamedTuple):
    """A kernel whose parameters are pointers, numbers that may differ between calls, then those that don't."""

    launch: Launch
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    """Those that don't differ."""


def launched(kernel: str, constants: dict[str, int], grid: tuple[int, int], numbers: tuple[int, ...]) -> Launched:
    """A plan of the kernel "module:name". Imports Triton."""
    from gdn._triton_launch import Launch

    module, _, name = kernel.partition(":")
    return Launched(Launch(getattr(importlib.import_module(module), name), constants), (*grid, 1), numbers)


def check_kernels() -> None:
    """Called at bind time.

    Raises:
        BackendRefused: there is a GPU and no Triton to build the kernels with.
    """
    if torch.cuda.is_available():
        try:
            importlib.import_module("gdn._triton_launch")
        except ImportError as error:
            raise BackendRefused(f"the kernels that stage and mask rows need triton: {error}") from error
