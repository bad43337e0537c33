"""Equalities between operations: they must hold whatever the reference says."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gdn.testing.compare import relative_error
from gdn.testing.harness import Geometry
from gdn.testing.harness import Harness
from gdn.testing.harness import Tokens
from gdn.testing.tolerances import smallest_row


class Algebra(Harness):
    """Decode, extend and verify are one recurrence."""

    def test_extend_equals_decode_steps(self) -> None:
        geometry = self.geometry("extend", "decode", HV=2)
        for length in (1, 5, 64, 65, 130):
            tokens = self.random_tokens(geometry, length, seed=length)
            whole, steps = self._pools(geometry, 2)
            out = self.run("extend", geometry, tokens, whole, [1], [0, length]).output[0]
            single = torch.cat([self.run("decode", geometry, one, steps, [1])[0] for one in _each(tokens)])
            floor = smallest_row("extend", geometry.activation)
            self._close(geometry, out, single, floor)
            self._close(geometry, whole[1], steps[1], floor)

    def test_split_extend_equals_whole_extend(self) -> None:
        geometry = self.geometry("extend", HV=2)
        tokens = self.random_tokens(geometry, 200)
        whole, _ = self._pools(geometry, 2)
        out = self.run("extend", geometry, tokens, whole, [1], [0, 200]).output[0]
        for split in (1, 63, 64, 65, 128, 199):
            parts, _ = self._pools(geometry, 2)
            halves = [
                self.run("extend", geometry, tokens.rows(begin, end), parts, [1], [0, end - begin]).output[0]
                for begin, end in ((0, split), (split, 200))
            ]
            self._close(geometry, torch.cat(halves), out)
            self._close(geometry, parts[1], whole[1])

    def test_verify_equals_decode_steps_and_leaves_the_pool_alone(self) -> None:
        geometry = self.geometry("verify", "decode", HV=2, state="float32")
        tokens = self.random_tokens(geometry, 5)
        pool, steps = self._pools(geometry, 2)
        before = pool.clone()
        buffer = pool.new_zeros((1, 5, *pool.shape[1:]))
        options = {"intermediate_states_buffer": buffer, "intermediate_state_indices": self.tensor([0])}
        out = self.run("verify", geometry, tokens, pool, [1], [0, 5], **options)[0]
        assert torch.equal(pool, before)
        for draft, one in enumerate(_each(tokens)):
            self._close(geometry, out[draft : draft + 1], self.run("decode", geometry, one, steps, [1])[0])
            self._close(geometry, buffer[0, draft], steps[1])

    def test_linear_parents_make_a_tree_a_chain(self) -> None:
        geometry = self.geometry("verify", "tree_verify", HV=2, state="float32")
        tokens = self.random_tokens(geometry, 6)
        pool, _ = self._pools(geometry, 2)
        results = []
        for operation, parents in (("verify", None), ("tree_verify", self.tensor([[0, 0, 1, 2, 3, 4]]))):
            buffer = pool.new_zeros((1, 6, *pool.shape[1:]))
            out = self.run(
                operation, geometry, tokens, pool, [1], [0, 6], intermediate_states_buffer=buffer,  # type: ignore[arg-type]
                intermediate_state_indices=self.tensor([0]), retrieve_parent_token=parents,
            )  # fmt: skip
            results.append((out[0], buffer[0]))
        self._close(geometry, results[0][0], results[1][0])
        self._close(geometry, results[0][1], results[1][1])

    def test_packed_decode_equals_decode(self) -> None:
        geometry = self.geometry("packed_decode", "decode", HK=2, HV=4)
        tokens = self.random_tokens(geometry, 3)
        packed, split = self._pools(geometry, 4)
        out = self.run("packed_decode", geometry, tokens, packed, [2, 0, 3])
        self._close(geometry, out[0], self.run("decode", geometry, tokens, split, [2, 0, 3])[0])
        self._close(geometry, packed.flatten(0, 1), split.flatten(0, 1))

    def _pools(self, geometry: Geometry, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two equal random pools."""
        pool = self.pool(geometry, slots)
        pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(9)))
        return pool, pool.clone()

    def _close(self, geometry: Geometry, got: torch.Tensor, expected: torch.Tensor, floor: float = 0.1) -> None:
        allowed = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 2.5e-2}[geometry.activation]
        assert relative_error(got.flatten(1).cpu(), expected.flatten(1).cpu(), floor) <= allowed


def _each(tokens: Tokens) -> Iterator[Tokens]:
    for token in range(tokens.count):
        yield tokens.rows(token, token + 1)
