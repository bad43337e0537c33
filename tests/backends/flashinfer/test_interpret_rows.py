"""The kernels that stage and mask rows do what their torch form does, in Triton's interpreter. Set TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, set before triton is imported", allow_module_level=True)

from gdn.backends.flashinfer import rows
from gdn.backends.flashinfer import staging

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


REQUESTS = [((3, 0, 40, 1, 0), 0, 5), ((1,), 0, 0), ((2, 5), 3, 1)]


def offsets_and_slots(lengths, lead, index):
    slots = torch.tensor([(4, -1, 0, 9, 2)[n % 5] for n in range(len(lengths))], dtype=index)
    return torch.tensor([lead, *lengths]).cumsum(0).to(index), slots


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_slots(index):
    indices = torch.randint(-3, 9, (2100, 2), dtype=index)[:, 0]
    for instead in (-1, 5):
        got = staging.slots_on_gpu(indices, 5, instead)
        assert got.dtype == torch.int32
        assert torch.equal(got, staging.slots_or_else(indices, 5, instead))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_silence_each(index):
    indices = torch.randint(-3, 9, (37, 2), dtype=index)[:, 0]
    expected = torch.randn(37, 1, 3, 500)
    got = expected.clone()
    rows.silence_each(expected, indices, 5)
    rows.silence_each_on_gpu(got, indices, 5)
    assert bool((got == 0).any())
    assert torch.equal(got, expected)


@pytest.mark.parametrize("ratio", [1, 3])
@pytest.mark.parametrize("sequences", [1, 50])
def test_prefill_inputs(ratio, sequences):
    heads, tokens = 2, 37
    packed = torch.randn(tokens, 2 * heads * 128 + 5).half() * 3
    q, k = (packed[:, begin : begin + heads * 128].unflatten(1, (heads, 128)) for begin in (0, heads * 128))
    q[3] = 0
    g = -torch.rand(heads * ratio, tokens).mul(30).t()
    indices = torch.randint(-2, 7, (sequences,), dtype=torch.int64)
    expected = staging.prefill_inputs(q, k, g, indices, 5)
    got = staging.prefill_inputs_on_gpu(q, k, g, indices, 5)
    assert all(part.is_contiguous() for part in got)
    assert torch.equal(got.slots, expected.slots)
    for mine, right in zip(got[:3], expected[:3], strict=True):
        torch.testing.assert_close(mine, right, rtol=2e-3, atol=1e-37)


@pytest.mark.parametrize(("lengths", "lead", "tail"), REQUESTS)
def test_drafts_there_and_back(lengths, lead, tail):
    offsets, slots = offsets_and_slots(lengths, lead, torch.int32)
    tokens, keys, values, steps = int(offsets[-1]) + tail, 1, 3, 4
    packed = torch.randn(tokens, (2 * keys + values) * 128)
    q, k, v = (x.unflatten(1, (-1, 128)) for x in packed.split([keys * 128, keys * 128, values * 128], dim=1))
    a, b = torch.randn(values, tokens).t(), torch.randn(tokens, values)
    own = torch.arange(steps) < offsets.diff()[:, None]
    expected = staging.drafts(q, k, v, a, b, offsets, slots, steps, 5)
    got = staging.drafts_on_gpu(q, k, v, a, b, offsets, slots, steps, 5)
    assert torch.equal(got.slots, expected.slots)
    for mine, right in zip(got[:5], expected[:5], strict=True):
        assert mine.is_contiguous()
        assert torch.equal(mine[own], right[own])
    for kept in (2, 4):
        out = [torch.full((tokens, values, 128), 7.0) for _ in range(2)]
        rows.spread(expected.v, offsets, slots, kept, 5, out[0])
        rows.spread_on_gpu(got.v, offsets, slots, kept, 5, out[1])
        assert torch.equal(*out)


@pytest.mark.parametrize(("lengths", "lead", "tail"), REQUESTS)
def test_store_drafts(lengths, lead, tail):
    offsets, slots = offsets_and_slots(lengths, lead, torch.int64)
    states = torch.randn(len(lengths), 4, 2, 16, 150)
    order = torch.tensor([4, 0, 2, -1, 99])[: len(lengths)]
    into = torch.full((6, 5, 2, 16, 150), 7.0)
    for kept in (1, 3):
        expected, got = into.clone().transpose(0, 1), into.clone().transpose(0, 1)
        rows.store_drafts(states, offsets, slots, order, kept, 5, expected)
        rows.store_drafts_on_gpu(states, offsets, slots, order, kept, 5, got)
        assert bool((got != 7.0).any()) == bool((offsets.diff() > 0)[(slots >= 0) & (slots < 5)].any())
        assert torch.equal(got, expected)
