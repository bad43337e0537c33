"""Channels divided over tensor-parallel ranks: each of q, k and v, not the joined row."""

from __future__ import annotations

import pytest
import torch

import gdn
from gdn.sharding import merge_channels
from gdn.sharding import slice_channels

CONFIG = gdn.GdnConfig(num_k_heads=2, num_v_heads=4, head_k_dim=2, head_v_dim=2, activation_dtype="float32")


def test_case_71_each_part_is_sharded():
    names = torch.tensor([10, 11, 12, 13, 20, 21, 22, 23, *range(30, 38)])
    assert slice_channels(names, CONFIG, 1, 2, axis=-1).tolist() == [12, 13, 22, 23, 34, 35, 36, 37]


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(("shape", "axis"), [((5, 16, 3), -2), ((16, 4), 0), ((16,), -1), ((7, 16), 1)])
def test_case_71_merging_undoes_slicing(shape, axis, tp_size):
    x = torch.randn(shape)
    parts = [slice_channels(x, CONFIG, rank, tp_size, axis=axis) for rank in range(tp_size)]
    assert torch.equal(merge_channels(parts, CONFIG, axis=axis), x)
    assert all(part.shape[axis] == CONFIG.shard(tp_size).conv_dim for part in parts)


def test_case_71_ranks_convolve_their_parts_of_the_whole():
    whole = gdn.resolve(CONFIG, device="cpu", require="cpu")
    x, weight = torch.randn(3, 16), torch.randn(16, 4)
    states = torch.randn(5, 16, 3)
    slots = torch.tensor([4, 0, 2])
    sharded = [slice_channels(states, CONFIG, rank, 2) for rank in range(2)]
    outputs = [
        gdn.resolve(CONFIG.shard(2), device="cpu", require="cpu").conv_update(
            slice_channels(x, CONFIG, rank, 2, axis=1), sharded[rank], slice_channels(weight, CONFIG, rank, 2),
            conv_state_indices=slots,
        )
        for rank in range(2)
    ]  # fmt: skip
    expected = whole.conv_update(x, states, weight, conv_state_indices=slots)
    torch.testing.assert_close(merge_channels(outputs, CONFIG, axis=1), expected)
    assert torch.equal(merge_channels(sharded, CONFIG), states)


def test_what_cannot_be_divided_is_refused():
    with pytest.raises(gdn.ConfigError, match="num_k_heads=2"):
        slice_channels(torch.zeros(16, 3), CONFIG, 0, 4)
    with pytest.raises(gdn.InputError, match="expected 16 channels"):
        slice_channels(torch.zeros(15, 3), CONFIG, 0, 2)
    with pytest.raises(gdn.InputError, match="expected 8 channels"):
        merge_channels([torch.zeros(16, 3)] * 2, CONFIG)
    with pytest.raises(gdn.InputError, match="rank"):
        slice_channels(torch.zeros(16, 3), CONFIG, 2, 2)
