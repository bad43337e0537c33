"""Parts that the convolution kernels share.

All of them add the taps from the newest input to the oldest, so that a step, a chain, a tree that is a chain and a
prompt give the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def load_taps(weight, channels, inside, dim_stride, tap_stride, WIDTH: tl.constexpr):
    """The WIDTH taps of some channels in fp32, newest first, as a tuple of `[channels]`."""
    taps = ()
    for back in tl.static_range(WIDTH):
        tap = weight + channels * dim_stride + (WIDTH - 1 - back) * tap_stride
        taps = taps + (tl.load(tap, mask=inside, other=0.0).to(tl.float32),)  # noqa: RUF005
    return taps


@triton.jit
def load_bias(bias, channels, inside, bias_stride):
    """Bias of some channels in fp32; zeros where there is none."""
    if bias is None:
        return tl.zeros(channels.shape, dtype=tl.float32)
    else:
        return tl.load(bias + channels * bias_stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def activate(value, SILU: tl.constexpr):
    if SILU:
        return value / (1.0 + tl.exp(-value))
    else:
        return value
