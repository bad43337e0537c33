"""Slots: padding, aliasing, reuse, offsets beyond 32 bits."""

from __future__ import annotations

import pytest
import torch

from gdn.testing.calls import build_call
from gdn.testing.case import Case
from gdn.testing.compare import assert_matches
from gdn.testing.harness import Harness
from gdn.testing.tensors import DTYPES


class SlotCases(Harness):
    def test_case_01_a_padded_row_is_inert(self, operation: str) -> None:
        """The offset was slot * stride with no test of the sign, in some kernels only."""
        if operation in ("gating", "qkv_split"):
            pytest.skip(f"{operation} has no slots")
        for index in ("int32", "int64"):
            case = Case("case-01", slots=(2, -1, 0), pool_slots=4, lengths=(2, 4, 3), index=index)  # type: ignore[arg-type]
            case = self._served(operation, case)
            function = self.op(operation, case.config())  # type: ignore[arg-type]
            assert_matches(function, build_call(operation, case, seed=1, device=self.torch_device()))

    def test_case_02_slot_0_is_an_ordinary_slot(self) -> None:
        """-1 was clamped to 0, or taken modulo the pool's size, onto a live slot."""
        geometry = self.geometry("decode")
        tokens = self.random_tokens(geometry, 5)
        pool = self.pool(geometry, 26)
        pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(0)))
        alone = pool.clone()
        before = pool.clone()
        self.run("decode", geometry, tokens, pool, [0, 5, -1, 6947, -1])
        for row, slot in enumerate((0, 5)):
            self.run("decode", geometry, tokens.rows(row, row + 1), alone, [slot])
        torch.testing.assert_close(pool, alone, rtol=1e-6, atol=1e-6)
        others = [slot for slot in range(26) if slot not in (0, 5)]
        assert torch.equal(pool[others], before[others])

    @pytest.mark.parametrize("length", [1, 2, 5, 64, 70])
    def test_case_03_a_fresh_request_does_not_see_the_previous_tenant(self, length: int) -> None:
        """A slot full of NaN was zeroed by multiplication, or its flag was not passed on."""
        geometry = self.geometry("conv_extend")
        config = geometry.config()
        dim, device = config.conv_dim, self.torch_device()
        function = self.op("conv_extend", config)
        dtype = DTYPES[geometry.activation]
        x = torch.randn(length, dim, device=device).to(dtype).t()
        weight = torch.randn(dim, 4, device=device).to(dtype)
        results = []
        for fill, known in ((float("nan"), False), (0.0, True)):
            pool = torch.full((4, dim, 3), fill, device=device, dtype=dtype)
            flags = self.tensor([known], torch.bool)
            offsets, slot = self.tensor([0, length]), self.tensor([3])
            out = function(
                x, weight, None, conv_states=pool, query_start_loc=offsets, cache_indices=slot, has_initial_state=flags
            )
            results.append((out, pool[3].clone()))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])

    @pytest.mark.large
    def test_case_04_offsets_beyond_31_bits(self) -> None:
        """slot * stride was formed in 32 bits; an unsigned wrap stayed inside the buffer and gave wrong numbers."""
        geometry = self.geometry("decode")
        config = geometry.config(strided_state=True)
        heads, dtype = geometry.heads, DTYPES[geometry.state]
        stride = 2**20
        slots = 2**31 // stride + 2
        self.op("decode", config)
        storage = torch.zeros(slots * stride, dtype=dtype, device=self.torch_device())
        pool = storage.as_strided(
            (slots, heads.HV, heads.V, heads.K), (stride, heads.V * heads.K, heads.K, 1)
        )  # fmt: skip
        pool[0] = 7.0
        tokens = self.random_tokens(geometry, 2)
        small = self.pool(geometry, 2)
        small.copy_(torch.randn(small.shape, generator=torch.Generator().manual_seed(0)))
        pool[slots - 2 :] = small
        far = self.run("decode", geometry, tokens, pool, [slots - 2, slots - 1])
        near = self.run("decode", geometry, tokens, small, [0, 1])
        assert torch.equal(far, near)
        assert torch.equal(pool[slots - 2 :], small)
        assert bool((pool[0] == 7.0).all())

    @pytest.mark.parametrize("operation_name", ["decode", "extend", "verify"])
    def test_case_20_a_pool_with_gaps_is_updated_in_place(self, operation_name: str) -> None:
        """A slot stride of HV*V*K was hard-coded, or a reshape copied the pool and the update was lost."""
        geometry = self.geometry(operation_name, HV=2)  # type: ignore[arg-type]
        heads = geometry.heads
        shape = (6, 2, heads.HV, heads.V, heads.K)
        storage = torch.full(shape, 7.0, dtype=DTYPES[geometry.state], device=self.torch_device())
        pool = storage[:, 1]
        pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(0)))
        plain = pool.contiguous()
        tokens = self.random_tokens(geometry, 2)
        results = [
            self.run(operation_name, geometry, tokens, target, [3, 5])  # type: ignore[arg-type]
            for target in (pool, plain)
        ]
        outputs = [result.output if operation_name == "extend" else result for result in results]
        assert torch.equal(*outputs)
        assert torch.equal(storage[:, 1], plain)
        assert bool((storage[:, 0] == 7.0).all())

    def test_case_81_a_pool_smaller_than_the_batch_is_legal(self) -> None:
        """A check asked for one slot per row."""
        geometry = self.geometry("decode")
        pool = self.pool(geometry, 2)
        out = self.run("decode", geometry, self.random_tokens(geometry, 4), pool, [-1, 0, -1, 1])
        assert bool((out[0, [0, 2]] == 0).all())
        assert bool((out[0, [1, 3]] != 0).any())

    def _served(self, operation: str, case: Case) -> Case:
        for activation in ("float32", "bfloat16", "float16"):
            for state in ("float32", "bfloat16"):
                typed = self.fitted(operation, case.but(activation=activation, state=state))  # type: ignore[arg-type]
                if typed is not None:
                    return typed
        pytest.skip(f"{self.backend} serves no small {operation} on {self.device_info()}")
