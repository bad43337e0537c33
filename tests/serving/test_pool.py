"""The state pool: its memory in both layouts, what each method moves and what it leaves alone."""

from __future__ import annotations

import pytest
import torch

import gdn
from gdn.types import StateContract
from tests.serving.devices import DEVICES

CONFIG = gdn.GdnConfig(
    num_k_heads=1, num_v_heads=2, head_k_dim=16, head_v_dim=24, activation_dtype="bfloat16", max_draft_tokens=3
)
STATE, WINDOW = (2, 24, 16), (CONFIG.conv_dim, 3)
LAYOUTS = pytest.mark.parametrize("layout", ["slot_major", "page_major"])
ON_DEVICES = pytest.mark.parametrize("device", DEVICES)


def make(device="cpu", slots=5, config=CONFIG, **options):
    return gdn.StatePool(config, slots, device, **{"num_layers": 2, **options})


def numbered(pool):
    """Fill window and state of slot s of layer l with 100 l + s; the spare row too."""
    for layer in range(pool.num_layers):
        for row in range(pool.spare + 1):
            pool.conv[layer, row] = 100 * layer + row
            pool.recurrent[layer, row] = 100 * layer + row
    return pool


def assert_holds(pool, expected):
    """`expected`: for each slot the number of its content in layer 0; layer 1 holds 100 more."""
    for layer in range(pool.num_layers):
        state = pool.layer(layer)
        for slot, number in enumerate(expected):
            assert bool((state.recurrent[slot] == number + 100 * layer).all()), (layer, slot)
            assert bool((state.conv[slot] == number + 100 * layer).all()), (layer, slot)


@LAYOUTS
def test_views_have_the_shapes_and_dtypes_of_the_contract(layout):
    pool = make(layout=layout, max_requests=4)
    state = pool.layer(1)
    assert state.recurrent.shape == (5, *STATE)
    assert state.recurrent.dtype == torch.float32
    assert state.conv.shape == (5, *WINDOW)
    assert state.conv.dtype == torch.bfloat16
    assert state.steps.shape == (4, 3, *STATE)
    assert state.windows.shape == (4, 3, *WINDOW)
    assert pool.layer(1) is state
    assert not state.recurrent.any()
    assert not state.conv.any()


def test_slot_major_layers_are_dense_and_page_major_slots_hold_all_layers():
    dense, paged = make(), make(layout="page_major")
    size = 2 * 24 * 16
    assert dense.layer(1).recurrent.is_contiguous()
    assert paged.layer(0).recurrent.stride(0) == 2 * size
    assert paged.layer(1).recurrent.data_ptr() - paged.layer(0).recurrent.data_ptr() == 4 * size
    assert paged.layer(1).conv.stride(0) == 2 * CONFIG.conv_dim * 3
    assert make(layout="page_major", num_layers=1).layer(0).recurrent.is_contiguous()


@LAYOUTS
@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_every_slot_of_every_layer_is_aligned(layout, alignment):
    contract = StateContract(dtype="bfloat16", alignment=alignment, reserved_slots=2)
    pool = make(layout=layout, contract=contract)
    for layer in range(2):
        recurrent = pool.layer(layer).recurrent
        assert recurrent.dtype == torch.bfloat16
        assert recurrent.shape[0] == 7
        assert all(recurrent[slot].data_ptr() % alignment == 0 for slot in range(7))
        assert all(recurrent[slot].is_contiguous() for slot in range(7))


def test_entries_do_not_overlap():
    pool = make(layout="page_major", contract=StateContract(dtype="float32", alignment=4096))
    assert_holds(numbered(pool), range(5))


def test_nbytes_counts_what_the_config_promises():
    per_slot = CONFIG.state_bytes_per_slot()
    assert per_slot == 2 * 24 * 16 * 4 + CONFIG.conv_dim * 3 * 2
    assert make().nbytes == 2 * 6 * per_slot
    assert make(slots=6).nbytes - make().nbytes == 2 * per_slot
    assert make(max_requests=4).nbytes == 2 * (6 + 4 * 3) * per_slot
    ring = make(config=CONFIG.model_copy(update={"replay_window": 8}))
    entries = 2 * 6 * (8 * (2 * 24 + 16 + 2) * 4)
    assert ring.nbytes == 2 * 6 * per_slot + entries + 6 * 4


