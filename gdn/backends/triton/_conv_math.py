"""Parts that the convolution kernels share.

All of them add the taps from the newest input to the oldest, so that a step, a chain, a tree that is a chain and a
prompt give the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def load_taps(weight, channels, inside, dim_stride, tap_stride, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr):
    """The WIDTH taps of some channels in fp32, newest first, as a tuple of `[channels]`.

    One tile is read, so that a thread takes all taps of a channel at once.
    """
    columns = tl.arange(0, PADDED_WIDTH)
    tile = tl.load(
        weight + channels[:, None] * dim_stride + columns[None, :].to(tl.int64) * tap_stride,
        mask=inside[:, None] & (columns < WIDTH)[None, :],
        other=0.0,
    ).to(tl.float32)
    taps = ()
    for back in tl.static_range(WIDTH):
        taps = taps + (tl.sum(tl.where((columns == WIDTH - 1 - back)[None, :], tile, 0.0), axis=1),)
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
