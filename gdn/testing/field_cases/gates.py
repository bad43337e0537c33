"""Gates: precision of g and beta, conventions, extremes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gdn.testing.compare import relative_error
from gdn.testing.harness import Harness
from gdn.testing.reference.projection import log_decay
from gdn.testing.reference.recurrence import Tokens as Exact
from gdn.testing.tensors import DTYPES


class GateCases(Harness):
    @pytest.mark.parametrize(("b", "expected"), [(0.5, 0.62245935), (-0.5, 0.37754068)])
    def test_case_10_beta_is_never_rounded(self, b: float, expected: float) -> None:
        """An fp32 sigmoid was rounded to the activation dtype and back, in some paths only."""
        for operation in ("decode", "packed_decode", "verify"):
            geometry = self.geometry(operation, state="float32")  # type: ignore[arg-type]
            if self.bind(operation, geometry.config(activation_dtype="bfloat16")):  # type: ignore[arg-type]
                geometry = replace(geometry, activation="bfloat16")
            tokens = self.basis_tokens(geometry, 1, decay=False)
            tokens = replace(tokens, b=torch.full_like(tokens.b, b))
            pool = self.pool(geometry, 1)
            state = self.state_after(operation, geometry, tokens, pool)  # type: ignore[arg-type]
            assert float(state[0, 0, 0]) == pytest.approx(expected, rel=2e-6)

    @pytest.mark.parametrize("b", [0.5, -0.5])
    def test_case_10_the_gating_operation_gives_fp32(self, b: float) -> None:
        geometry = self.geometry("gating", HV=2)
        function = self.op("gating", geometry.config())
        column = torch.full((1, 2), b, dtype=DTYPES[geometry.activation], device=self.torch_device())
        zeros = torch.zeros(2, device=self.torch_device())
        g, beta = function(zeros, column, column, zeros)
        assert g.dtype == beta.dtype == torch.float32
        assert beta.flatten().tolist() == pytest.approx([1 / (1 + math.exp(-b))] * 2, rel=1e-6)

    def test_case_10_a_thousand_steps_keep_fp32_accuracy(self) -> None:
        geometry = self.geometry("decode", state="float32")
        pool = self.pool(geometry, 1)
        exact = torch.zeros(pool.shape[1:], dtype=torch.float64)
        tokens = self.random_tokens(geometry, 1000)
        for token in range(1000):
            self.run("decode", geometry, tokens.rows(token, token + 1), pool, [0])
        cpu = {name: getattr(tokens, name).cpu() for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias")}
        g, beta = log_decay(cpu["A_log"], cpu["a"], cpu["dt_bias"]), torch.sigmoid(cpu["b"].double())
        steps = Exact(cpu["q"], cpu["k"], cpu["v"], g, beta, None)
        for token in range(1000):
            exact, _ = steps.step(exact, token)
        assert relative_error(pool[0].cpu().flatten(1), exact.flatten(1)) < 1e-5

    def test_case_48_g_stays_fp32_into_the_chunks(self) -> None:
        """g rounded to bf16 made 4096 tokens of slow decay 2.3e-3 wrong."""
        geometry = self.geometry("extend", state="float32")
        state = self._decayed(geometry, torch.full((4096,), -1e-3))
        assert state == pytest.approx(math.exp(-4.096), rel=5e-4)

    def test_case_50_A_log_is_raw_and_may_be_bf16(self) -> None:
        """Some callers passed -exp(A_log): the state then grows 4.13-fold a token."""
        geometry = self.geometry("decode", state="float32")
        for dtype, expected in ((torch.float32, 0.030077), (DTYPES[geometry.activation], None)):
            pool = self.pool(geometry, 1, fill=1.0)
            tokens = self.basis_tokens(geometry, 1)
            A_log = torch.full((1,), 1.25390625, device=pool.device).to(dtype)
            a = torch.full_like(tokens.a, math.log(math.expm1(1e-3)))
            tokens = replace(tokens, A_log=A_log, a=a, b=torch.full_like(tokens.b, -90.0))
            for _ in range(1000):
                self.run("decode", geometry, tokens, pool, [0])
            rate = math.exp(float(A_log)) * math.log1p(math.exp(float(tokens.a[0, 0])))
            assert float(pool[0, 0, 0, 5]) == pytest.approx(math.exp(-1000 * rate), rel=2e-4)
            if expected is not None and geometry.activation == "float32":
                assert float(pool[0, 0, 0, 5]) == pytest.approx(expected, rel=1e-3)

    def test_case_51_the_ends_of_the_range(self) -> None:
        """log(1+exp(x)) without a branch for large x, or inf * 0 where exp(A_log) overflows: NaN for good."""
        geometry = self.geometry("gating")
        function = self.op("gating", geometry.config())
        device, dtype = self.torch_device(), DTYPES[geometry.activation]

        def g(A_log: float, x: float) -> float:
            column = torch.tensor([[x]], device=device).to(dtype)
            parameter = torch.tensor([A_log], device=device)
            return float(function(parameter, column, column, torch.zeros(1, device=device))[0])

        assert g(math.log(0.001), 100.0) == pytest.approx(-0.1, rel=1e-5)
        assert g(math.log(0.001), 200.0) == pytest.approx(-0.2, rel=1e-5)
        assert -1e-37 <= g(0.0, -100.0) <= 0.0
        for A_log, x in ((89.0, -100.0), (89.0, -110.0), (100.0, -200.0)):
            assert g(A_log, x) <= 0.0
        below, above = g(0.0, 20.0 - 1e-3), g(0.0, 20.0 + 1e-3)
        if geometry.activation == "float32":
            assert below - above == pytest.approx(2e-3, rel=1e-2)

    def test_case_51_extreme_gates_in_decode_stay_finite(self) -> None:
        geometry = self.geometry("decode")
        for A_log, a in ((89.0, -100.0), (100.0, -200.0), (100.0, 100.0), (-100.0, 300.0)):
            tokens = self.random_tokens(geometry, 1)
            tokens = replace(tokens, A_log=torch.full_like(tokens.A_log, A_log), a=torch.full_like(tokens.a, a))
            pool = self.pool(geometry, 1, fill=1.0)
            out = self.run("decode", geometry, tokens, pool, [0])
            assert bool(out.isfinite().all())
            assert bool(pool.isfinite().all())

    def _decayed(self, geometry, g):  # type: ignore[no-untyped-def]
        """One state element after tokens of beta = 0, from 1."""
        count = g.numel()
        tokens = self.random_tokens(geometry, count)
        function = self.op("extend", geometry.config())
        pool = self.pool(geometry, 1, fill=1.0)
        device = self.torch_device()
        g = g.to(device).view(1, count, 1)
        function(
            tokens.q[None], tokens.k[None], tokens.v[None], g, torch.zeros_like(g), ssm_states=pool,
            cache_indices=self.tensor([0]), query_start_loc=self.tensor([0, count]),
        )  # fmt: skip
        return float(pool[0, 0, 1, 2])