@ON_DEVICES
@LAYOUTS
@pytest.mark.parametrize("as_tensor", [False, True])
def test_reset_clears_the_slots_and_no_other(layout, as_tensor, device):
    pool = numbered(make(device, layout=layout))
    pool.recurrent[:, 3] = torch.nan
    slots = [3, -1, 1, 5, 99]
    pool.reset(torch.tensor(slots, dtype=torch.int32, device=device) if as_tensor else slots)
    for layer in range(2):
        assert not pool.layer(layer).recurrent[[1, 3]].any()
        assert not pool.layer(layer).conv[[1, 3]].any()
        for slot in (0, 2, 4):
            assert bool((pool.layer(layer).recurrent[slot] == 100 * layer + slot).all())
            assert bool((pool.layer(layer).conv[slot] == 100 * layer + slot).all())


@ON_DEVICES
@LAYOUTS
def test_copy_moves_windows_and_states_of_all_layers(layout, device):
    pool = numbered(make(device, layout=layout))
    pool.copy([4, -1, 3, 5], [1, 0, 99, 2])
    assert_holds(pool, [0, 4, 2, 3, 4])
    pool.copy(3, 0)
    assert_holds(pool, [3, 4, 2, 3, 4])
    pool.copy(torch.empty(0, dtype=torch.int32, device=device), [])
    assert_holds(pool, [3, 4, 2, 3, 4])


@ON_DEVICES
@LAYOUTS
def test_commit_takes_the_named_step_of_the_named_row(layout, device):
    pool = numbered(make(device, layout=layout, max_requests=4))
    for layer in range(2):
        for row in range(4):
            for step in range(3):
                pool.layer(layer).steps[row, step] = 100 * layer + 40 + 3 * row + step
                pool.layer(layer).windows[row, step] = 100 * layer + 40 + 3 * row + step
    slots = torch.tensor([4, 0, -1, 2], dtype=torch.int32, device=device)
    pool.commit(slots, torch.tensor([2, -1, 0, 0], device=device))
    assert_holds(pool, [0, 1, 49, 3, 42])
    rows = torch.tensor([3, -1, 0, 4], dtype=torch.int32, device=device)
    pool.commit(slots, torch.tensor([1, 1, 0, 2], device=device), rows=rows)
    assert_holds(pool, [0, 1, 49, 3, 50])
    pool.commit(slots, torch.tensor([3, 3, 3, 3], device=device))
    assert_holds(pool, [0, 1, 49, 3, 50])


@ON_DEVICES
def test_a_copy_brings_the_replay_ring_of_its_source_up_to_date(device):
    pool = make(device, config=CONFIG.model_copy(update={"replay_window": 4}))
    d, k, g = pool.ring.d, pool.ring.k, pool.ring.g
    for part in (d, k, g):
        part.fill_(torch.nan)
    pool.recurrent[:, 1] = 8.0
    d[:, 1, :, :2], k[:, 1, :, :2] = 1.0, 0.0
    k[:, 1, :, 0, 0], k[:, 1, :, 1, 1] = 1.0, 1.0
    g[:, 1, :, :2] = torch.tensor(0.5).log()
    pool.ring.cursors[1], pool.ring.cursors[2] = 2, 3
    pool.copy(1, 2)
    for slot in (1, 2):
        torch.testing.assert_close(pool.recurrent[0, slot, 0, 0, :3].cpu(), torch.tensor([2.5, 3.0, 2.0]))
        assert int(pool.ring.cursors[slot]) == 0


def test_a_forgotten_ring_entry_folds_to_nothing():
    pool = make(config=CONFIG.model_copy(update={"replay_window": 4}))
    pool.recurrent[:, 1] = 8.0
    pool.ring.d[:, 1], pool.ring.k[:, 1] = 1.0, 1.0
    pool.ring.g[:, 1, :, 0], pool.ring.g[:, 1, :, 1] = 0.0, -torch.inf
    pool.ring.cursors[1] = 2
    pool.copy(1, 2)
    assert bool((pool.recurrent[:, 2] == 1.0).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "column_major"}, "layout: expected one of slot_major, page_major, got 'column_major'"),
        ({"slots": 0}, "num_slots=0"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"max_requests": -1}, "max_requests=-1"),
        ({"config": CONFIG.model_copy(update={"state_dtype": "auto"})}, "contract=triple.state"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(options, message):
    with pytest.raises(gdn.ConfigError, match=message):
        make(**options)


def test_commit_without_verify_buffers_says_how_to_get_them():
    with pytest.raises(gdn.ConfigError, match="max_requests >= 1"):
        make().commit([0], torch.tensor([0]))


def test_a_convolution_of_one_tap_has_no_window():
    pool = make(config=CONFIG.model_copy(update={"conv_kernel_size": 1}), max_requests=2)
    pool.reset(0)
    pool.copy(0, 1)
    pool.commit([0], torch.tensor([0]))
    assert pool.layer(0).conv.shape == (5, CONFIG.conv_dim, 0)
