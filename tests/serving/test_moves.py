"""Moves between pools: the index operations and the Triton kernel, in its interpreter or on a GPU, do the same."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from gdn.serving import moves
from gdn.serving.storage import allocate
from tests.serving.devices import GPU

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL = [
    pytest.param(
        "cpu", marks=[pytest.mark.interpret, pytest.mark.skipif(not INTERPRET, reason="needs TRITON_INTERPRET=1")]
    ),
    GPU,
]
ENTRIES = pytest.mark.parametrize("entry", [(2, 3, 5), (40, 100), (7, 0)], ids=str)
LAYOUTS = pytest.mark.parametrize("layout", ["slot_major", "page_major"])
PAIRS = ([4, 5, 0, 5, 2], [1, 1, 6, 0, 3])
"""Where to and where from; row 5 is the spare one."""


def kernel():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    from gdn.serving._move_kernel import launch

    return launch


def numbered(layers, rows, entry, layout, device, first=0.0, dtype=torch.float32):
    pool = allocate(layers, rows, entry, dtype, device, layout=layout, alignment=64)
    return pool.copy_(torch.arange(pool.numel(), device=device).view(pool.shape) % 1000 + first)


def assert_moved(target, source, before):
    to, origin = PAIRS
    for row in range(5):
        right = source[:, origin[to.index(row)]] if row in to else before[:, row]
        assert torch.equal(target[:, row], right.to(target.dtype)), row


@ENTRIES
@LAYOUTS
def test_index_operations(entry, layout):
    target, source = numbered(3, 6, entry, layout, "cpu"), numbered(3, 7, entry, "slot_major", "cpu", 2000.0)
    before = target.clone()
    moves.move_rows(target, torch.tensor(PAIRS[0]), source, torch.tensor(PAIRS[1]))
    assert_moved(target, source, before)
    assert torch.equal(target[:, 5], before[:, 5])
    moves.clear_rows(target, torch.tensor([5, 0]))
    assert not target[:, 0].any()
    assert torch.equal(target[:, 1], before[:, 1])


@ENTRIES
@LAYOUTS
def test_devices_without_the_kernel_write_padding_to_the_spare_row(entry, layout, monkeypatch):
    monkeypatch.setattr(moves, "_real", lambda target, *indices: indices)
    target, source = numbered(3, 6, entry, layout, "cpu"), numbered(3, 7, entry, "slot_major", "cpu", 2000.0)
    before = target.clone()
    moves.move_rows(target, torch.tensor(PAIRS[0]), source, torch.tensor(PAIRS[1]))
    assert_moved(target, source, before)
    moves.clear_rows(target, torch.tensor([5, 0, 5]))
    assert not target[:, 0].any()
    assert torch.equal(target[:, 1], before[:, 1])


@pytest.mark.parametrize("device", KERNEL)
@ENTRIES
@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel(dtype, entry, layout, device):
    launch = kernel()
    target = numbered(3, 6, entry, layout, device, dtype=dtype)
    source = numbered(3, 7, entry, "slot_major", device, 2000.0, dtype)
    before = target.clone()
    to, origin = (torch.tensor(indices, device=device) for indices in PAIRS)
    launch(target, to, source, origin)
    assert_moved(target, source, before)
    assert torch.equal(target[:, 5], before[:, 5])
    target[:, 0] = torch.nan
    launch(target, torch.tensor([5, 0], device=device))
    assert not target[:, 0].any()
    assert torch.equal(target[:, [1, 3, 5]], before[:, [1, 3, 5]])
    launch(target, to[:0], source, origin[:0])
