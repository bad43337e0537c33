"""Layouts: views, strides, head maps, axis order, dims off the beaten track."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gdn.testing.calls import build_call
from gdn.testing.case import Case
from gdn.testing.case import Heads
from gdn.testing.compare import assert_matches
from gdn.testing.harness import Harness
from gdn.types import DTYPE_BYTES

_RATIOS = ((1, 1), (1, 3), (2, 6), (4, 12), (16, 48), (4, 20), (3, 3), (2, 14), (16, 16))
_DIMS = ((64, 64), (60, 60), (96, 96), (100, 100), (128, 256), (256, 128), (192, 192), (256, 256), (80, 96))


class LayoutCases(Harness):
    def test_case_22_inputs_may_be_slices_of_wider_tensors(self, operation: str) -> None:
        """Kernels built for contiguous rows, or a pointer that is not aligned to 16 bytes."""
        self._all_dtypes(operation, Case("case-22", views=True, lengths=(3, 1, 2), slot_gap=24))

    @pytest.mark.parametrize(("HK", "HV"), _RATIOS)
    def test_case_23_any_head_ratio(self, operation: str, HK: int, HV: int) -> None:
        """Allow-lists of ratios; a kernel that returned without doing anything for an unlisted head count."""
        if operation.startswith("conv"):
            pytest.skip("the convolution knows no heads")
        self._all_dtypes(
            operation, Case("case-23", heads=Heads(HK, HV, 32, 32), lengths=(3, 2), out=operation != "gating")
        )

    def test_case_24_a_value_head_reads_key_head_j_over_ratio(self) -> None:
        """h // ratio and h % HK are both in use in the wild."""
        for operation in ("decode", "extend"):
            geometry = self.geometry(operation, HK=2, HV=6)  # type: ignore[arg-type]
            tokens = self.basis_tokens(geometry, 1, decay=False)
            k = torch.zeros_like(tokens.k)
            k[0, 0, 0] = k[0, 1, 1] = 1.0
            v = torch.arange(1.0, 7.0, device=tokens.v.device).to(tokens.v.dtype)[None, :, None].expand_as(tokens.v)
            pool = self.pool(geometry, 1)
            self.run(operation, geometry, replace(tokens, q=k, k=k, v=v), pool, [0])  # type: ignore[arg-type]
            columns = pool[0, :, 0].float().abs().argmax(dim=1).tolist()
            assert columns == [0, 0, 0, 1, 1, 1]

    def test_case_25_one_state_layout_everywhere(self) -> None:
        """A transposed read gives gibberish that no shape check can notice while K = V."""
        for operation in ("decode", "packed_decode", "extend", "verify"):
            geometry = self.geometry(operation)  # type: ignore[arg-type]
            heads = geometry.heads
            rows = torch.arange(float(heads.V))[:, None] * 2 + torch.arange(float(heads.K))[None]
            pool = self.pool(geometry, 1)
            pool[0, 0] = rows.to(pool)
            before = pool.clone()
            tokens = self.basis_tokens(geometry, 1, decay=False, first=3)
            tokens = replace(tokens, b=torch.full_like(tokens.b, -90.0))
            out = self.run(operation, geometry, tokens, pool, [0], scale=1.0)  # type: ignore[arg-type]
            out = out.output if operation == "extend" else out
            torch.testing.assert_close(out.flatten().float().cpu(), rows[:, 3], rtol=8e-3, atol=1e-2)
            assert torch.equal(pool, before)

    def test_case_39_nothing_is_cached_under_half_a_signature(self) -> None:
        """A kernel compiled for one stride, index type or parameter dtype was reused for another."""
        geometry = self.geometry("decode", HV=2)
        heads, config = geometry.heads, geometry.config(strided_state=True)
        if self.bind("decode", config) is None:
            pytest.skip(f"{self.backend} declares no strided_state")
        size = heads.HV * heads.V * heads.K
        alignment = next(state.alignment for _, state in self.rows("decode", config))
        gap = max(8, alignment // DTYPE_BYTES[geometry.state])
        tokens = self.random_tokens(geometry, 2)
        values = torch.randn(6, size, generator=torch.Generator().manual_seed(0))
        expected = None
        for turn in range(20):
            storage = self.pool(geometry, 6).new_full((6, size + gap * (1 + turn % 2)), 7.0)
            storage[:, :size] = values.to(storage)
            pool = storage[:, :size].unflatten(1, (heads.HV, heads.V, heads.K))
            indices = self.tensor([4, 1], (torch.int32, torch.int64)[turn % 3 % 2])
            bias = tokens.dt_bias.to((torch.float32, tokens.q.dtype)[turn // 2 % 2]).to(tokens.q.dtype).float()
            typed = replace(tokens, dt_bias=bias.to((torch.float32, tokens.q.dtype)[turn // 2 % 2]))
            out = self.run("decode", geometry, typed, pool, [4, 1], indices=indices)
            expected = out if expected is None else expected
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6, msg=f"turn {turn}")
            assert bool((storage[:, size:] == 7.0).all())

    @pytest.mark.parametrize(("K", "V"), _DIMS)
    def test_case_45_dims_off_the_powers_of_two(self, operation: str, K: int, V: int) -> None:
        """One unmasked load read past each row: NaN if the neighbour's memory was large."""
        lengths = (3, 70) if operation == "extend" else (2, 1)
        self._all_dtypes(operation, Case("case-45", heads=Heads(1, 2, K, V), lengths=lengths), dims=False)

    def test_case_59_the_caller_sees_one_set_of_dtype_rules(self, operation: str) -> None:
        """One kernel needed int64 offsets, another int32; a state was converted in place."""
        for index in ("int32", "int64"):
            self._all_dtypes(operation, Case("case-59", index=index, lengths=(2, 3)))  # type: ignore[arg-type]

    def test_case_62_axis_order_and_rank(self, operation: str) -> None:
        """Axes unpacked in the order before a transpose: every extent here differs."""
        self._all_dtypes(operation, Case("case-62", heads=Heads(5, 10, 32, 64), lengths=(3, 4)))

    def _all_dtypes(self, operation: str, case: Case, *, dims: bool = True) -> None:
        """Match the reference in every dtype pair that the manifest serves; at least one, or the test is skipped."""
        served = 0
        for activation, state in (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")):
            typed = self.fitted(operation, case.but(activation=activation, state=state), dims=dims)  # type: ignore[arg-type]
            if typed is not None:
                function = self.op(operation, typed.config())  # type: ignore[arg-type]
                served += 1
                assert_matches(function, build_call(operation, typed, seed=served, device=self.torch_device()))
        if not served:
            pytest.skip(f"{self.backend} declares no {operation} for {case.heads} on {self.device_info()}")
