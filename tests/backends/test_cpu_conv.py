"""The cpu backend's convolution against a direct sum in fp64, and the counting probes of the field cases."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from gdn.backends.cpu.conv import conv_extend
from gdn.backends.cpu.conv import conv_update

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
COUNTING = torch.tensor([[1000.0, 100.0, 10.0, 1.0]])


def direct(window, weight, bias, activation):
    """Outputs of a window `[dim, W-1+n]` in fp64."""
    width = weight.shape[1]
    outputs = []
    for t in range(window.shape[1] - width + 1):
        total = (window[:, t : t + width].double() * weight.double()).sum(1)
        outputs.append(total if bias is None else total + bias.double())
    stacked = torch.stack(outputs, 1) if outputs else torch.zeros(window.shape[0], 0, dtype=torch.float64)
    return torch.nn.functional.silu(stacked) if activation else stacked


def pool_of(slots, dim, columns, dtype, layout):
    """A pool in one of the layouts in use: time inner, channels inner, or with gaps of 7 between slots."""
    values = torch.randn(slots, dim, columns).to(dtype)
    if layout == "channels_inner":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":
        storage = torch.full((slots, dim * columns + 9), 7.0, dtype=dtype)
        view = storage[:, : dim * columns].view(slots, dim, columns)
        view.copy_(values)
        return view
    return values


@pytest.mark.parametrize("layout", ["time_inner", "channels_inner", "strided"])
@pytest.mark.parametrize(("dtype", "state_dtype"), list(itertools.product(FLOATS, FLOATS)))
def test_case_36_extend_in_every_pair_of_dtypes(dtype, state_dtype, layout):
    torch.manual_seed(0)
    dim, width, bounds = 5, 4, [0, 1, 1, 3, 303]
    slots, flags = [2, 0, 4, 1], [True, True, False, True]
    x = torch.randn(310, dim).to(dtype).t() if layout == "channels_inner" else torch.randn(dim, 310).to(dtype)
    x[:, 303:] = math.nan
    weight, bias = torch.randn(dim, width).to(dtype), torch.randn(dim).to(dtype)
    pool = pool_of(6, dim, width + 1, state_dtype, layout)
    pool[4] = math.nan
    before = pool.clone()
    out = conv_extend(
        x, weight, bias, conv_states=pool, query_start_loc=torch.tensor(bounds), cache_indices=torch.tensor(slots),
        has_initial_state=torch.tensor(flags),
    )  # fmt: skip
    assert out.stride() == x.stride()
    for slot, flag, begin, end in zip(slots, flags, bounds, bounds[1:], strict=False):
        history = before[slot, :, : width - 1].double() if flag else torch.zeros(dim, width - 1, dtype=torch.float64)
        window = torch.cat((history, x[:, begin:end].double()), 1)
        torch.testing.assert_close(
            out[:, begin:end].double(), direct(window, weight, bias, True), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )
        if begin < end:
            assert torch.equal(pool[slot, :, : width - 1], window[:, -(width - 1) :].to(state_dtype))
    assert torch.equal(pool[[0, 3, 5]], before[[0, 3, 5]])
    named = [2, 1]
    assert torch.equal(pool[named, :, width - 1 :], before[named, :, width - 1 :])
    assert (out[:, 303:] == 0).all()


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4])
def test_case_27_short_inputs_keep_history(length):
    x = torch.tensor([[4.0, 5.0, 6.0, 7.0]])[:, :length]
    digits = [1, 2, 3, 4, 5, 6, 7][: 3 + length]
    expected = [float("".join(map(str, digits[t : t + 4]))) for t in range(length)]
    for split in range(length + 1):
        pool = torch.tensor([[[1.0, 2.0, 3.0]]])
        parts = [
            conv_extend(
                part, COUNTING, None, conv_states=pool, query_start_loc=torch.tensor([0, part.shape[1]]),
                cache_indices=torch.tensor([0]), has_initial_state=None, activation=None,
            )
            for part in (x[:, :split], x[:, split:])
        ]  # fmt: skip
        assert torch.cat(parts, 1).tolist() == [expected]
        assert pool.flatten().tolist() == digits[-3:]


def test_case_27_and_03_no_history_ignores_the_previous_tenant():
    pool = torch.full((1, 1, 3), math.nan)
    out = conv_extend(
        torch.tensor([[4.0, 5.0]]), COUNTING, None, conv_states=pool, query_start_loc=torch.tensor([0, 2]),
        cache_indices=torch.tensor([0]), has_initial_state=torch.tensor([False]), activation=None,
    )  # fmt: skip
    assert out.tolist() == [[4.0, 45.0]]
    assert pool.flatten().tolist() == [0.0, 4.0, 5.0]


def test_case_37_products_are_exact():
    weight = torch.tensor([[1.0078125, -1.015625]], dtype=torch.bfloat16)
    x = torch.tensor([[1.0078125, 1.0]], dtype=torch.bfloat16)
    pool = torch.zeros(1, 1, 1, dtype=torch.bfloat16)
    out = conv_extend(
        x, weight, None, conv_states=pool, query_start_loc=torch.tensor([0, 2]), cache_indices=torch.tensor([0]),
        has_initial_state=None, activation=None,
    )  # fmt: skip
    pool[:] = x[:, :1]
    assert out[0, 1].item() == 6.103515625e-05
    assert conv_update(x[:, 1:], pool, weight, activation=None).item() == 6.103515625e-05


@pytest.mark.parametrize("activation", ["silu", "swish", None])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("drafts", [None, 1, 3, 7])
@pytest.mark.parametrize("width", [1, 2, 4, 5])
def test_case_35_update_with_padded_rows(width, drafts, with_bias, activation):
    torch.manual_seed(1)
    dim, slots = 9, [5, -1, 2, 7, 0]
    x = torch.randn(5, dim, drafts or 1)
    x[1], x[3] = math.nan, math.nan
    weight, bias = torch.randn(dim, width), torch.randn(dim) if with_bias else None
    pool = pool_of(7, dim, width, torch.float32, "strided")
    before = pool.clone()
    out = conv_update(
        x if drafts else x[..., 0], pool, weight, bias, activation=activation, conv_state_indices=torch.tensor(slots)
    )
    assert out.shape == (x.shape if drafts else x.shape[:2])
    for row, slot in enumerate(slots):
        if 0 <= slot < 7:
            window = torch.cat((before[slot, :, : width - 1], x[row]), 1)
            expected = direct(window, weight, bias, activation)
            torch.testing.assert_close(out[row].view(dim, -1).double(), expected, atol=1e-5, rtol=1e-5)
            assert torch.equal(pool[slot, :, : width - 1], window[:, window.shape[1] - width + 1 :])
        else:
            assert (out[row] == 0).all()
    assert torch.equal(pool[[1, 3, 4, 6]], before[[1, 3, 4, 6]])
    assert torch.equal(pool[..., width - 1 :], before[..., width - 1 :])


def test_case_81_more_rows_than_slots_and_rows_without_indices():
    pool = torch.zeros(2, 1, 3)
    x = torch.arange(4.0).view(4, 1)
    out = conv_update(x, pool, COUNTING, activation=None, conv_state_indices=torch.tensor([-1, 0, -1, 1]))
    assert out.flatten().tolist() == [0.0, 1.0, 0.0, 3.0]
    out = conv_update(x, pool, COUNTING, activation=None)
    assert out.flatten().tolist() == [10.0, 31.0, 0.0, 0.0]


@pytest.mark.parametrize("overlapping", [True, False])
def test_chain_stores_the_window_after_every_draft(overlapping):
    storage = torch.full((4, 1, 6 + 2), 7.0)
    buffer = torch.full((4, 6, 1, 3), 7.0)
    if overlapping:
        buffer = storage.as_strided((4, 6, 1, 3), (8, 1, 8, 1))
    pool = torch.tensor([[[1.0, 2.0, 3.0]], [[5.0, 5.0, 5.0]], [[1.0, 1.0, 1.0]]])
    x = torch.tensor([[[4.0, 5.0, 6.0]], [[6.0, 7.0, 8.0]], [[0.0, 0.0, 0.0]]])
    out = conv_update(
        x, pool, COUNTING, activation=None, conv_state_indices=torch.tensor([0, 1, 2]),
        intermediate_conv_window=buffer, intermediate_state_indices=torch.tensor([2, 0, 4]),
    )  # fmt: skip
    assert out[:, 0].tolist() == [[1234.0, 2345.0, 3456.0], [5556.0, 5567.0, 5678.0], [1110.0, 1100.0, 1000.0]]
    assert buffer[2, :3, 0].tolist() == [[2, 3, 4], [3, 4, 5], [4, 5, 6]]
    assert buffer[0, :3, 0].tolist() == [[5, 5, 6], [5, 6, 7], [6, 7, 8]]
    assert (buffer[[1, 3]] == 7).all()
    assert pool[:, 0].tolist() == [[4, 5, 6], [6, 7, 8], [0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_case_15_tree_reads_ancestors(dtype):
    next_token = torch.tensor([[9, 9, 9, 9, 9], [1, 3, 4, -1, -1], [1, 2, 3, 4, -1]], dtype=dtype)
    next_sibling = torch.tensor([[9, 9, 9, 9, 9], [-1, 2, -1, -1, -1], [-1, -1, -1, -1, -1]], dtype=dtype)
    parents = torch.full((3, 5), 77, dtype=dtype)
    pool = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3).repeat(4, 1, 1)
    before = pool.clone()
    buffer = torch.full((3, 5, 1, 3), 7.0)
    x = torch.tensor([4.0, 5.0, 6.0, 7.0, 8.0]).view(1, 1, 5).repeat(3, 1, 1)
    out = conv_update(
        x, pool, COUNTING, activation=None, conv_state_indices=torch.tensor([-1, 3, 1]),
        intermediate_conv_window=buffer, intermediate_state_indices=torch.tensor([0, 1, 2]),
        retrieve_next_token=next_token, retrieve_next_sibling=next_sibling, retrieve_parent_token=parents,
    )  # fmt: skip
    assert out[:, 0].tolist() == [[0.0] * 5, [1234, 2345, 2346, 3457, 3468], [1234, 2345, 3456, 4567, 5678]]
    assert parents.tolist() == [[77] * 5, [0, 0, 0, 1, 2], [0, 0, 1, 2, 3]]
    assert buffer[1, :, 0].tolist() == [[2, 3, 4], [3, 4, 5], [3, 4, 6], [4, 5, 7], [4, 6, 8]]
    assert (buffer[0] == 7).all()
    assert torch.equal(pool, before)


def test_tree_links_that_point_nowhere_are_ignored():
    links = torch.tensor([[3, 0, 1, 5]])
    parents = torch.full((1, 4), 77)
    x = torch.randn(1, 2, 4)
    conv_update(
        x, torch.zeros(1, 2, 3), torch.randn(2, 4), retrieve_next_token=links,
        retrieve_next_sibling=torch.full((1, 4), -1), retrieve_parent_token=parents,
    )  # fmt: skip
    assert parents.tolist() == [[0, 0, 0, 0]]


def test_case_18_nothing_to_do():
    pool = torch.ones(2, 3, 3)
    none = torch.zeros(0, dtype=torch.int64)
    weight = torch.randn(3, 4)
    out = conv_extend(
        torch.zeros(3, 0), weight, None, conv_states=pool, query_start_loc=torch.tensor([0]), cache_indices=none,
        has_initial_state=torch.zeros(0, dtype=torch.bool),
    )  # fmt: skip
    assert out.shape == (3, 0)
    assert conv_update(torch.zeros(0, 3), pool, weight, conv_state_indices=none).shape == (0, 3)
    assert conv_update(torch.zeros(0, 3, 2), pool, weight, conv_state_indices=none).shape == (0, 3, 2)
    assert (pool == 1).all()
