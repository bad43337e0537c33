"""QKV split: contiguous copies of the three parts of packed rows, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import NamedTuple

import torch
import triton

from gdn._triton_launch import Launch
from gdn.backends.triton._split_kernel import split_kernel
from gdn.signature import planned
from gdn.validation import check_qkv_split

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import QkvSplit

BLOCK_TOKENS = 8
BLOCK_COLUMNS = 512
WARPS = 4


class Plan(NamedTuple):
    launch: Launch
    programs: int
    key_shape: tuple[int, int, int, int]
    value_shape: tuple[int, int, int, int]
    numbers: tuple[int, ...]


def factory(context: BindContext) -> QkvSplit:
    """The heads of the bound config say where rows are cut."""
    config = context.config
    key_heads, key_dim = config.num_k_heads, config.head_k_dim
    value_heads, value_dim = config.num_v_heads, config.head_v_dim

    def build(mixed_qkv: Tensor) -> Plan:
        check_qkv_split(mixed_qkv, key_heads, value_heads, key_dim, value_dim)
        tokens = mixed_qkv.shape[0]
        key_width, value_width = key_heads * key_dim, value_heads * value_dim
        block_columns = min(BLOCK_COLUMNS, triton.next_power_of_2(max(key_width, value_width)))
        blocks = 2 * triton.cdiv(key_width, block_columns) + triton.cdiv(value_width, block_columns)
        constants = {
            "KEY_WIDTH": key_width,
            "VALUE_WIDTH": value_width,
            "BLOCK_TOKENS": BLOCK_TOKENS,
            "BLOCK_COLUMNS": block_columns,
        }
        return Plan(
            Launch(split_kernel, constants, num_warps=WARPS),
            triton.cdiv(tokens, BLOCK_TOKENS) * blocks,
            (1, tokens, key_heads, key_dim),
            (1, tokens, value_heads, value_dim),
            (tokens, *mixed_qkv.stride()),
        )

    plans = planned(build)

    def qkv_split(mixed_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `gdn.ops.QkvSplit`."""
        plan = plans(mixed_qkv)
        dtype, device = mixed_qkv.dtype, mixed_qkv.device
        q = torch.empty(plan.key_shape, dtype=dtype, device=device)
        k = torch.empty(plan.key_shape, dtype=dtype, device=device)
        v = torch.empty(plan.value_shape, dtype=dtype, device=device)
        plan.launch(plan.programs, 1, 1, mixed_qkv, q, k, v, *plan.numbers)
        return q, k, v

    return qkv_split
