"""Batches: what their fields must be, and static tensors refreshed in place."""

from __future__ import annotations

import pytest
import torch

import gdn


def full_batch():
    def ints(*shape):
        return torch.full(shape, 7, dtype=torch.int32)

    return gdn.Batch(
        slots=ints(3), query_start_loc=ints(4), has_initial_state=torch.zeros(3, dtype=torch.bool),
        seq_lens_cpu=[1, 2, 3], snapshot_slots=ints(3), snapshot_lengths=ints(3), positions=ints(3), rows=ints(3),
        retrieve_next_token=ints(3, 2), retrieve_next_sibling=ints(3, 2),
    )  # fmt: skip


GIVEN = {
    "slots": [4, 2],
    "query_start_loc": [0, 5, 9],
    "has_initial_state": [False, True],
    "positions": [11, 12],
    "rows": [1, 0],
}


def test_what_has_no_value_becomes_padding():
    batch = full_batch()
    batch.plan = "of another step"
    addresses = {name: getattr(batch, name).data_ptr() for name in GIVEN}
    batch.refresh(**GIVEN, snapshot_slots=torch.tensor([6]), retrieve_next_token=[[1, -1]])
    assert batch.slots.tolist() == [4, 2, -1]
    assert batch.query_start_loc.tolist() == [0, 5, 9, 9]
    assert batch.has_initial_state.tolist() == [False, True, True]
    assert batch.positions.tolist() == [11, 12, 0]
    assert batch.rows.tolist() == [1, 0, -1]
    assert batch.snapshot_slots.tolist() == [6, -1, -1]
    assert batch.snapshot_lengths.tolist() == [-1, -1, -1]
    assert batch.retrieve_next_token.tolist() == [[1, -1], [-1, -1], [-1, -1]]
    assert batch.retrieve_next_sibling.tolist() == [[-1, -1]] * 3
    assert batch.seq_lens_cpu is None
    assert batch.plan is None
    assert {name: getattr(batch, name).data_ptr() for name in GIVEN} == addresses


def test_nobody_at_all():
    batch = full_batch()
    batch.refresh(**{name: [] for name in GIVEN} | {"query_start_loc": [0]}, retrieve_next_token=[])
    assert batch.slots.tolist() == [-1] * 3
    assert batch.query_start_loc.tolist() == [0] * 4
    assert batch.retrieve_next_token.tolist() == [[-1, -1]] * 3


@pytest.mark.parametrize("name", GIVEN)
def test_values_that_only_the_caller_knows_must_be_given(name):
    batch, before = full_batch(), full_batch()
    with pytest.raises(gdn.InputError, match=f"{name}: expected a value"):
        batch.refresh(**{other: value for other, value in GIVEN.items() if other != name})
    assert torch.equal(batch.slots, before.slots)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"slots": [1, 2, 3, 4]}, r"slots: expected up to \[3\], got \[4\]"),
        ({"retrieve_next_token": [[1, 2, 3]]}, r"retrieve_next_token: expected up to \[3, 2\], got \[1, 3\]"),
        ({"query_start_loc": []}, "query_start_loc: expected at least the boundary 0"),
    ],
)
def test_values_that_do_not_fit_are_refused_before_anything_is_written(values, message):
    batch, before = full_batch(), full_batch()
    with pytest.raises(gdn.InputError, match=message):
        batch.refresh(**GIVEN | values)
    for name in GIVEN:
        assert torch.equal(getattr(batch, name), getattr(before, name))


def test_a_field_that_the_batch_was_built_without_is_refused():
    batch = gdn.Batch(slots=torch.tensor([1]))
    with pytest.raises(gdn.InputError, match="snapshot_slots: this batch was built without"):
        batch.refresh(slots=[1], snapshot_slots=[2])


def test_half_a_plan_is_refused():
    one = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(gdn.InputError, match="expected both or neither"):
        gdn.Batch(slots=one[0], retrieve_next_token=one)
    with pytest.raises(gdn.InputError, match="snapshot_slots: expected"):
        gdn.Batch(slots=one[0], snapshot_lengths=one[0])
