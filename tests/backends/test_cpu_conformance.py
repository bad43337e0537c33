"""Both kinds of rows of the cpu backend pass the conformance suite."""

import pytest

from gdn.backends.cpu.native.library import library
from gdn.testing.case import Case
from gdn.testing.conformance import BackendConformance
from gdn.types import OPERATIONS


class TestNative(BackendConformance):
    backend = "cpu"
    device = "cpu"

    def test_these_are_native(self):
        assert library().file.is_file()
        for operation in OPERATIONS:
            assert self.op(operation, Case().config()).__module__.startswith("gdn.backends.cpu.native.")


class TestTorch(BackendConformance):
    backend = "cpu"
    device = "cpu"

    @pytest.fixture(autouse=True)
    def _without_native_kernels(self, monkeypatch):
        monkeypatch.setenv("GDN_CPU_NATIVE", "0")

    def test_these_are_not_native(self):
        for operation in OPERATIONS:
            assert "native" not in self.op(operation, Case().config()).__module__
