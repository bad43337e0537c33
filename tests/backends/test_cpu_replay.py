"""Replay decode of the cpu backend: any mix of appends and flushes equals decoding step by step."""

from __future__ import annotations

import math

import pytest
import torch

from gdn.backends.cpu.packed import packed_decode
from gdn.backends.cpu.replay import replay_decode

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, SLOTS = 2, 6, 20, 12, 5
DIM = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM


class Rings:
    """Empty rings full of NaN, so that reading past the cursor shows."""

    def __init__(self, length, dtype=torch.float32):
        self.d = torch.full((SLOTS, VALUE_HEADS, length, VALUE_DIM), math.nan, dtype=dtype)
        self.k = torch.full((SLOTS, KEY_HEADS, length, KEY_DIM), math.nan, dtype=dtype)
        self.g = torch.full((SLOTS, VALUE_HEADS, length), math.nan)

    def arguments(self):
        return {"replayssm_d": self.d, "replayssm_k": self.k, "replayssm_g": self.g}

    def clone(self):
        copy = object.__new__(Rings)
        copy.d, copy.k, copy.g = self.d.clone(), self.k.clone(), self.g.clone()
        return copy

    def equals(self, other):
        pairs = ((self.d, other.d), (self.k, other.k), (self.g, other.g))
        return all(torch.equal(mine.nan_to_num(1e9), theirs.nan_to_num(1e9)) for mine, theirs in pairs)


def token(rows, generator):
    mixed = torch.randn(rows, DIM, generator=generator)
    return (
        mixed,
        torch.randn(rows, VALUE_HEADS, generator=generator),
        torch.randn(rows, VALUE_HEADS, generator=generator),
    )


def gates():
    return {"A_log": torch.linspace(-1, 1, VALUE_HEADS), "dt_bias": torch.linspace(-2, 2, VALUE_HEADS)}


@pytest.mark.parametrize("length", [1, 2, 4, 16])
def test_replay_equals_step_by_step_decode(length):
    generator = torch.Generator().manual_seed(length)
    exact = torch.randn(SLOTS, VALUE_HEADS, VALUE_DIM, KEY_DIM, generator=generator)
    checkpoint, rings = exact.clone(), Rings(length)
    slots = torch.tensor([3, 0, 4])
    cursor = torch.zeros(3, dtype=torch.int32)
    for step in range(3 * length + 2):
        mixed, a, b = token(3, generator)
        if step == 3:
            a[0] = 200.0
        force = torch.tensor([0, 0, int(step % 3 == 1)], dtype=torch.int32)
        before, ring_before = checkpoint.clone(), rings.clone()
        out = replay_decode(
            mixed, a, b, **gates(), ssm_states=checkpoint, cache_indices=slots, **rings.arguments(),
            replayssm_write_pos=cursor, replayssm_force_flush=force, scale=0.7,
        )  # fmt: skip
        expected = packed_decode(mixed, a, b, **gates(), ssm_states=exact, cache_indices=slots, scale=0.7)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        for row, slot in enumerate(slots.tolist()):
            flushed = cursor[row] == length - 1 or force[row]
            if flushed:
                torch.testing.assert_close(checkpoint[slot], exact[slot], atol=1e-5, rtol=1e-5)
                assert torch.equal(rings.d[slot].nan_to_num(1e9), ring_before.d[slot].nan_to_num(1e9))
            else:
                assert torch.equal(checkpoint[slot], before[slot])
                assert rings.d[slot, :, cursor[row]].isfinite().all()
                assert torch.equal(rings.d[slot, :, : cursor[row]], ring_before.d[slot, :, : cursor[row]])
            cursor[row] = 0 if flushed else cursor[row] + 1
    assert torch.equal(checkpoint[[1, 2]], exact[[1, 2]])
    assert rings.d[[1, 2]].isnan().all()


@pytest.mark.parametrize("position", [-5, 4, 2**31 - 1])
def test_padded_rows_and_wild_cursors_stay_inside(position):
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(SLOTS, VALUE_HEADS, VALUE_DIM, KEY_DIM, generator=generator)
    before, rings = pool.clone(), Rings(4)
    mixed, a, b = token(2, generator)
    mixed[0] = math.nan
    for cache_indices in ([-1, SLOTS], [-1, 2]):
        untouched = rings.clone()
        out = replay_decode(
            mixed, a, b, **gates(), ssm_states=pool, cache_indices=torch.tensor(cache_indices), **rings.arguments(),
            replayssm_write_pos=torch.tensor([0, position], dtype=torch.int32),
        )  # fmt: skip
        assert (out[0, 0] == 0).all()
        if cache_indices[1] == SLOTS:
            assert (out == 0).all()
            assert rings.equals(untouched)
            assert torch.equal(pool, before)
    others = [0, 1, 3, 4]
    assert torch.equal(pool[others], before[others])
    assert rings.d[others].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ring_in_the_state_dtype(dtype):
    generator = torch.Generator().manual_seed(2)
    exact = torch.randn(SLOTS, VALUE_HEADS, VALUE_DIM, KEY_DIM, generator=generator).to(dtype)
    checkpoint, reference, rings = exact.clone(), exact.float(), Rings(8, dtype)
    for step in range(8):
        mixed, a, b = token(1, generator)
        arguments = {**gates(), "cache_indices": torch.tensor([2])}
        out = replay_decode(
            mixed, a, b, **arguments, ssm_states=checkpoint, **rings.arguments(),
            replayssm_write_pos=torch.tensor([step], dtype=torch.int32),
        )  # fmt: skip
        expected = packed_decode(mixed, a, b, **arguments, ssm_states=reference)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=0)
    torch.testing.assert_close(checkpoint[2].float(), reference[2], atol=3e-2, rtol=0)
