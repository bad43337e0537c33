"""Memory as FlashInfer's compiled wrappers demand it: aligned bases, a unit last stride, fp32 gate parameters.

Strides are part of a signature, so `direct` is asked once per plan; addresses are not, so `placed` looks each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Final

import torch

from gdn._arguments import refuse

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT: Final = 32
"""Bytes; the strictest of the library's kernels, those for bf16 pools."""


def direct(x: Tensor) -> bool:
    """Whether a kernel can read the tensor where it lies: unit last stride, every row as aligned as the base."""
    *outer, inner = zip(x.shape, x.stride(), strict=True)
    return (inner[1] == 1 or inner[0] == 1) and all(
        size == 1 or stride * x.element_size() % ALIGNMENT == 0 for size, stride in outer
    )


def placed(x: Tensor, is_direct: bool) -> Tensor:
    """The tensor, or a contiguous copy where a kernel can't read it."""
    if is_direct and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def dense(x: Tensor) -> Tensor:
    """The tensor, or a copy where it isn't contiguous and aligned."""
    return placed(x, x.is_contiguous())


def parameter(x: Tensor) -> Tensor:
    """A_log or dt_bias in fp32, converted anew on each call: the weights may be updated in place."""
    return dense(x.float())


def check_pool_strides(pool: Tensor) -> None:
    """Slots must be as aligned as the state contract asks.

    Raises:
        InputError: their stride isn't a multiple.
    """
    stride = pool.stride(0) * pool.element_size()
    if pool.shape[0] > 1 and stride % ALIGNMENT:
        refuse("ssm_states", f"slots aligned to {ALIGNMENT} bytes, as the state contract asks", f"a stride of {stride}")


def check_pool_address(pool: Tensor) -> None:
    """The pool's base must be as aligned as the state contract asks.

    Raises:
        InputError: it isn't.
    """
    if pool.data_ptr() % ALIGNMENT:
        address = f"an address {pool.data_ptr() % ALIGNMENT} bytes beyond"
        refuse("ssm_states", f"a base aligned to {ALIGNMENT} bytes, as the state contract asks", address)
