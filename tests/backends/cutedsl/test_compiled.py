"""Compiled functions: what they are keyed by, what they refuse, what is kept on disk. No GPU needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
tvm_ffi = pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")

import torch

from gdn.backends.cutedsl import compiled
from gdn.backends.cutedsl import decode
from gdn.testing.calls import build_call
from gdn.testing.case import Case
from gdn.testing.case import Heads

pytestmark = pytest.mark.cross_compile

CASE = Case(heads=Heads(1, 2, 32, 16), activation="bfloat16", state="bfloat16")


@pytest.fixture
def functions(monkeypatch, tmp_path):
    """An empty memory, and a folder of our own."""
    monkeypatch.setattr(compiled, "_functions", {})
    monkeypatch.setenv("GDN_CACHE_DIR", str(tmp_path))
    return compiled._functions


def packed_decode(case, **changes):
    context = SimpleNamespace(config=SimpleNamespace(deterministic=False), device=SimpleNamespace(sm=90))
    call = build_call("packed_decode", case, seed=0)
    return decode.packed_factory(context)(**{**call.arguments, **changes})


def launched_on_the_cpu(case):
    """As far as a machine without a GPU gets: the launch refuses the first tensor, for its device alone."""
    with pytest.raises(ValueError, match=r"#0(?s:.*)cuda"):
        packed_decode(case)


def test_batches_pools_and_strides_share_a_function(functions):
    for case in (
        CASE,
        CASE.but(lengths=(1,) * 9),
        CASE.but(slot_gap=24),
        CASE.but(views=True),
        CASE.but(pool_slots=40),
        CASE.but(scale=0.5, out=True),
    ):
        launched_on_the_cpu(case)
    assert len(functions) == 1


def test_each_dtype_has_a_function_of_its_own(functions):
    for count, case in enumerate(
        (CASE, CASE.but(index="int64"), CASE.but(parameters="activation"), CASE.but(state="float32")), start=1
    ):
        launched_on_the_cpu(case)
        assert len(functions) == count


def test_object_files_are_read_back(functions, tmp_path, monkeypatch):
    launched_on_the_cpu(CASE)
    (file,) = tmp_path.glob("cutedsl/*.o")
    functions.clear()
    monkeypatch.setattr(compiled, "compile_kernel", None)
    launched_on_the_cpu(CASE)
    functions.clear()
    file.write_bytes(b"not an object file")
    with pytest.raises(TypeError, match="NoneType"):
        packed_decode(CASE)


def test_off_keeps_nothing(functions, tmp_path, monkeypatch):
    monkeypatch.setenv("GDN_CACHE_DIR", "off")
    monkeypatch.chdir(tmp_path)
    launched_on_the_cpu(CASE)
    assert list(tmp_path.iterdir()) == []


def test_parameters_that_require_gradients_are_taken():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert tvm_ffi.convert(lambda tensor: tuple(tensor.shape))(parameter) == (3,)


def test_nobody_compiles_nothing(functions):
    out = packed_decode(CASE.but(lengths=()))
    assert out.shape == (1, 0, 2, 16)
    assert not functions
