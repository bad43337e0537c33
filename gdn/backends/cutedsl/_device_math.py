"""What the kernels share: vectors of memory, slots, gates, norms.

Plain functions are traced into the kernel that calls them: they may branch on constants only. Those with `cute.jit` may
branch on values of the device.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass import Int64

WARP = 32
VECTOR_BYTES = 16

_EPSILON = 1e-6
_LARGEST_EXPONENT = 600.0
_LARGEST = 3.4028234663852886e38
_LINEAR_ABOVE = 20.0
_EXPONENTIAL_BELOW = -17.0
"""Below, softplus(x) is e^x to fp32 precision."""


def vector_at(pointer, offset, count: int):
    """`count` elements from an offset that is a multiple of `count`, as one access where the pointer is so aligned."""
    place = pointer + cute.assume(Int64(offset), divby=count)
    return cute.make_tensor(place, cute.make_layout(count))


def aligned_to(pointer, nbytes: int):
    """Whether the address is a multiple of `nbytes`."""
    return pointer.toint() % nbytes == 0


def with_alignment(pointer, nbytes: int):
    """The same pointer, known to be aligned."""
    return cute.make_ptr(pointer.dtype, pointer.toint(), cute.AddressSpace.gmem, assumed_align=nbytes)


def inverse_norm(sum_of_squares):
    """1 / sqrt(sum + 1e-6)."""
    return cute.math.rsqrt(sum_of_squares + Float32(_EPSILON))


def _where(condition, yes, no):
    return Float32(cutlass.select_(condition, yes, no))


def number_if(condition, number):
    """The number in fp32, or 0."""
    return _where(condition, number.to(Float32), Float32(0.0))


def log1p_of_exp(x):
    """`log(1 + e^x)` without overflow, and accurate where it is small: the rounding of 1 + e is divided out."""
    zero, one = Float32(0.0), Float32(1.0)
    e = cute.math.exp(_where(x > zero, -x, x))
    rounded = one + e
    lost = rounded == one
    log1p = _where(lost, e, cute.math.log(rounded) * (e / _where(lost, one, rounded - one)))
    return _where(x > zero, x, zero) + log1p


def log_decay(A_log, x):
    """`-exp(A_log) * softplus(x)`, fp32: NaN only where A_log or x is; else finite and never positive.

    exp(A_log) may overflow where softplus(x) makes up for it, so its root is multiplied twice; where softplus(x) is
    e^x, the exponents are added instead.
    """
    largest = Float32(_LARGEST)
    exponent = _where(A_log > Float32(_LARGEST_EXPONENT), Float32(_LARGEST_EXPONENT), A_log)
    x = _where(x > largest, largest, _where(x < -largest, -largest, x))
    root = cute.math.exp(Float32(0.5) * exponent)
    softplus = _where(x > Float32(_LINEAR_ABOVE), x, log1p_of_exp(x))
    product = (root * softplus) * root
    decay = _where(x < Float32(_EXPONENTIAL_BELOW), cute.math.exp(exponent + x), product)
    return -_where(decay > largest, largest, decay)


def decay_of(a, A_log, dt_bias):
    """The factor exp(g) by which a token decays the state, from its gate and its head's parameters."""
    return cute.math.exp(log_decay(A_log.to(Float32), a.to(Float32) + dt_bias.to(Float32)))


def strength_of(b):
    """The write strength, sigmoid(b)."""
    return Float32(1.0) / (Float32(1.0) + cute.math.exp(-b.to(Float32)))
