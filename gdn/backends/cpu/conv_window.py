"""The arithmetic of the causal depthwise convolution over windows laid out `[columns, ..., dim]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

TapInput = Callable[[int], "Tensor"]


def fp32_taps(weight: Tensor) -> Tensor:
    """`[dim, W]` to contiguous fp32 `[W, dim]`, oldest tap first."""
    return weight.t().to(torch.float32).contiguous()


def convolve(tap_input: TapInput, taps: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """`act(bias + sum_i taps[i] * tap_input(i))`, all in fp32.

    Args:
        tap_input: gives the inputs `[..., dim]` that tap i multiplies.
        taps: `[W, dim]`, fp32.
        bias: `[dim]`, any float dtype.
        activation: "silu", "swish" or None.
    """
    total = tap_input(0) * taps[0]
    for tap in range(1, taps.shape[0]):
        total.addcmul_(tap_input(tap), taps[tap])
    if bias is not None:
        total.add_(bias)
    return silu_(total) if activation in ("silu", "swish") else total


def silu_(x: Tensor) -> Tensor:
    """`x / (1 + e^-x)` in place, from functions that round alike at every position of a tensor."""
    return x.div_(torch.neg(x).exp_().add_(1.0))
