"""Equal rows give equal bits in the cpu backend, whatever else is in the call, where its rows promise so."""

from __future__ import annotations

import itertools

import pytest
import torch

import gdn
from gdn.backends.cpu import MANIFEST
from gdn.testing.operations import bound_operation

CPU = gdn.DeviceInfo.parse("cpu")
HEADS = [(1, 3, 32, 16), (2, 4, 128, 128), (3, 3, 48, 80)]


class Operations:
    """The backend's functions, each bound for whichever heads the test takes."""

    def __getattr__(self, operation):
        return bound_operation("cpu", operation, gdn.GdnConfig(
            num_k_heads=1, num_v_heads=1, head_k_dim=32, head_v_dim=32, activation_dtype="float32", deterministic=True
        ), CPU)  # fmt: skip


@pytest.fixture(params=["native", "torch"])
def ops(request, monkeypatch):
    monkeypatch.setenv("GDN_CPU_NATIVE", str(int(request.param == "native")))
    assert ("native" in Operations().decode.__module__) == (request.param == "native")
    return Operations()


def tokens(count, heads, seed=0, dtype=torch.float32):
    key_heads, value_heads, key_dim, value_dim = heads
    torch.manual_seed(seed)
    q, k = (torch.randn(1, count, key_heads, key_dim).to(dtype) for _ in range(2))
    v = torch.randn(1, count, value_heads, value_dim).to(dtype)
    a, b = torch.randn(count, value_heads), torch.randn(count, value_heads)
    return q, k, v, a, b


def gates(heads):
    return {"A_log": torch.linspace(-1, 1, heads[1]), "dt_bias": torch.linspace(1, -1, heads[1])}


def pool_at(offset, slots, heads, seed=5):
    """A pool whose slots start `offset` elements further and lie that much further apart."""
    _, value_heads, key_dim, value_dim = heads
    torch.manual_seed(seed)
    size = value_heads * key_dim * value_dim
    storage = torch.zeros(offset + slots * (size + offset))
    pool = storage[offset:].view(slots, size + offset)[:, :size].view(slots, value_heads, value_dim, key_dim)
    pool.copy_(torch.randn(value_heads, value_dim, key_dim).expand_as(pool))
    return pool


@pytest.mark.parametrize("offset", [0, 16, 112])
@pytest.mark.parametrize("heads", HEADS)
def test_decode_row_alone_and_in_a_batch(ops, heads, offset):
    q, k, v, a, b = tokens(9, heads)
    crowd = pool_at(offset, 9, heads)
    out = ops.decode(q, k, v, a, b, **gates(heads), ssm_states=crowd, cache_indices=torch.arange(9))
    for row in range(9):
        one = slice(row, row + 1)
        pool = pool_at(0, 1, heads)
        alone = ops.decode(
            q[:, one], k[:, one], v[:, one], a[one], b[one], **gates(heads), ssm_states=pool,
            cache_indices=torch.tensor([0]),
        )  # fmt: skip
        assert torch.equal(alone, out[:, one])
        assert torch.equal(pool[0], crowd[row])


@pytest.mark.parametrize("offset", [0, 80])
@pytest.mark.parametrize("heads", HEADS)
def test_case_69_extend_beside_other_sequences(ops, heads, offset):
    q, k, v, a, b = tokens(1000, heads)
    g, beta = ops.gating(gates(heads)["A_log"], a, b, gates(heads)["dt_bias"])
    bounds = [0, 1, 71, 135, 200, 1000]
    crowd = pool_at(offset, 5, heads)

    def run(pool, begin, limits):
        rows = slice(begin, begin + limits[-1])
        return ops.extend(
            q[:, rows], k[:, rows], v[:, rows], g[:, rows], beta[:, rows], ssm_states=pool,
            cache_indices=torch.arange(len(limits) - 1), query_start_loc=torch.tensor(limits),
        ).output  # fmt: skip

    out = run(crowd, 0, bounds)
    for sequence, (begin, end) in enumerate(itertools.pairwise(bounds)):
        pool = pool_at(0, 1, heads)
        assert torch.equal(run(pool, begin, [0, end - begin]), out[:, begin:end])
        assert torch.equal(pool[0], crowd[sequence])
    pool = pool_at(0, 1, heads)
    parts = [run(pool, 200, [0, 128]), run(pool, 328, [0, 672])]
    assert torch.equal(torch.cat(parts, 1), out[:, 200:])
    assert torch.equal(pool[0], crowd[4])


