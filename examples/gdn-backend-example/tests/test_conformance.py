"""What every backend owes, checked against its own manifest."""

from gdn.testing.conformance import BackendConformance


class TestExample(BackendConformance):
    backend = "example"
    device = "cpu"
