"""Decay, write strength and normalisation: the elementwise part of the recurrence, in fp32.

Only functions whose result doesn't depend on an element's position in its tensor are used (torch's vectorised sigmoid
and softplus round the tail of a tensor differently), so a row gives the same bits in any batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

NORM_EPSILON = 1e-6
_LINEAR_ABOVE = 20.0
_LARGEST_EXPONENT = 600.0
"""exp(600) times any fp32 number is finite in fp64; such decays saturate in fp32 anyway."""
_LOWEST = torch.finfo(torch.float32).min


def log_decay(A_log: Tensor, a: Tensor, dt_bias: Tensor) -> Tensor:
    """`g = -exp(A_log) * softplus(a + dt_bias)`, fp32, shape of `a`; softplus is linear above 20.

    Formed in fp64, where an overflowing exp(A_log) can't meet a vanished softplus: finite for finite inputs.
    """
    x = a.to(torch.float64, memory_format=torch.contiguous_format) + dt_bias
    rate = A_log.to(torch.float64).clamp(max=_LARGEST_EXPONENT).exp_().neg_()
    softplus = torch.where(x > _LINEAR_ABOVE, x, x.exp().log1p_())
    return softplus.mul_(rate).clamp_(min=_LOWEST).to(torch.float32)


def write_strength(b: Tensor) -> Tensor:
    """`beta = sigmoid(b)`, fp32 and never rounded below, shape of `b`."""
    return torch.neg(b.to(torch.float32).contiguous()).exp_().add_(1.0).reciprocal_()


def normalise_(x: Tensor) -> Tensor:
    """Divide the last axis of a contiguous fp32 tensor by `sqrt(sum(x^2) + 1e-6)`, in place."""
    return x.mul_(x.square().sum(-1, keepdim=True).add_(NORM_EPSILON).rsqrt_())
