"""Kernel of `gating`: log decay and write strength, element by element in fp32."""

import triton
import triton.language as tl

_LARGEST_EXPONENT = tl.constexpr(600.0)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_LINEAR_ABOVE = tl.constexpr(20.0)
_EXPONENTIAL_BELOW = tl.constexpr(-17.0)
"""Below, softplus(x) is e^x to fp32 precision."""


@triton.jit
def log1p_of_exp(x):
    """`log(1 + e^x)` without overflow, and accurate where it is small: the rounding of 1 + e is divided out."""
    e = tl.exp(-tl.abs(x))
    rounded = 1.0 + e
    lost = rounded == 1.0
    log1p = tl.where(lost, e, tl.log(rounded) * (e / tl.where(lost, 1.0, rounded - 1.0)))
    return tl.where(x > 0.0, x, 0.0) + log1p


@triton.jit
def log_decay(A_log, x):
    """`-exp(A_log) * softplus(x)`, fp32: NaN only where A_log or x is; else finite and never positive.

    exp(A_log) may overflow where softplus(x) makes up for it, so its root is multiplied twice; where softplus(x) is
    e^x, the exponents are added instead.
    """
    exponent = tl.where(A_log > _LARGEST_EXPONENT, _LARGEST_EXPONENT, A_log)
    x = tl.where(x > _LARGEST, _LARGEST, tl.where(x < -_LARGEST, -_LARGEST, x))
    root = tl.exp(0.5 * exponent)
    softplus = tl.where(x > _LINEAR_ABOVE, x, log1p_of_exp(x))
    product = (root * softplus) * root
    decay = tl.where(x < _EXPONENTIAL_BELOW, tl.exp(exponent + x), product)
    return -tl.where(decay > _LARGEST, _LARGEST, decay)


@triton.jit(do_not_specialize=["num_tokens"])
def gating_kernel(
    A_log,
    a,
    b,
    dt_bias,
    g,
    beta,
    num_tokens,
    a_token_stride,
    a_head_stride,
    b_token_stride,
    b_head_stride,
    A_log_stride,
    dt_bias_stride,
    HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """One program: BLOCK_TOKENS tokens by BLOCK_HEADS heads; g and beta are contiguous `[tokens, HEADS]`."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS).to(tl.int64)
    head_inside = heads < HEADS
    inside = (tokens < num_tokens)[:, None] & head_inside[None, :]

    rate = tl.load(A_log + heads * A_log_stride, mask=head_inside, other=0.0).to(tl.float32)
    shift = tl.load(dt_bias + heads * dt_bias_stride, mask=head_inside, other=0.0).to(tl.float32)
    step = tl.load(a + tokens[:, None] * a_token_stride + heads[None, :] * a_head_stride, mask=inside, other=0.0).to(
        tl.float32
    )
    write = tl.load(b + tokens[:, None] * b_token_stride + heads[None, :] * b_head_stride, mask=inside, other=0.0).to(
        tl.float32
    )
    cell = tokens[:, None] * HEADS + heads[None, :]
    tl.store(g + cell, log_decay(rate[None, :], step + shift[None, :]), mask=inside)
    tl.store(beta + cell, 1.0 / (1.0 + tl.exp(-write)), mask=inside)
