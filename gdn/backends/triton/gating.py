"""Gating: log decay and write strength of every token."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import NamedTuple

import torch
import triton

from gdn._triton_launch import Launch
from gdn.backends.triton._gating_kernel import gating_kernel
from gdn.signature import planned
from gdn.validation import check_gating

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import Gating

BLOCK_CELLS = 1024
"""Tokens times heads of one program."""
MOST_HEADS = 128
WARPS = 4


class Plan(NamedTuple):
    launch: Launch
    token_blocks: int
    head_blocks: int
    shape: tuple[int, int, int]
    numbers: tuple[int, ...]


def factory(context: BindContext) -> Gating:
    """Gating serves every config alike."""
    plans = planned(_plan)

    def gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """See `gdn.ops.Gating`."""
        plan = plans(A_log, a, b, dt_bias)
        g = torch.empty(plan.shape, dtype=torch.float32, device=a.device)
        beta = torch.empty(plan.shape, dtype=torch.float32, device=a.device)
        plan.launch(plan.token_blocks, plan.head_blocks, 1, A_log, a, b, dt_bias, g, beta, *plan.numbers)
        return g, beta

    return gating


def _plan(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> Plan:
    check_gating(A_log, a, b, dt_bias)
    tokens, heads = a.shape
    block_heads = min(MOST_HEADS, triton.next_power_of_2(max(heads, 1)))
    block_tokens = max(1, BLOCK_CELLS // block_heads)
    constants = {"HEADS": heads, "BLOCK_TOKENS": block_tokens, "BLOCK_HEADS": block_heads}
    return Plan(
        Launch(gating_kernel, constants, num_warps=WARPS),
        triton.cdiv(tokens, block_tokens),
        triton.cdiv(heads, block_heads),
        (1, tokens, heads),
        (tokens, *a.stride(), *b.stride(), *A_log.stride(), *dt_bias.stride()),
    )
