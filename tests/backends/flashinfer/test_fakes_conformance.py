"""The adapters, over fakes with FlashInfer's faults, pass the whole conformance suite on the CPU.

Shows what is ours: padding, masks, buffer rows, layouts, dtypes. The kernels' numbers need a GPU.
"""

from __future__ import annotations

import sys
from importlib import import_module
from unittest import mock

import pytest

from gdn.binding import BindContext
from gdn.device import DeviceInfo
from gdn.matching import match
from gdn.testing.calls import build_call
from gdn.testing.compare import assert_matches
from gdn.testing.conformance import BackendConformance
from gdn.testing.operations import factory_of
from gdn.testing.operations import manifest_of
from gdn.types import StateContract
from tests.backends.flashinfer import fakes

INSTALLED = {"flashinfer-python": "0.7.4"}


class OverFakes(BackendConformance):
    backend = "flashinfer"
    sm = 90

    @classmethod
    def device_info(cls):
        return DeviceInfo(type="cuda", index=0, name="a GPU that isn't here", sm=cls.sm, runtime="13.0")

    @classmethod
    def torch_device(cls):
        return "cpu"

    @classmethod
    def rows(cls, operation, config):
        for row in manifest_of(cls.backend).capabilities:
            dtype = "float32" if config.state_dtype == "auto" else config.state_dtype
            state = StateContract(dtype, alignment=row.state_alignment, reserved_slots=row.reserved_slots)
            if factory_of(row, operation) and not match(
                row, operation, config, cls.device_info(), state, INSTALLED.get
            ):
                yield row, state

    @classmethod
    def bind(cls, operation, config):
        for row, state in cls.rows(operation, config):
            module, _, name = factory_of(row, operation).partition(":")
            with mock.patch.dict(sys.modules, fakes.modules()):
                return getattr(import_module(module), name)(
                    BindContext(operation, config, cls.device_info(), state, row)
                )
        return None


class TestHopper(OverFakes):
    sm = 90

    @pytest.mark.skip(reason="two thousand steps of the fakes' own arithmetic")
    def test_case_46_an_fp32_state_is_not_rounded_per_step(self): ...


class ConsumerBlackwell(OverFakes):
    """Extend of fp32 pools, decode of bf16 pools, verify without the tensor-core kernel."""

    sm = 120


SM120_POINTS = [
    pytest.param(operation, case, id=f"{operation}-{case.name}")
    for operation in ("decode", "extend", "verify")
    for case in ConsumerBlackwell.situations(operation)
    if case.activation == "bfloat16"
]


@pytest.mark.parametrize(("operation", "case"), SM120_POINTS)
def test_consumer_blackwell_matches_the_reference(operation, case):
    function = ConsumerBlackwell.bind(operation, case.config())
    assert_matches(function, build_call(operation, case, seed=0))
