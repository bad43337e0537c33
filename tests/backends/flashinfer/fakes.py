"""FlashInfer 0.7.4's functions in plain torch: its signatures, what it refuses, and its faults.

Written from its documented and observed behaviour: outputs that nobody asked for are left undefined (NaN here), a
negative slot means something else in every kernel, rows behind the last sequence are overwritten, decode of bf16 pools
ignores `disable_state_update`. An index outside the pool raises here; there it reads or writes foreign memory.
"""

from __future__ import annotations

import itertools
import math
from types import ModuleType

import torch

ALIGN = 32
GARBAGE = 777.0


def modules():
    """What `sys.modules` must hold for the adapters to bind to the fakes."""
    package = ModuleType("flashinfer")
    parts = {
        "gdn_prefill": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
        "gdn_decode": {
            "gated_delta_rule_decode_pretranspose": gated_delta_rule_decode_pretranspose,
            "gated_delta_rule_mtp": gated_delta_rule_mtp,
        },
        "gdn_kernels": {
            "gated_delta_rule_mtp_wy_output_only": gated_delta_rule_mtp_wy_output_only,
            "gated_delta_rule": object(),
            "run_pretranspose_decode": object(),
            "run_mtp_decode": object(),
        },
    }
    found = {"flashinfer": package}
    for name, members in parts.items():
        module = ModuleType(f"flashinfer.{name}")
        vars(module).update(members)
        setattr(package, name, module)
        found[f"flashinfer.{name}"] = module
    return found


def _demand(condition, message):
    if not condition:
        raise ValueError(message)


def _aligned(**tensors):
    for name, tensor in tensors.items():
        if tensor is not None:
            _demand(tensor.data_ptr() % ALIGN == 0, f"{name} is misaligned")


def _in_pool(index, pool):
    assert 0 <= index < pool.shape[0], f"memory outside the pool: slot {index} of {pool.shape[0]}"
    return index


