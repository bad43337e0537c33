"""Arithmetic: strong decay, repeated keys, short vectors, the state's precision, order of operations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gdn.testing.compare import relative_error
from gdn.testing.harness import Geometry
from gdn.testing.harness import Harness
from gdn.testing.harness import Tokens
from gdn.testing.reference import extend as exact_extend
from gdn.testing.tensors import DTYPES
from gdn.testing.tolerances import smallest_row

_CHUNK_TOLERANCE = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 2e-2}


class NumericCases(Harness):
    @pytest.mark.parametrize("rate", [-0.5, -1.0, -1.4, -1.5, -2.0, -5.0, -27.6, -math.inf, -1e30])
    def test_case_12_very_strong_decay(self, rate: float) -> None:
        """exp(c_i) * exp(-c_j) overflows once a chunk's sum passes 88; so does masking after the exponential."""
        geometry = self.geometry("extend")
        g = torch.full((64,), rate)
        if not math.isfinite(rate):
            g = torch.full((64,), -0.5).index_fill(0, torch.tensor([20]), rate)
        self._extend_matches(geometry, self.random_tokens(geometry, 64), g, torch.full((64,), 0.5))

    @pytest.mark.parametrize("beta", [0.835, 0.99])
    @pytest.mark.parametrize("length", [64, 512])
    def test_case_13_repeated_unit_keys(self, beta: float, length: int) -> None:
        """A rounded diagonal inverse, or too few refinement rounds: NaN or garbage on real prompts."""
        geometry = self.geometry("extend")
        tokens = self.random_tokens(geometry, length)
        tokens = replace(tokens, k=tokens.k[:1].expand(length, -1, -1).contiguous())
        allowed = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}[geometry.activation]
        self._extend_matches(geometry, tokens, torch.full((length,), -1e-3), torch.full((length,), beta), allowed)

    def test_case_46_an_fp32_state_is_not_rounded_per_step(self) -> None:
        """A state kept in the storage dtype stalls: 0.5 in bf16, 0.875 in fp16, instead of 0.98."""
        for state in ("float32", "bfloat16", "float16"):
            geometry = self.geometry("decode")
            geometry = replace(geometry, state=state)  # type: ignore[arg-type]
            if self.bind("decode", geometry.config()) is None:
                continue
            tokens = self.basis_tokens(geometry, 1, decay=False)
            tokens = replace(tokens, b=torch.full_like(tokens.b, math.log(2**-9 / (1 - 2**-9))))
            beta = torch.sigmoid(tokens.b[0, 0].double()).item()  # of b as the activation dtype holds it
            pool, expected = self.pool(geometry, 1), torch.zeros((), dtype=DTYPES[geometry.state])
            for _ in range(2048):
                self.run("decode", geometry, tokens, pool, [0])
                expected.fill_(expected.item() + beta * (1.0 - expected.item()))
            assert float(pool[0, 0, 0, 0]) == pytest.approx(expected.item(), rel=1e-2)

    @pytest.mark.parametrize("length", [1, 65])
    def test_case_47_an_fp32_state_beyond_the_range_of_fp16(self, length: int) -> None:
        """The state entering a chunk was staged in the activation dtype: inf, then 0 * inf."""
        geometry = self.geometry("extend", state="float32")
        if self.bind("extend", geometry.config(activation_dtype="float16")):
            geometry = replace(geometry, activation="float16")
        tokens = self.basis_tokens(geometry, 1)
        repeated = {name: getattr(tokens, name).repeat_interleave(length, 0) for name in ("q", "k", "v", "a", "b")}
        tokens = replace(tokens, **repeated)
        pool = self.pool(geometry, 1)
        pool[0, 0, 0, 0] = 65536.0
        g = torch.zeros(length).index_fill(0, torch.tensor([0]), -4.0)
        out = self._extend(geometry, tokens, pool, g, torch.zeros(length), scale=1.0)
        assert float(pool[0, 0, 0, 0]) == pytest.approx(1200.33, rel=1e-3)
        assert bool(out.isfinite().all())
        assert out[0, :, 0, 0].float().cpu().tolist() == pytest.approx([1200.33] * length, rel=2e-2)

    @pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12])
    def test_case_49_each_head_equals_its_own_run(self, heads: int) -> None:
        """Blocks that grow as heads shrink: garbage at one tensor-parallel size only."""
        geometry = self.geometry("extend", HV=heads)
        single = replace(geometry, heads=geometry.heads._replace(HV=1))
        for length in (64, 65, 128, 300):
            tokens = self.random_tokens(geometry, length)
            pool = self.pool(geometry, 1, fill=0.5)
            out = self.run("extend", geometry, tokens, pool, [0], [0, length]).output
            again = self.pool(geometry, 1, fill=0.5)
            assert torch.equal(self.run("extend", geometry, tokens, again, [0], [0, length]).output, out)
            for head in range(heads):
                one = slice(head, head + 1)
                alone = self.pool(single, 1, fill=0.5)
                part = Tokens(
                    tokens.q, tokens.k, tokens.v[:, one], tokens.a[:, one], tokens.b[:, one], tokens.A_log[one],
                    tokens.dt_bias[one],
                )  # fmt: skip
                own = self.run("extend", single, part, alone, [0], [0, length]).output
                error = relative_error(own[0].flatten(1).cpu(), out[0, :, one].flatten(1).cpu())
                assert error <= _CHUNK_TOLERANCE[geometry.activation]

    def test_case_53_and_54_q_and_k_are_normalised_with_epsilon_inside_the_root(self) -> None:
        """A flag that was accepted and ignored; a norm of a zero row; an epsilon added outside the root."""
        geometry = self.geometry("decode", state="float32")
        K = geometry.heads.K
        rows = {"zero": 0.0, "short": 1e-4, "long": 300.0}
        for name, size in rows.items():
            tokens = self.basis_tokens(geometry, 1, decay=False)
            k = torch.full_like(tokens.k, size)
            pool = self.pool(geometry, 1)
            out = self.run("decode", geometry, replace(tokens, q=k, k=k), pool, [0])
            stored = float(torch.full((1,), size).to(k.dtype).double())
            expected = stored / math.sqrt(K * stored**2 + 1e-6)
            assert float(pool[0, 0, 0, 0]) == pytest.approx(expected, rel=1e-5, abs=1e-12), name
            assert bool(out.isfinite().all())

    def test_case_55_decay_comes_first(self) -> None:
        """The error taken before the decay gives 0 here, after it 2; tests with g = 0 can't tell."""
        for operation in ("decode", "extend", "verify"):
            geometry = self.geometry(operation, state="float32")  # type: ignore[arg-type]
            tokens = self.basis_tokens(geometry, 1)
            tokens = replace(tokens, v=torch.zeros_like(tokens.v), b=torch.zeros_like(tokens.b))
            pool = self.pool(geometry, 1)
            pool[0, 0, :, 0] = 8.0
            state = self.state_after(operation, geometry, tokens, pool)  # type: ignore[arg-type]
            assert state[0, :, 0].float().cpu().tolist() == pytest.approx([2.0] * geometry.heads.V, rel=1e-2)

    @pytest.mark.parametrize("length", [5, 64, 65, 130])
    def test_case_83_prefill_equals_prefill_and_decode(self, length: int) -> None:
        """Two summation orders: equal to a stated tolerance for each dtype, no further."""
        geometry = self.geometry("extend", "decode", HV=2)
        tokens = self.random_tokens(geometry, length)
        whole, split = self.pool(geometry, 1), self.pool(geometry, 1)
        out = self.run("extend", geometry, tokens, whole, [0], [0, length]).output[0, -1]
        self.run("extend", geometry, tokens.rows(0, length - 1), split, [0], [0, length - 1])
        last = self.run("decode", geometry, tokens.rows(length - 1, length), split, [0])[0, 0]
        allowed = _CHUNK_TOLERANCE[geometry.activation]
        assert relative_error(last.cpu(), out.cpu()) <= allowed
        assert relative_error(split[0].flatten(1).cpu(), whole[0].flatten(1).cpu()) <= allowed

    def _extend(
        self, geometry: Geometry, tokens: Tokens, pool: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
        scale: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        function = self.op("extend", geometry.config())
        count, device = tokens.count, self.torch_device()
        gates = [gate.float().to(device).view(1, count, 1) for gate in (g, beta)]
        result: torch.Tensor = function(
            tokens.q[None], tokens.k[None], tokens.v[None], *gates, ssm_states=pool, scale=scale,
            cache_indices=self.tensor([0]), query_start_loc=self.tensor([0, count]),
        ).output  # fmt: skip
        return result

    def _extend_matches(
        self, geometry: Geometry, tokens: Tokens, g: torch.Tensor, beta: torch.Tensor, allowed: float | None = None
    ) -> None:
        pool = self.pool(geometry, 1, fill=1.0)
        exact = pool.cpu().double()
        out = self._extend(geometry, tokens, pool, g, beta)
        count = tokens.count
        expected = exact_extend(
            tokens.q[None].cpu(), tokens.k[None].cpu(), tokens.v[None].cpu(), g.view(1, count, 1),
            beta.view(1, count, 1),
            ssm_states=exact, cache_indices=torch.tensor([0]), query_start_loc=torch.tensor([0, count]),
        ).output  # fmt: skip
        allowed = _CHUNK_TOLERANCE[geometry.activation] if allowed is None else allowed
        floor = smallest_row("extend", geometry.activation)
        assert relative_error(out[0].flatten(1).cpu(), expected[0].flatten(1), floor) <= allowed
        assert relative_error(pool[0].flatten(1).cpu(), exact[0].flatten(1), floor) <= allowed
