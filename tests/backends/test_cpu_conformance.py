"""The cpu backend passes the conformance suite."""

from gdn.testing.conformance import BackendConformance


class TestCpu(BackendConformance):
    backend = "cpu"
    device = "cpu"
