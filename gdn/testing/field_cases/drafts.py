"""Speculation: partial acceptance, trees, buffer rows, no side effect."""

from __future__ import annotations

import pytest
import torch

from gdn.errors import InputError
from gdn.testing.harness import Harness


class DraftCases(Harness):
    @pytest.mark.parametrize("accepted", [1, 2, 3, 4])
    def test_case_05_the_state_after_each_accepted_draft(self, accepted: int) -> None:
        """No rollback of the state: greedy text with speculation differed from greedy text without."""
        geometry = self.geometry("verify")
        pool, buffer = self._verify(geometry, [2], 4)
        expected = torch.tensor([(t + 1) * 0.5 ** (accepted - 1 - t) if t < accepted else 0.0 for t in range(4)])
        torch.testing.assert_close(buffer[0, accepted - 1, 0, 0, :4].float().cpu(), expected, rtol=1e-2, atol=1e-6)
        assert bool((pool == 0).all())

    def test_case_15_each_draft_starts_from_its_parent(self) -> None:
        """A branching draft was verified as a chain: depth alone names no parent among siblings."""
        geometry = self.geometry("tree_verify")
        for index in (torch.int32, torch.int64):
            parents = self.tensor([[-1, 0, 0, 1, 2]], index)
            pool, buffer = self._verify(geometry, [1], 5, parents=parents)
            nodes = buffer[0, :, 0, 0, :5].float().cpu()
            torch.testing.assert_close(nodes[3], torch.tensor([0.25, 1, 0, 4, 0]), rtol=1e-2, atol=1e-6)
            torch.testing.assert_close(nodes[4], torch.tensor([0.25, 0, 1.5, 0, 5]), rtol=1e-2, atol=1e-6)
            assert bool((pool == 0).all())

    def test_case_15_two_requests_with_different_trees(self) -> None:
        geometry = self.geometry("tree_verify")
        parents = self.tensor([[0, 0, 0], [0, 0, 1]]).repeat_interleave(2, dim=1)[:, ::2]
        _, buffer = self._verify(geometry, [0, 1], 3, parents=parents)
        nodes = buffer[:, 2, 0, 0, :3].float().cpu()
        torch.testing.assert_close(nodes[0], torch.tensor([0.5, 0, 3]), rtol=1e-2, atol=1e-6)
        torch.testing.assert_close(nodes[1], torch.tensor([0.25, 1, 3]), rtol=1e-2, atol=1e-6)

    def test_case_26_the_buffer_is_indexed_by_row_not_by_slot(self) -> None:
        """Pool addressing was reused for a batch-scoped buffer: writes out of bounds at high slots."""
        geometry = self.geometry("verify")
        _, buffer = self._verify(geometry, [14, 15], 4, slots=16, guards=True)
        assert bool((buffer[[0, 3]] == 7.0).all())
        assert bool((buffer[1:3, :4] != 7.0).any())
        assert bool((buffer[1:3, 4:] == 7.0).all())
        _, buffer = self._verify(geometry, [-1, 0, -1, 1], 4, slots=2, guards=True)
        assert bool((buffer[[0, 1, 3, 5]] == 7.0).all())

    def test_case_73_verify_twice_gives_the_same(self) -> None:
        """A kernel without the no-update flag stood in for verify."""
        geometry = self.geometry("verify")
        first = self._verify(geometry, [1], 4)
        second = self._verify(geometry, [1], 4, pool=first[0])
        assert torch.equal(first[1], second[1])
        assert bool((second[0] == 0).all())

    def test_case_82_a_buffer_may_hold_more_steps_than_drafts(self) -> None:
        """Capacity 4: two drafts fill two entries; six drafts are refused."""
        geometry = self.geometry("verify")
        _, buffer = self._verify(geometry, [0], 2, guards=True)
        assert bool((buffer[1, 2:] == 7.0).all())
        pool = self.pool(geometry, 1)
        small = pool.new_zeros((1, 4, *pool.shape[1:]))
        with pytest.raises(InputError, match="intermediate_states_buffer"):
            self.run(
                "verify", geometry, self.basis_tokens(geometry, 6), pool, [0], [0, 6],
                intermediate_states_buffer=small, intermediate_state_indices=self.tensor([0]),
            )  # fmt: skip

    def _verify(  # type: ignore[no-untyped-def]
        self, geometry, slots_named, drafts, *, parents=None, slots=4, guards=False, pool=None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pool and buffer after a verify of basis tokens; guards: a row before and after, two more steps, full of 7."""
        pool = self.pool(geometry, slots) if pool is None else pool
        count, extra = len(slots_named), int(guards)
        buffer = pool.new_full((count + 2 * extra, drafts + 2 * extra, *pool.shape[1:]), 7.0)
        one = self.basis_tokens(geometry, drafts)
        fields = {name: torch.cat([getattr(one, name)] * count) for name in ("q", "k", "v", "a", "b")}
        tokens = type(one)(A_log=one.A_log, dt_bias=one.dt_bias, **fields)
        self.run(
            "tree_verify" if parents is not None else "verify", geometry, tokens, pool, slots_named,
            [drafts * n for n in range(count + 1)], intermediate_states_buffer=buffer, cache_steps=drafts,
            intermediate_state_indices=self.tensor([row + extra for row in range(count)]),
            retrieve_parent_token=parents,
        )  # fmt: skip
        return pool, buffer
