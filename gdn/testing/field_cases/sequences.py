"""Sequences: empty ones, chunk edges, carrying on, snapshots."""

from __future__ import annotations

import pytest
import torch

from gdn.testing.calls import build_call
from gdn.testing.case import Case
from gdn.testing.compare import assert_matches
from gdn.testing.harness import Harness


class SequenceCases(Harness):
    @pytest.mark.parametrize("offsets", [(0, 0, 3, 3, 5), (0, 0), (0, 5, 5)])
    def test_case_17_empty_sequences_inside_a_batch(self, offsets: tuple[int, ...]) -> None:
        """A chunk table that assumed a chunk for every sequence gave every later one its neighbour's state."""
        geometry = self.geometry("extend")
        pool = self.pool(geometry, 5)
        pool[:, :, :, -1] = 8.0
        before = pool.clone()
        count = len(offsets) - 1
        tokens = self.basis_tokens(geometry, offsets[-1])
        out = self.run("extend", geometry, tokens, pool, list(range(count)), offsets).output
        assert bool(out.isfinite().all())
        for sequence in range(count):
            begin, end = offsets[sequence : sequence + 2]
            alone = before[sequence : sequence + 1].clone()
            if begin < end:
                self.run("extend", geometry, tokens.rows(begin, end), alone, [0], [0, end - begin])
            assert torch.equal(pool[sequence], alone[0])

    def test_case_18_no_rows_at_all(self, operation: str) -> None:
        """A grid of size zero, or a reshape with -1 over nothing, on an idle data-parallel rank."""
        lengths = (0,) if operation in ("gating", "qkv_split") else ()
        for activation, state in (("float32", "float32"), ("bfloat16", "bfloat16")):
            case = Case("case-18", lengths=lengths, activation=activation, state=state)  # type: ignore[arg-type]
            fitted = self.fitted(operation, case)  # type: ignore[arg-type]
            if fitted is not None:
                function = self.op(operation, fitted.config())  # type: ignore[arg-type]
                assert_matches(function, build_call(operation, fitted, seed=0, device=self.torch_device()))

    @pytest.mark.parametrize("split", [1, 63, 64, 65, 99])
    def test_case_40_a_prefill_that_starts_late_continues_the_state(self, split: int) -> None:
        """Scan registers started at 0: every prompt above the window was wrong, and random data hid it."""
        geometry = self.geometry("extend")
        columns = min(100, geometry.heads.K)
        tokens = self.basis_tokens(geometry, columns, decay=False)
        split = min(split, columns - 1)
        pool = self.pool(geometry, 3)
        self.run("extend", geometry, tokens.rows(0, split), pool, [2], [0, split])
        self.run("extend", geometry, tokens.rows(split, columns), pool, [2], [0, columns - split])
        expected = torch.arange(1.0, columns + 1)
        torch.testing.assert_close(pool[2, 0, 0, :columns].float().cpu(), expected, rtol=8e-3, atol=0.0)

    def test_case_41_rows_past_the_last_offset_are_zero(self) -> None:
        """Outputs were allocated uninitialised and only valid rows written: NaN spread from the others."""
        geometry = self.geometry("extend")
        tokens = self.random_tokens(geometry, 128)
        heads = geometry.heads
        for out in (
            None,
            torch.full((1, 128, heads.HV, heads.V), torch.nan, dtype=tokens.v.dtype, device=tokens.v.device),
        ):
            result = self.run("extend", geometry, tokens, self.pool(geometry, 1), [0], [0, 100], out=out).output
            assert bool((result[0, 100:] == 0).all())
            assert bool((result[0, :100] != 0).any())

    def test_case_42_the_first_call_and_later_calls_agree(self) -> None:
        """Scratch that early launches left unwritten, or overran: NaN first and fine later, or the reverse."""
        geometry = self.geometry("extend")
        seen: dict[int, torch.Tensor] = {}
        for length in (256, 128, 256, 64, 128, 37, 70, 70, 37, 128, 64, 256):
            tokens = self.random_tokens(geometry, length)
            junk = [torch.full((1 << 20,), torch.nan, device=self.torch_device()) for _ in range(4)]
            del junk
            kept = tokens.k.clone()
            out = self.run("extend", geometry, tokens, self.pool(geometry, 1), [0], [0, length]).output
            assert torch.equal(tokens.k, kept)
            assert bool(out.isfinite().all())
            assert torch.equal(seen.setdefault(length, out), out)

    def test_case_08_a_snapshot_is_counted_in_kernel_chunks_from_the_start_of_the_call(self) -> None:
        """One constant served for the kernel's chunk (64) and the cache's page (128)."""
        geometry = self.geometry("extend")
        if self.bind("extend", geometry.config(state_checkpoints=True)) is None:
            pytest.skip(f"{self.backend} declares no state_checkpoints")
        tokens = self._cursor_tokens(geometry, 320)
        pool = self.pool(geometry, 4)
        chunks, slots = self.tensor([4]), self.tensor([3])
        self.run("extend", geometry, tokens, pool, [0], [0, 320], snapshot_chunks=chunks, snapshot_slots=slots)
        assert self._cursor(pool, 3) == pytest.approx(256.0, rel=1e-2)
        assert self._cursor(pool, 0) == pytest.approx(320.0, rel=1e-2)
        pool = self.pool(geometry, 4)
        self.run("extend", geometry, tokens.rows(0, 64), pool, [0], [0, 64])
        options = {"snapshot_chunks": self.tensor([2]), "snapshot_slots": slots}
        self.run("extend", geometry, tokens.rows(64, 264), pool, [0], [0, 200], **options)
        assert self._cursor(pool, 3) == pytest.approx(192.0, rel=1e-2)

    def test_case_60_offsets_are_the_only_source_of_the_number_of_sequences(self) -> None:
        """A dummy initial state was sized by the batch (1) while the grid used N sequences."""
        geometry = self.geometry("extend")
        tokens = self.random_tokens(geometry, 7)
        pool, alone = self.pool(geometry, 3), self.pool(geometry, 3)
        self.run("extend", geometry, tokens, pool, [0, 1, 2], [0, 2, 3, 7])
        for slot, (begin, end) in enumerate(((0, 2), (2, 3), (3, 7))):
            self.run("extend", geometry, tokens.rows(begin, end), alone, [slot], [0, end - begin])
        torch.testing.assert_close(pool, alone, rtol=1e-5, atol=1e-6)

    def test_case_66_an_fp32_snapshot_restores_exactly(self) -> None:
        """A cold run kept fp32 across a boundary where a cache hit restarted from 16 bits."""
        geometry = self.geometry("extend", state="float32")
        if self.bind("extend", geometry.config(state_checkpoints=True)) is None:
            pytest.skip(f"{self.backend} declares no state_checkpoints")
        tokens = self.random_tokens(geometry, 200)
        pool = self.pool(geometry, 2)
        options = {"snapshot_chunks": self.tensor([2]), "snapshot_slots": self.tensor([1])}
        out = self.run("extend", geometry, tokens, pool, [0], [0, 200], **options).output
        tail = self.run("extend", geometry, tokens.rows(128, 200), pool, [1], [0, 72]).output
        assert torch.equal(tail[0], out[0, 128:])
        assert torch.equal(pool[0], pool[1])

    def test_case_79_a_long_ragged_batch_with_initial_states(self) -> None:
        """A work group ended a pipeline it didn't own: a deadlock with initial states only."""
        geometry = self.geometry("extend", HV=3)
        for lengths in ((138, 99, 140, 116, 87, 103, 19), (500, 1, 1, 1, 1, 1, 1)):
            offsets = [0]
            for length in lengths:
                offsets.append(offsets[-1] + length)
            tokens = self.random_tokens(geometry, offsets[-1])
            pool = self.pool(geometry, 7, fill=0.25)
            alone = self.pool(geometry, 1, fill=0.25)
            self.run("extend", geometry, tokens, pool, list(range(7)), offsets)
            self.run("extend", geometry, tokens.rows(offsets[-2], offsets[-1]), alone, [0], [0, lengths[-1]])
            torch.testing.assert_close(pool[6], alone[0], rtol=1e-5, atol=1e-6)

    def _cursor_tokens(self, geometry, count):  # type: ignore[no-untyped-def]
        """k = e0, beta = 1, g = 0, v_t = t + 1: column 0 of the state is the number of the last token."""
        tokens = self.basis_tokens(geometry, 1, decay=False)
        rows = tokens.rows(0, 1)
        repeated = {name: getattr(rows, name).repeat_interleave(count, dim=0) for name in ("q", "k", "v", "a", "b")}
        repeated["v"] = torch.arange(1.0, count + 1).to(tokens.v)[:, None, None].expand(count, *tokens.v.shape[1:])
        return type(tokens)(A_log=tokens.A_log, dt_bias=tokens.dt_bias, **repeated)

    @staticmethod
    def _cursor(pool: torch.Tensor, slot: int) -> float:
        return float(pool[slot, 0, 0, 0])
