"""Gating and the split of packed rows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from gdn.backends.cpu.native.library import Plan
from gdn.backends.cpu.native.library import check_on_cpu
from gdn.backends.cpu.native.library import make_plan
from gdn.backends.cpu.native.library import native
from gdn.backends.cpu.native.structures import ARGUMENTS
from gdn.backends.cpu.native.structures import GatingPlan
from gdn.backends.cpu.native.structures import SplitPlan
from gdn.backends.cpu.native.structures import view
from gdn.signature import planned
from gdn.validation import check_gating
from gdn.validation import check_qkv_split

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.config import GdnConfig
    from gdn.ops import Gating
    from gdn.ops import QkvSplit

_pack_gating = ARGUMENTS["gating"][1].pack
_pack_split = ARGUMENTS["split"][1].pack
_threads = torch.get_num_threads


def factory(context: BindContext) -> Gating:
    """One native function serves every config."""
    run, plans = native("gating"), planned(_gating_plan)

    def gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """See `gdn.ops.Gating`."""
        plan = plans(A_log, a, b, dt_bias)
        g = torch.empty(plan.shape, dtype=torch.float32, device="cpu")
        beta = torch.empty(plan.shape, dtype=torch.float32, device="cpu")
        call = _pack_gating(
            a.data_ptr(), b.data_ptr(), A_log.data_ptr(), dt_bias.data_ptr(), g.data_ptr(), beta.data_ptr(), _threads()
        )
        run(plan.address, call)
        return g, beta

    return gating


def split_factory(context: BindContext) -> QkvSplit:
    """The heads of the bound config say where rows are cut."""
    config = context.config
    run, plans = native("split"), planned(partial(_split_plan, config))
    keys, values = (config.num_k_heads, config.head_k_dim), (config.num_v_heads, config.head_v_dim)

    def qkv_split(mixed_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `gdn.ops.QkvSplit`."""
        plan = plans(mixed_qkv)
        (tokens,) = plan.shape
        q, k, v = (torch.empty((1, tokens, *heads), dtype=plan.dtype, device="cpu") for heads in (keys, keys, values))
        call = _pack_split(mixed_qkv.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), _threads())
        run(plan.address, call)
        return q, k, v

    return qkv_split


def _gating_plan(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> Plan:
    check_gating(A_log, a, b, dt_bias)
    check_on_cpu("a", a)
    tokens, heads = a.shape
    memory = GatingPlan(
        tokens=tokens, heads=heads, a=view(a), b=view(b), A_log=view(A_log), dt_bias=view(dt_bias)
    )  # fmt: skip
    return make_plan(memory, (1, tokens, heads), torch.float32)


def _split_plan(config: GdnConfig, mixed_qkv: Tensor) -> Plan:
    key_heads, value_heads, key_dim, value_dim = (
        config.num_k_heads, config.num_v_heads, config.head_k_dim, config.head_v_dim
    )  # fmt: skip
    check_qkv_split(mixed_qkv, key_heads, value_heads, key_dim, value_dim)
    check_on_cpu("mixed_qkv", mixed_qkv)
    memory = SplitPlan(
        tokens=mixed_qkv.shape[0], bytes=mixed_qkv.element_size(), key_columns=key_heads * key_dim,
        value_columns=value_heads * value_dim, rows=view(mixed_qkv),
    )  # fmt: skip
    return make_plan(memory, (mixed_qkv.shape[0],), mixed_qkv.dtype)
