"""The GDN_* variables."""

import logging

import pytest

from gdn.environment import VARIABLES
from gdn.environment import read_environment


def test_nothing_set():
    environment = read_environment({"PATH": "/bin"})
    assert environment.backend is None
    assert environment.disabled == ()
    assert environment.plugins is None
    assert not environment.strict_plugins


def test_everything_set():
    environment = read_environment({
        "GDN_BACKEND": " triton ", "GDN_BACKEND_VERIFY": "flashinfer", "GDN_DISABLE_BACKENDS": "cpu, npu,",
        "GDN_PLUGINS": "gdn-acme", "GDN_STRICT_PLUGINS": "1",
    })  # fmt: skip
    assert environment.backend == "triton"
    assert environment.backend_by_operation == {"verify": "flashinfer"}
    assert environment.disabled == ("cpu", "npu")
    assert environment.plugins == ("gdn-acme",)
    assert environment.strict_plugins


@pytest.mark.parametrize("text", ["", "0", " "])
def test_not_strict(text):
    assert not read_environment({"GDN_STRICT_PLUGINS": text}).strict_plugins


def test_an_unknown_variable_warns_once_with_the_nearest(caplog):
    environ = {"GDN_BACKEND_DEOCDE": "cpu"}
    with caplog.at_level(logging.WARNING):
        assert read_environment(environ).unknown == ("GDN_BACKEND_DEOCDE",)
        read_environment(environ)
    assert [r.getMessage() for r in caplog.records] == [
        "unknown variable GDN_BACKEND_DEOCDE is ignored; did you mean GDN_BACKEND_DECODE?"
    ]


def test_every_variable_has_a_meaning():
    assert all(variable.meaning.endswith(".") for variable in VARIABLES)