@pytest.mark.parametrize("heads", HEADS)
def test_verify_request_alone_and_in_a_batch(ops, heads):
    q, k, v, a, b = tokens(15, heads)
    pool = pool_at(48, 5, heads)
    _, value_heads, key_dim, value_dim = heads

    def run(first, count):
        rows = slice(3 * first, 3 * (first + count))
        buffer = torch.zeros(count, 3, value_heads, value_dim, key_dim)
        out = ops.verify(
            **gates(heads), q=q[:, rows], k=k[:, rows], v=v[:, rows], a=a[rows], b=b[rows], ssm_states=pool,
            cache_indices=torch.arange(count), query_start_loc=torch.arange(count + 1) * 3,
            intermediate_states_buffer=buffer, intermediate_state_indices=torch.arange(count), cache_steps=3,
        )  # fmt: skip
        return out, buffer

    out, buffer = run(0, 5)
    for request in range(5):
        alone, states = run(request, 1)
        assert torch.equal(alone[0], out[0, 3 * request : 3 * request + 3])
        assert torch.equal(states[0], buffer[request])


@pytest.mark.parametrize("dim", [7, 100, 2064])
def test_convolution_alone_and_in_a_batch(ops, dim):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(dim, 700), torch.randn(dim, 4), torch.randn(dim)
    bounds, pool = [0, 1, 70, 700], torch.randn(3, dim, 3)
    crowd = pool.clone()
    out = ops.conv_extend(
        x, weight, bias, conv_states=crowd, query_start_loc=torch.tensor(bounds), cache_indices=torch.arange(3),
        has_initial_state=None,
    )  # fmt: skip
    for sequence, (begin, end) in enumerate(itertools.pairwise(bounds)):
        alone = ops.conv_extend(
            x[:, begin:end], weight, bias, conv_states=pool.clone(), query_start_loc=torch.tensor([0, end - begin]),
            cache_indices=torch.tensor([sequence]), has_initial_state=None,
        )  # fmt: skip
        assert torch.equal(alone, out[:, begin:end])
    steps = torch.randn(3, dim, 2)
    together = ops.conv_update(steps, pool.clone(), weight, bias)
    for row in range(3):
        alone = ops.conv_update(
            steps[row : row + 1], pool.clone(), weight, bias, conv_state_indices=torch.tensor([row])
        )
        assert torch.equal(alone[0], together[row])
    single = pool.clone()
    chain = [ops.conv_update(steps[..., t].contiguous(), single, weight, bias) for t in range(2)]
    assert torch.equal(torch.stack(chain, -1), together)


@pytest.mark.parametrize("value_heads", [1, 3, 32])
def test_gating_row_alone_and_in_a_batch(ops, value_heads):
    torch.manual_seed(0)
    a, b = torch.randn(77, value_heads) * 9, torch.randn(77, value_heads) * 9
    A_log, dt_bias = torch.randn(value_heads), torch.randn(value_heads)
    g, beta = ops.gating(A_log, a, b, dt_bias)
    for row in range(77):
        one = ops.gating(A_log, a[row : row + 1], b[row : row + 1], dt_bias)
        assert torch.equal(one[0][0, 0], g[0, row])
        assert torch.equal(one[1][0, 0], beta[0, row])


def test_every_row_declares_what_is_shown_here():
    assert {row.op for row in MANIFEST.capabilities} == {
        "decode", "extend", "verify", "conv_extend", "conv_update", "gating", "qkv_split"
    }  # fmt: skip
    reproducible = [row for row in MANIFEST.capabilities if row.deterministic]
    assert {row.op for row in reproducible} == {row.op for row in MANIFEST.capabilities}
    for row in reproducible:
        if row.op in ("decode", "extend", "verify"):
            native = "native" in row.factory
            assert row.state_alignment == (1 if native else 64)
            assert all(
                key_dim in row.head_dims.k and value_dim in row.head_dims.v for _, _, key_dim, value_dim in HEADS
            )
