"""Random, poisoned and oddly laid out tensors of one call. All of it depends on the seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any
from typing import Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
}

CANARY: Final = 7.0
"""Fills what must not be written."""


class TensorFactory:
    """Makes tensors on one device from one seed."""

    def __init__(self, seed: int, device: Any, *, views: bool) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.device = torch.device(device)
        self._views = views

    def normal(self, *shape: int) -> Tensor:
        """fp32 on the CPU."""
        return torch.randn(*shape, generator=self._generator)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """fp32 on the CPU."""
        return torch.rand(*shape, generator=self._generator) * (high - low) + low

    def permutation(self, count: int) -> list[int]:
        """0..count-1 in random order."""
        order: list[int] = torch.randperm(count, generator=self._generator).tolist()
        return order

    def placed(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The values on the device, contiguous."""
        return values.to(dtype).to(self.device)

    def columns(self, parts: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Tensors of equal row counts side by side: slices of one wide tensor in a case of views, else on their own."""
        if not self._views:
            return [self.placed(part, dtype) for part in parts]
        rows = parts[0].shape[0]
        lead = torch.full((rows, 3), torch.nan)
        flat = [part.flatten(1) if part.dim() > 1 else part[:, None] for part in parts]
        wide = self.placed(torch.cat([lead, *flat, lead[:, :2]], dim=1), dtype)
        result, begin = [], 3
        for part, columns in zip(parts, flat, strict=True):
            result.append(wide[:, begin : begin + columns.shape[1]].unflatten(1, part.shape[1:]))
            begin += columns.shape[1]
        return result

    def indices(self, values: Sequence[int], dtype: str) -> Tensor:
        """Integers, as a column of a matrix in a case of views."""
        line = torch.tensor(list(values), dtype=DTYPES[dtype])
        if not self._views:
            return line.to(self.device)
        other = torch.full_like(line, 2**30)
        return torch.stack((other, line, other), dim=1).to(self.device)[:, 1]

    def pool(self, slots: int, inner: Sequence[int], gap: int, dtype: torch.dtype, fill: float) -> Tensor:
        """`[slots, *inner]` full of `fill`, with `gap` canary elements after each slot."""
        size = 1
        for extent in inner:
            size *= extent
        storage = torch.full((slots, size + gap), CANARY)
        storage[:, :size] = fill
        return self.placed(storage, dtype)[:, :size].unflatten(1, tuple(inner))
