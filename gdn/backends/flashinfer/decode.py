"""Decode: one token per request through the pool form of the library's pretranspose kernel."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from typing import NamedTuple

import torch

from gdn.backends.flashinfer import library
from gdn.backends.flashinfer.accepted import Accepted
from gdn.backends.flashinfer.launched import check_kernels
from gdn.backends.flashinfer.layout import check_pool_address
from gdn.backends.flashinfer.layout import dense
from gdn.backends.flashinfer.layout import direct
from gdn.backends.flashinfer.layout import parameter
from gdn.backends.flashinfer.layout import placed
from gdn.backends.flashinfer.rows import silence
from gdn.backends.flashinfer.rows import silence_each
from gdn.backends.flashinfer.slots import dense_rows
from gdn.backends.flashinfer.slots import gathered
from gdn.backends.flashinfer.slots import owners
from gdn.backends.flashinfer.staging import slots_or_else
from gdn.signature import planned
from gdn.validation import check_decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gdn.binding import BindContext
    from gdn.ops import Decode


class Plan(NamedTuple):
    """What one signature needs."""

    usable: int
    """Slots of requests; the pool holds the row's scratch slots after them."""
    direct: tuple[bool, bool, bool]
    """Whether q, k, v are read where they lie."""
    nobody: bool


def factory(context: BindContext) -> Decode:
    """For a negative slot fp32 kernels skip the row, bf16 kernels update slot 0: those get the scratch slot."""
    check_kernels()
    fp32 = context.state.dtype == "float32"
    kernel = library.FP32_DECODE_KERNEL if fp32 else library.BF16_KERNELS
    recurrent = library.function("gdn_decode:gated_delta_rule_decode_pretranspose", kernel=kernel)
    plans = planned(partial(_plan, Accepted.of(context), context.row.reserved_slots))
    step = partial(_step, recurrent, skips_negative=fp32)

    def decode(
        q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
        cache_indices: Tensor, query_start_loc: Tensor | None = None, scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `gdn.ops.Decode`."""
        plan = plans(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, out)
        check_pool_address(ssm_states)
        if out is None:
            out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        if plan.nobody:
            return out.zero_()
        parameters = parameter(A_log), parameter(dt_bias)
        if query_start_loc is None:
            rows = [placed(x[0], at_home).unsqueeze(1) for x, at_home in zip((q, k, v), plan.direct, strict=True)]
            gates = [dense(x).unsqueeze(1) for x in (a, b)]
            step(plan.usable, rows, gates, parameters, ssm_states, cache_indices, scale, out[0].unsqueeze(1))
            return out
        row, own = dense_rows(query_start_loc, 1, v.shape[1])
        indices = torch.where(own[:, 0], cache_indices, -1)
        rows, gates = [gathered(x[0], row) for x in (q, k, v)], [gathered(x, row) for x in (a, b)]
        given = torch.empty((indices.shape[0], 1, *v.shape[2:]), dtype=v.dtype, device=v.device)
        step(plan.usable, rows, gates, parameters, ssm_states, indices, scale, given)
        torch.index_select(given[:, 0], 0, owners(query_start_loc, v.shape[1]).owner, out=out[0])
        silence(out[0], query_start_loc, cache_indices, plan.usable)
        return out

    return decode


def _step(
    recurrent: Callable[..., tuple[Tensor, Tensor]], usable: int, rows: list[Tensor], gates: list[Tensor],
    parameters: tuple[Tensor, Tensor], pool: Tensor, indices: Tensor, scale: float | None, out: Tensor, *,
    skips_negative: bool,
) -> None:  # fmt: skip
    """One step of every row `[N, 1, ...]`, in place in the pool, into `out [N, 1, HV, V]`; padded rows are zeros."""
    target = dense(out)
    slots = slots_or_else(indices, usable, -1 if skips_negative else usable)
    recurrent(
        *rows, None, parameters[0], gates[0], parameters[1], gates[1], scale=scale, output=target,
        use_qk_l2norm=True, initial_state=pool, initial_state_indices=slots, disable_state_update=False,
        backend="flashinfer",
    )  # fmt: skip
    if not skips_negative:
        silence_each(target, slots, usable)
    if target is not out:
        out.copy_(target)


def _plan(
    accepted: Accepted, reserved: int, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor,
    dt_bias: Tensor, ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor | None, out: Tensor | None,
) -> Plan:  # fmt: skip
    check_decode(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, out)
    accepted.check(v, ssm_states, a, b)
    usable = ssm_states.shape[0] - reserved
    return Plan(
        usable, (direct(q[0]), direct(k[0]), direct(v[0])), usable <= 0 or 0 in (cache_indices.shape[0], v.shape[1])
    )
