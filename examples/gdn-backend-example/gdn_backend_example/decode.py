"""One token for each request: the states of all requests in one batch of products."""

import torch
from torch.nn.functional import softplus

import gdn
from gdn.signature import validated
from gdn.validation import check_decode

_check = validated(check_decode)


def factory(context: gdn.BindContext):
    """Called once, when a triple is bound. What it returns is what servers call."""
    if not torch.backends.mkldnn.is_available():
        raise gdn.BackendRefused("torch was built without oneDNN, which the products here rely on for their speed")
    return decode


def decode(q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc=None, scale=None, out=None):
    """See `gdn.ops.Decode`."""
    _check(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, out)
    rows, slots = _real_rows(cache_indices, query_start_loc, ssm_states.shape[0])
    value_heads, key_dim = v.shape[2], k.shape[3]
    scale = key_dim**-0.5 if scale is None else scale

    q, k = (_per_value_head(_unit(x[0, rows].float()), value_heads) for x in (q, k))
    rate = A_log.float().exp().clamp(max=torch.finfo(torch.float32).max)  # finite: infinity times 0 would be NaN
    log_decay = -rate * softplus(a[rows].float() + dt_bias.float(), threshold=20)
    beta = torch.sigmoid(b[rows].float()).unsqueeze(-1)

    states = ssm_states[slots].float() * log_decay.exp()[..., None, None]
    change = beta * (v[0, rows].float() - torch.einsum("rhvk,rhk->rhv", states, k))
    states += torch.einsum("rhv,rhk->rhvk", change, k)
    ssm_states[slots] = states.to(ssm_states.dtype)

    result = torch.zeros(v.shape, dtype=v.dtype) if out is None else out.zero_()
    result[0, rows] = torch.einsum("rhvk,rhk->rhv", states, q * scale).to(v.dtype)
    return result


def _real_rows(cache_indices, query_start_loc, slots):
    """Token rows that belong to a request with a slot, and those slots: all others stay zero and touch no state."""
    indices = cache_indices.long()
    real = (indices >= 0) & (indices < slots)
    if query_start_loc is None:
        rows = torch.arange(len(indices))
    else:
        rows = query_start_loc[:-1].long()
        real &= query_start_loc[1:] > query_start_loc[:-1]
    return rows[real], indices[real]


def _unit(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _per_value_head(x, value_heads):
    """`[R, HK, K]` to `[R, HV, K]`: value head j reads key head j // (HV // HK)."""
    return x.repeat_interleave(value_heads // x.shape[1], dim=1)
