"""The causal depthwise convolution: over packed sequences, and step by step for decode and drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gdn.backends.cpu.native.library import Plan
from gdn.backends.cpu.native.library import address
from gdn.backends.cpu.native.library import check_on_cpu
from gdn.backends.cpu.native.library import make_plan
from gdn.backends.cpu.native.library import native
from gdn.backends.cpu.native.structures import ARGUMENTS
from gdn.backends.cpu.native.structures import ConvExtendPlan
from gdn.backends.cpu.native.structures import ConvUpdatePlan
from gdn.backends.cpu.native.structures import view
from gdn.backends.cpu.rows import token_spans
from gdn.signature import planned
from gdn.validation import check_conv_extend
from gdn.validation import check_conv_update
from gdn.validation import check_seq_lens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import ConvExtend
    from gdn.ops import ConvUpdate

_pack_extend = ARGUMENTS["conv_extend"][1].pack
_pack_update = ARGUMENTS["conv_update"][1].pack
_threads = torch.get_num_threads


def extend_factory(context: BindContext) -> ConvExtend:
    """One native function serves every config."""
    run, plans = native("conv_extend"), planned(_extend_plan)

    def conv_extend(
        x: Tensor, weight: Tensor, bias: Tensor | None, *, conv_states: Tensor, query_start_loc: Tensor,
        cache_indices: Tensor, has_initial_state: Tensor | None, activation: str | None = "silu",
        seq_lens_cpu: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """See `gdn.ops.ConvExtend`."""
        plan = plans(
            x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation
        )  # fmt: skip
        check_seq_lens(seq_lens_cpu, query_start_loc)
        out = torch.empty_like(x)
        call = _pack_extend(
            x.data_ptr(), weight.data_ptr(), address(bias), conv_states.data_ptr(), cache_indices.data_ptr(),
            query_start_loc.data_ptr(), address(has_initial_state), out.data_ptr(), _threads(),
        )  # fmt: skip
        if run(plan.address, call):
            token_spans(query_start_loc, x.shape[1])
        return out

    return conv_extend


def update_factory(context: BindContext) -> ConvUpdate:
    """One native function serves every config."""
    run, plans = native("conv_update"), planned(_update_plan)

    def conv_update(
        x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = "silu",
        conv_state_indices: Tensor | None = None, intermediate_conv_window: Tensor | None = None,
        intermediate_state_indices: Tensor | None = None, retrieve_next_token: Tensor | None = None,
        retrieve_next_sibling: Tensor | None = None, retrieve_parent_token: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `gdn.ops.ConvUpdate`. The parents of padded requests are not written."""
        plan = plans(
            x, conv_state, weight, bias, activation, conv_state_indices, intermediate_conv_window,
            intermediate_state_indices, retrieve_next_token, retrieve_next_sibling, retrieve_parent_token,
        )  # fmt: skip
        out = torch.empty_like(x)
        call = _pack_update(
            x.data_ptr(), weight.data_ptr(), address(bias), conv_state.data_ptr(), address(conv_state_indices),
            address(intermediate_conv_window), address(intermediate_state_indices), address(retrieve_next_token),
            address(retrieve_next_sibling), address(retrieve_parent_token), out.data_ptr(), _threads(),
        )  # fmt: skip
        run(plan.address, call)
        return out

    return conv_update


def _extend_plan(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor, query_start_loc: Tensor,
    cache_indices: Tensor, has_initial_state: Tensor | None, activation: str | None,
) -> Plan:  # fmt: skip
    check_conv_extend(x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation)
    check_on_cpu("x", x)
    memory = ConvExtendPlan(
        dim=x.shape[0], tokens=x.shape[1], width=weight.shape[1], requests=cache_indices.shape[0],
        slots=conv_states.shape[0], has_bias=bias is not None, has_flags=has_initial_state is not None,
        silu=activation is not None, x=view(x), out=view(torch.empty_like(x)), weight=view(weight), bias=view(bias),
        state=view(conv_states), index=view(cache_indices), offsets=view(query_start_loc),
        flags=view(has_initial_state),
    )  # fmt: skip
    return make_plan(memory, tuple(x.shape), x.dtype)


def _update_plan(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None,
    conv_state_indices: Tensor | None, window: Tensor | None, rows: Tensor | None, next_token: Tensor | None,
    next_sibling: Tensor | None, parents: Tensor | None,
) -> Plan:  # fmt: skip
    check_conv_update(
        x, conv_state, weight, bias, activation, conv_state_indices, window, rows, next_token, next_sibling, parents
    )
    check_on_cpu("x", x)
    memory = ConvUpdatePlan(
        requests=x.shape[0], dim=x.shape[1], drafts=x.shape[2] if x.dim() == 3 else 1, width=weight.shape[1],
        slots=conv_state.shape[0], rows=0 if window is None else window.shape[0], has_bias=bias is not None,
        has_index=conv_state_indices is not None, has_window=window is not None, has_row=rows is not None,
        has_tree=next_token is not None, has_parents=parents is not None, silu=activation is not None,
        x=view(x), out=view(torch.empty_like(x)), weight=view(weight), bias=view(bias), state=view(conv_state),
        index=view(conv_state_indices), window=view(window), row=view(rows), child=view(next_token),
        sibling=view(next_sibling), parents=view(parents),
    )  # fmt: skip
    return make_plan(memory, tuple(x.shape), x.dtype)
