"""The kernels that mask rows do what their torch form does, in Triton's interpreter. Set TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, set before triton is imported", allow_module_level=True)

from gdn.backends.flashinfer import rows

pytestmark = pytest.mark.interpret


@pytest.mark.parametrize(
    ("lengths", "lead", "tail"),
    [((3, 0, 40, 1, 0), 0, 5), ((0, 0), 0, 4), ((16,), 0, 0), ((1,) * 33, 0, 3), ((2, 5), 3, 1)],
)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_silence(lengths, lead, tail, index):
    slots = torch.tensor([(4, -1, 0, 9, 2)[n % 5] for n in range(len(lengths))], dtype=index)
    offsets = torch.tensor([lead, *lengths]).cumsum(0).to(index)
    expected = torch.randn(int(offsets[-1]) + tail, 3, 500).bfloat16()
    got = expected.clone()
    rows.silence(expected, offsets, slots, 5)
    rows.silence_on_gpu(got, offsets, slots, 5)
    assert torch.equal(got, expected)
    if tail:
        assert bool((got[-tail:] == 0).all())
    strided = torch.stack((slots, slots.flip(0) * 0 - 1), dim=1)[:, 0]
    again = torch.full_like(got, 7.0)
    rows.silence_on_gpu(again, offsets, strided, 5)
    assert torch.equal(again == 0, expected == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store(dtype):
    values = torch.randn(4, 2, 700).to(dtype)
    into = torch.full((6, 1500), 7.0, dtype=dtype)[:, :1400]
    places = torch.tensor([3 * 1500, -1, 0, 5 * 1500])
    expected = into.clone(memory_format=torch.preserve_format)
    for value, row in ((0, 3), (2, 0), (3, 5)):
        expected[row] = values[value].flatten()
    for store in (rows.store, rows.store_on_gpu):
        got = torch.full((6, 1500), 7.0, dtype=dtype)
        store(values, places, got[:, :1400])
        assert torch.equal(got[:, :1400], expected)
        assert bool((got[:, 1400:] == 7.0).all())