def _unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _heads(x, count):
    return x.repeat_interleave(count // x.shape[-2], dim=-2)


def _step(state, q, k, v, decay, beta):
    """One token of all heads in fp64: state `[HV, V, K]`, q, k `[HV, K]`, v `[HV, V]`, decay, beta `[HV]`."""
    state = state * decay[:, None, None]
    delta = beta[:, None] * (v - torch.einsum("hvk,hk->hv", state, k))
    state = state + delta[:, :, None] * k[:, None, :]
    return state, torch.einsum("hvk,hk->hv", state, q)


def _gates(A_log, a, dt_bias, b):
    x = a.double() + dt_bias.double()
    softplus = torch.where(x > 20, x, torch.log1p(x.clamp(max=20).exp()))
    return torch.exp(-A_log.double().exp() * softplus), torch.sigmoid(b.double())


def _check_rows(q, k, v, a, b, A_log, dt_bias, pool, indices, output, scale):
    batch, steps, _, K = q.shape
    heads, V = v.shape[2:]
    _demand((K, V) == (128, 128) or K >= 128, "K must be at least 128")
    assert (K, V) == (128, 128), "compiles, launches and computes garbage"
    _demand(q.dtype == k.dtype == v.dtype == torch.bfloat16, "operands are rounded to bfloat16")
    _demand(a.dtype == b.dtype == torch.bfloat16, "gates are rounded to bfloat16")
    _demand(A_log.dtype == torch.float32 and dt_bias.dtype in (torch.float32, torch.bfloat16), "gate parameters")
    _demand(indices.dtype == torch.int32 and indices.is_contiguous(), "int32 indices")
    _demand(tuple(pool.shape[1:]) == (heads, V, K), "pool")
    _demand(pool.stride(0) * pool.element_size() % ALIGN == 0, "slot stride")
    _demand(a.shape == b.shape == (batch, steps, heads), "gates' shape")
    _demand(output is not None and output.shape == v.shape and output.dtype == torch.bfloat16, "output")
    _demand(all(x.stride(-1) == 1 for x in (q, k, v)), "unit last stride")
    _aligned(q=q, k=k, v=v, a=a, b=b, A_log=A_log, dt_bias=dt_bias, pool=pool, indices=indices, output=output)


def _chain(row, slot, q, k, v, gates, pool, scale, output):
    """States after each step of one row, from `slot`; writes the row's outputs."""
    state, after = pool[slot].double(), []
    for step in range(q.shape[1]):
        query, key = (_heads(_unit(x[row, step].double()), v.shape[2]) for x in (q, k))
        state, out = _step(state, query * scale, key, v[row, step].double(), gates[0][row, step], gates[1][row, step])
        output[row, step] = out.to(output.dtype)
        after.append(state)
    return after


def gated_delta_rule_decode_pretranspose(
    q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True, initial_state=None,
    initial_state_indices=None, output_state_indices=None, intermediate_states_buffer=None,
    disable_state_update=False, backend="auto",
):  # fmt: skip
    assert backend == "flashinfer", "auto tries another library first"
    assert state is None, "the adapters address a pool"
    assert use_qk_l2norm
    pool, indices = initial_state, initial_state_indices
    _check_rows(q, k, v, a, b, A_log, dt_bias, pool, indices, output, scale)
    if pool.dtype == torch.float32 and q.shape[1] > 1:
        return gated_delta_rule_mtp(
            q, k, v, pool, indices, A_log, a, dt_bias, b, scale, output, intermediate_states_buffer,
            disable_state_update=disable_state_update,
        )  # fmt: skip
    batch, steps = q.shape[:2]
    if intermediate_states_buffer is not None:
        _demand(intermediate_states_buffer.shape[0] == batch, "exactly B buffer rows")
    gates, scale = _gates(A_log, a, dt_bias, b), q.shape[-1] ** -0.5 if scale is None else scale
    output.fill_(math.nan)
    for row, slot in enumerate(indices.tolist()):
        if slot < 0 and pool.dtype == torch.float32:
            output[row] = 0
            continue
        real = slot >= 0
        slot = _in_pool(max(slot, 0), pool)
        after = _chain(row, slot, q, k, v, gates, pool, scale, output)
        if not real:
            output[row] = GARBAGE
        if intermediate_states_buffer is not None:
            for step, value in enumerate(after):
                intermediate_states_buffer[row, step] = value.to(pool.dtype)
        updates = steps == 1 or not disable_state_update
        if updates and (steps == 1 or intermediate_states_buffer is None):
            pool[slot] = after[-1].to(pool.dtype)
    return output, pool


def gated_delta_rule_mtp(
    q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale=None, output=None,
    intermediate_states_buffer=None, ssm_state_indices=None, disable_state_update=None, use_qk_l2norm=True,
    output_state_indices=None, cache_replayssm=False, replayssm_rawv=None, replayssm_rawk=None, replayssm_g=None,
    replayssm_beta=None,
):  # fmt: skip
    assert disable_state_update is not None, "the default changes in 0.8"
    pool = initial_state
    _demand(pool.dtype == torch.float32, "fp32 pools only")
    _check_rows(q, k, v, a, b, A_log, dt_bias, pool, initial_state_indices, output, scale)
    gates, scale = _gates(A_log, a, dt_bias, b), q.shape[-1] ** -0.5 if scale is None else scale
    output.fill_(math.nan)
    for row, slot in enumerate(initial_state_indices.tolist()):
        if slot < 0:
            continue
        after = _chain(row, _in_pool(slot, pool), q, k, v, gates, pool, scale, output)
        if intermediate_states_buffer is not None:
            for step, value in enumerate(after):
                intermediate_states_buffer[row, step] = value.float()
        if not disable_state_update:
            pool[slot] = after[-1].float()
    return output, pool


def gated_delta_rule_mtp_wy_output_only(
    A_log, a, dt_bias, softplus_beta=1.0, softplus_threshold=20.0, q=None, k=None, v=None, b=None,
    initial_state_source=None, initial_state_indices=None, output_state_indices=None, intermediate_states_buffer=None,
    accepted_steps=None, ssm_state_indices=None, disable_state_update=False, use_qk_l2norm_in_kernel=True, scale=None,
    output=None, disable_output=False, recovery_steps=0,
):  # fmt: skip
    _demand(intermediate_states_buffer is None, "no snapshots")
    _demand(disable_state_update, "frozen state")
    pool, indices = initial_state_source, initial_state_indices
    _demand(q.shape[1] <= 16 and pool.dtype == torch.bfloat16, "one tile of 16 rows, bf16")
    _check_rows(q, k, v, a, b, A_log, dt_bias, pool, indices, output, scale)
    gates, scale = _gates(A_log, a, dt_bias, b), q.shape[-1] ** -0.5 if scale is None else scale
    output.fill_(math.nan)
    for row, slot in enumerate(indices.tolist()):
        _chain(row, _in_pool(max(slot, 0), pool), q, k, v, gates, pool, scale, output)
    return output


def chunk_gated_delta_rule(
    q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
    use_qk_l2norm_in_kernel=False, output=None, output_state=None, state_checkpoints=None, checkpoint_cu_starts=None,
    checkpoint_every_n_tokens=0, use_cp="auto", state_indices=None, _cp_chunk_len=None, backend="auto",
    max_seqlen=None, *, gate_domain="linear", use_gate_in_kernel=False, A_log=None, dt_bias=None, beta_is_logit=False,
    cu_seqlens_cpu=None, output_state_indices=None, checkpoint_state_indices=None, prefix_lens=None,
):  # fmt: skip
    assert backend == "flashinfer"
    assert use_cp is False, "context parallelism takes no slot arguments"
    assert gate_domain == "linear"
    _demand(cu_seqlens.shape[0] >= 2, "cu_seqlens must contain at least two entries")
    _demand(q.shape[0] > 0, "tokens")
    _demand(all(x.is_contiguous() for x in (q, k, v, g, beta, output, cu_seqlens, state_indices)), "contiguous")
    _demand(q.dtype == k.dtype == v.dtype == output.dtype, "one dtype")
    _demand(q.dtype in (torch.float16, torch.bfloat16) and g.dtype == beta.dtype == torch.float32, "dtypes")
    _demand(q.shape[2] == v.shape[2] == 128, "head dim")
    _aligned(q=q, k=k, v=v, g=g, beta=beta, output=output, pool=initial_state, slots=state_indices, offsets=cu_seqlens)
    assert not bool((g < 0).any()), "log decays in a linear domain"
    assert not use_qk_l2norm_in_kernel, "a pass of its own, which the adapter's one pass replaces"
    assert not any(bool((x.double().square().sum(-1) > 1.02).any()) for x in (q, k)), "keys that make the state grow"
    assert output_final_state
    assert output_state is initial_state
    pool, heads, scale = initial_state, v.shape[1], scale or q.shape[-1] ** -0.5
    offsets = cu_seqlens.tolist()
    output.fill_(math.nan)
    output[offsets[-1] : offsets[-1] + 63] = GARBAGE
    written = {}
    for row, (begin, end) in enumerate(itertools.pairwise(offsets)):
        read, write = int(state_indices[row]), int(output_state_indices[row])
        state = pool[_in_pool(read, pool)].double() if read >= 0 else torch.zeros(pool.shape[1:], dtype=torch.float64)
        for token in range(begin, end):
            query, key = (_heads(x[token].double(), heads) for x in (q, k))
            decay = (g[token].double() + 1e-10).clamp(max=1.0)
            state, out = _step(state, query * scale, key, v[token].double(), decay, beta[token].double())
            output[token] = out.to(output.dtype)
            done = token + 1 - begin
            if checkpoint_every_n_tokens and done % checkpoint_every_n_tokens == 0:
                first = int(checkpoint_cu_starts[row])
                target = int(checkpoint_state_indices[first + done // checkpoint_every_n_tokens - 1])
                if target >= 0:
                    state_checkpoints[_in_pool(target, state_checkpoints)] = state.to(state_checkpoints.dtype)
        if end > begin and write >= 0:
            written[_in_pool(write, pool)] = state
    for slot, state in written.items():
        pool[slot] = state.to(pool.dtype)
    return output, output_state
