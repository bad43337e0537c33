"""The convolution: short inputs, splits, rounding, dtypes, padding, order of channels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from gdn.config import GdnConfig
from gdn.testing.calls import build_call
from gdn.testing.case import Case
from gdn.testing.compare import assert_matches
from gdn.testing.harness import Harness
from gdn.types import DType

_DTYPES: tuple[DType, ...] = ("float16", "bfloat16", "float32")
_CONFIG = GdnConfig(num_k_heads=1, num_v_heads=1, head_k_dim=32, head_v_dim=32, activation_dtype="float32")


class ConvolutionCases(Harness):
    @pytest.mark.parametrize(
        ("inputs", "outputs", "state"),
        [
            ((), (), (1, 2, 3)),
            ((4,), (1234,), (2, 3, 4)),
            ((4, 5), (1234, 2345), (3, 4, 5)),
            ((4, 5, 6), (1234, 2345, 3456), (4, 5, 6)),
            ((4, 5, 6, 7), (1234, 2345, 3456, 4567), (5, 6, 7)),
        ],
    )
    def test_case_27_sequences_shorter_than_the_window_keep_older_history(
        self, inputs: Any, outputs: Any, state: Any
    ) -> None:
        """The window was rebuilt from the last inputs alone."""
        pool = self._window((1, 2, 3))
        assert self._counted(inputs, pool) == list(outputs)
        assert pool[0, 0].tolist() == list(state)

    def test_case_27_a_fresh_sequence_and_any_split(self) -> None:
        pool = self._window((9, 9, 9))
        assert self._counted((4, 5), pool, known=False) == [4, 45]
        assert pool[0, 0].tolist() == [0, 4, 5]
        for split in range(5):
            pool = self._window((1, 2, 3))
            parts = self._counted((4, 5, 6, 7)[:split], pool) + self._counted((4, 5, 6, 7)[split:], pool)
            assert parts == [1234, 2345, 3456, 4567]
            assert pool[0, 0].tolist() == [5, 6, 7]

    @pytest.mark.parametrize(
        ("width", "drafts", "bias", "act"), list(itertools.product((3, 4), (1, 3), (True, False), ("silu", None)))
    )
    def test_case_35_padded_rows_of_conv_update(self, width: int, drafts: int, bias: bool, act: str | None) -> None:
        """Another optional argument changed the padded path; the test was switched off."""
        for activation in _DTYPES:
            case = Case(
                "case-35", lengths=(1,) * 8, slots=(4, 2, 0, -1, -1, -1, -1, -1), pool_slots=5, width=width,
                drafts=drafts, bias=bias, act=act, buffer=drafts > 1, activation=activation,
            )  # fmt: skip
            function = self.bind("conv_update", case.config())
            if function is not None:
                assert_matches(function, build_call("conv_update", case, seed=width, device=self.torch_device()))

    @pytest.mark.parametrize(("activation", "stored"), list(itertools.product(_DTYPES, _DTYPES)))
    def test_case_36_the_conv_state_may_have_another_dtype(self, activation: DType, stored: DType) -> None:
        """Two branches gave one variable two types: a compile error inside the kernel."""
        for lengths in ((1, 5), (300,)):
            case = Case("case-36", lengths=lengths, activation=activation, conv_state=stored, parameters="activation")
            for operation in ("conv_extend", "conv_update"):
                typed = case.but(drafts=3)
                function = self.bind(operation, typed.config())  # type: ignore[arg-type]
                if function is not None:
                    assert_matches(function, build_call(operation, typed, seed=1, device=self.torch_device()))

    def test_case_37_products_are_formed_in_fp32(self) -> None:
        """bf16 * bf16 was rounded before it was added to the fp32 sum: 0 instead of 6.1e-5."""
        config = _CONFIG.model_copy(update={"activation_dtype": "bfloat16", "conv_kernel_size": 2})
        dtype, device = torch.bfloat16, self.torch_device()
        weight = torch.tensor([[1.0078125, -1.015625]], dtype=dtype, device=device).expand(16, 2).contiguous()
        x = torch.tensor([[1.0078125, 1.0]], dtype=dtype, device=device).expand(16, 2).t().contiguous().t()
        pool = torch.zeros(1, 16, 1, dtype=dtype, device=device)
        extend, update = self.op("conv_extend", config), self.op("conv_update", config)
        out = extend(
            x, weight, None, conv_states=pool, query_start_loc=self.tensor([0, 2]), cache_indices=self.tensor([0]),
            has_initial_state=self.tensor([False], torch.bool), activation=None,
        )  # fmt: skip
        assert out[:, 1].tolist() == [6.103515625e-05] * 16
        pool[:] = x[None, :, :1]
        assert update(x[None, :, 1].contiguous(), pool, weight, activation=None)[0].tolist() == [6.103515625e-05] * 16

    def test_case_05_and_15_drafts_of_the_convolution(self) -> None:
        """Accepting two of four drafts leaves the window after the second; a tree reads ancestors, not neighbours."""
        function = self.op("conv_update", _CONFIG)
        device = self.torch_device()
        pool = self._window((1, 2, 3))
        window = torch.zeros(1, 4, 16, 3, device=device)
        x = torch.tensor([4.0, 5.0, 6.0, 7.0], device=device).expand(1, 16, 4)
        out = function(x, pool, self._taps(), activation=None, intermediate_conv_window=window)
        assert out[0, 0].tolist() == [1234, 2345, 3456, 4567]
        after_two = window[:, 1].clone()
        assert function(torch.full((1, 16), 9.0, device=device), after_two, self._taps(), activation=None)[0, 0] == 3459
        pool, before = self._window((1, 2, 3)), self._window((1, 2, 3))
        x = torch.tensor([4.0, 5.0, 6.0, 7.0, 8.0], device=device).expand(1, 16, 5)
        parents = self.tensor([[9, 9, 9, 9, 9]])
        out = function(
            x, pool, self._taps(), activation=None, retrieve_next_token=self.tensor([[1, 3, 4, -1, -1]]),
            retrieve_next_sibling=self.tensor([[-1, 2, -1, -1, -1]]), retrieve_parent_token=parents,
        )  # fmt: skip
        assert out[0, 0].tolist() == [1234, 2345, 2346, 3457, 3468]
        assert parents.tolist() == [[0, 0, 0, 1, 2]]
        assert torch.equal(pool, before)

    def test_case_29_one_call_advances_the_window_once(self) -> None:
        """A tuner ran the kernel many times on the live pool."""
        function = self.op("conv_update", _CONFIG)
        pool = self._window((1, 2, 3))
        function(torch.full((1, 16), 4.0, device=self.torch_device()), pool, self._taps(), activation=None)
        assert pool[0, 0].tolist() == [2, 3, 4]

    def test_case_29_one_call_advances_the_state_once(self) -> None:
        """Column K-1 starts at 8 and is never written: one launch of two tokens leaves 2, two launches 0.5."""
        geometry = self.geometry("extend")
        tokens = self.basis_tokens(geometry, 2)
        pool = self.pool(geometry, 1)
        pool[0, :, :, -1] = 8.0
        self.run("extend", geometry, tokens, pool, [0], [0, 2])
        assert pool[0, 0, :, -1].float().cpu().tolist() == pytest.approx([2.0] * geometry.heads.V, rel=1e-2)

    def test_case_68_repeated_steps_are_bit_equal(self) -> None:
        """Group 0 shifted the window while others still read it."""
        function = self.op("conv_update", _CONFIG)
        generator = torch.Generator().manual_seed(0)
        dim = 2064
        x = torch.randn(8, 2, dim, generator=generator).to(self.torch_device())
        start = torch.randn(2, dim, 3, generator=generator).to(self.torch_device())
        weight = torch.randn(dim, 4, generator=generator).to(self.torch_device())
        first = None
        for _ in range(20):
            pool = start.clone()
            steps = torch.stack([function(step, pool, weight) for step in x])
            first = steps if first is None else first
            assert torch.equal(steps, first)
            assert torch.equal(pool, x[-3:].permute(1, 2, 0))

    def _window(self, digits: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(digits, dtype=torch.float32, device=self.torch_device()).expand(1, 16, 3).contiguous()

    def _taps(self) -> torch.Tensor:
        """Outputs read as the window's digits."""
        return torch.tensor([1000.0, 100.0, 10.0, 1.0], device=self.torch_device()).expand(16, 4).contiguous()

    def _counted(self, inputs: tuple[int, ...], pool: torch.Tensor, *, known: bool = True) -> list[float]:
        function = self.op("conv_extend", _CONFIG)
        x = (
            torch.tensor(inputs, dtype=torch.float32, device=self.torch_device())[:, None]
            .expand(-1, 16)
            .contiguous()
            .t()
        )
        out = function(
            x, self._taps(), None, conv_states=pool, query_start_loc=self.tensor([0, len(inputs)]),
            cache_indices=self.tensor([0]), has_initial_state=self.tensor([known], torch.bool), activation=None,
        )  # fmt: skip
        digits: list[float] = out[0].tolist()
        return digits
