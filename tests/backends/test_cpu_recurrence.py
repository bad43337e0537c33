"""Decode, packed decode, extend and verify of the cpu backend against a token recurrence in fp64."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch

from gdn.backends.cpu.decode import decode
from gdn.backends.cpu.extend import extend
from gdn.backends.cpu.gating import gating
from gdn.backends.cpu.packed import packed_decode
from gdn.backends.cpu.verify import verify
from gdn.errors import InputError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def recurrence(state, q, k, v, g, beta, scale=None):
    """Outputs `[T, HV, V]` and the states after each token, in fp64, one head and token at a time."""
    state, q, k, v, g, beta = (x.double().clone() for x in (state, q, k, v, g, beta))
    ratio = v.shape[1] // k.shape[1]
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    outputs, states = torch.zeros_like(v), []
    for t, j in itertools.product(range(v.shape[0]), range(v.shape[1])):
        key = k[t, j // ratio] / (k[t, j // ratio].square().sum() + 1e-6).sqrt()
        query = q[t, j // ratio] / (q[t, j // ratio].square().sum() + 1e-6).sqrt() * scale
        decayed = torch.where(g[t, j] == -math.inf, 0.0, state[j] * g[t, j].exp())
        state[j] = decayed + torch.outer(beta[t, j] * (v[t, j] - decayed @ key), key)
        outputs[t, j] = state[j] @ query
        if j == v.shape[1] - 1:
            states.append(state.clone())
    return outputs, states


def reference_gates(A_log, a, b, dt_bias):
    x = a.double() + dt_bias.double()
    return -A_log.double().exp() * torch.nn.functional.softplus(x), b.double().sigmoid()


@dataclass
class Problem:
    """Random tokens and a pool; heads, dims and slots all different."""

    tokens: int
    key_heads: int = 2
    value_heads: int = 6
    key_dim: int = 20
    value_dim: int = 12
    slots: int = 7
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape, dtype=self.dtype):
            return torch.randn(shape, generator=generator).to(dtype)

        self.q = normal(1, self.tokens, self.key_heads, self.key_dim)
        self.k = normal(1, self.tokens, self.key_heads, self.key_dim)
        self.v = normal(1, self.tokens, self.value_heads, self.value_dim)
        self.a = normal(self.tokens, self.value_heads)
        self.b = normal(self.tokens, self.value_heads)
        self.A_log = normal(self.value_heads, dtype=torch.float32) * 0.5
        self.dt_bias = normal(self.value_heads, dtype=torch.float32)
        self.pool = normal(self.slots, self.value_heads, self.value_dim, self.key_dim, dtype=self.state_dtype)
        self.g, self.beta = reference_gates(self.A_log, self.a, self.b, self.dt_bias)
        self.gates = {"A_log": self.A_log, "dt_bias": self.dt_bias}

    def expect(self, slot, begin, end, scale=None):
        rows = slice(begin, end)
        return recurrence(
            self.pool[slot], self.q[0, rows], self.k[0, rows], self.v[0, rows], self.g[rows], self.beta[rows], scale
        )

    def mixed_qkv(self):
        return torch.cat([x[0].flatten(1) for x in (self.q, self.k, self.v)], dim=1)

    def decode(self, pool, indices, **options):
        return decode(
            self.q, self.k, self.v, self.a, self.b, **self.gates, ssm_states=pool, cache_indices=indices, **options
        )

    def extend(self, pool, indices, bounds, **options):
        return extend(
            self.q, self.k, self.v, self.g.float()[None], self.beta.float()[None],
            ssm_states=pool, cache_indices=torch.tensor(indices, dtype=torch.int64), query_start_loc=torch.tensor(bounds), **options,
        )  # fmt: skip

    def verify(self, pool, indices, bounds, buffer, buffer_rows, steps, **options):
        return verify(
            self.A_log, self.dt_bias, self.q, self.k, self.v, self.a, self.b, ssm_states=pool,
            cache_indices=torch.tensor(indices, dtype=torch.int64), query_start_loc=torch.tensor(bounds),
            intermediate_states_buffer=buffer,
            intermediate_state_indices=None if buffer_rows is None else torch.tensor(buffer_rows, dtype=torch.int64),
            cache_steps=steps, **options,
        )  # fmt: skip


def assert_close(actual, expected, tolerance):
    limit = tolerance * max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
    torch.testing.assert_close(actual.double(), expected.double(), atol=limit, rtol=0)


def strided_pool(pool):
    """The same pool with a slot stride 40 elements longer, and the storage; the gaps hold 7."""
    slots, size = pool.shape[0], pool[0].numel()
    storage = torch.full((slots, size + 40), 7.0, dtype=pool.dtype)
    view = storage[:, :size].view(pool.shape)
    view.copy_(pool)
    return view, storage


@pytest.mark.parametrize("state_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_decode_matches_recurrence(dtype, state_dtype):
    problem = Problem(5, dtype=dtype, state_dtype=state_dtype)
    pool, storage = strided_pool(problem.pool)
    slots = [3, 6, 0, 2, 5]
    out = torch.full((1, 5, 6, 12), math.nan, dtype=dtype)
    result = problem.decode(pool, torch.tensor(slots), out=out, scale=0.3)
    assert result is out
    for row, slot in enumerate(slots):
        outputs, states = problem.expect(slot, row, row + 1, 0.3)
        assert_close(out[0, row : row + 1], outputs, TOLERANCE[dtype])
        assert_close(pool[slot], states[-1], TOLERANCE[state_dtype])
    for slot in (1, 4):
        assert torch.equal(pool[slot], problem.pool[slot])
    assert (storage[:, problem.pool[0].numel() :] == 7).all()


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("operation", ["decode", "packed"])
def test_case_01_padded_rows_are_inert(operation, index_dtype):
    problem = Problem(4, slots=4)
    for x in (problem.q[0], problem.k[0], problem.v[0], problem.a, problem.b):
        x[1:3] = math.nan
    alone_pool, pool = problem.pool.clone(), problem.pool.clone()

    def run(pool, rows, indices):
        indices = torch.tensor(indices, dtype=index_dtype)
        if operation == "packed":
            return packed_decode(
                problem.mixed_qkv()[rows], problem.a[rows], problem.b[rows],
                **problem.gates, ssm_states=pool, cache_indices=indices,
            )  # fmt: skip
        q, k, v = (x[:, rows] for x in (problem.q, problem.k, problem.v))
        return decode(
            q, k, v, problem.a[rows], problem.b[rows], **problem.gates, ssm_states=pool, cache_indices=indices
        )

    out = run(pool, [0, 1, 2, 3], [2, -1, 4, 0])
    alone = run(alone_pool, [0, 3], [2, 0])
    assert torch.equal(out[:, [0, 3]], alone)
    assert torch.equal(pool, alone_pool)
    assert (out[:, 1:3] == 0).all()
    assert torch.equal(pool[[1, 3]], problem.pool[[1, 3]])


def test_decode_follows_query_start_loc():
    problem = Problem(4)
    pool = problem.pool.clone()
    bounds = torch.tensor([0, 1, 1, 2, 2], dtype=torch.int32)
    out = problem.decode(pool, torch.tensor([4, 1, 2, 3]), query_start_loc=bounds)
    for row, slot in ((0, 4), (1, 2)):
        outputs, states = problem.expect(slot, row, row + 1)
        assert_close(out[0, row : row + 1], outputs, 1e-5)
        assert_close(pool[slot], states[-1], 1e-5)
    assert (out[0, 2:] == 0).all()
    assert torch.equal(pool[[1, 3]], problem.pool[[1, 3]])


def test_packed_decode_equals_decode_on_strided_rows():
    problem = Problem(3, dtype=torch.bfloat16)
    wide = torch.full((3, problem.mixed_qkv().shape[1] * 2 + 1), math.nan, dtype=torch.bfloat16)
    mixed = wide[:, 1::2]
    mixed.copy_(problem.mixed_qkv())
    pools = problem.pool.clone(), problem.pool.clone()
    indices = torch.tensor([[5, 9], [0, 9], [2, 9]])[:, 0]
    packed = packed_decode(mixed, problem.a, problem.b, **problem.gates, ssm_states=pools[0], cache_indices=indices)
    assert torch.equal(packed, problem.decode(pools[1], indices))
    assert torch.equal(*pools)


@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 1), (1, 3), (4, 12), (4, 20), (3, 3), (2, 14)])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(1, 1), (60, 33), (96, 128)])
def test_case_23_and_45_any_heads_and_dims(key_heads, value_heads, key_dim, value_dim):
    problem = Problem(5, key_heads, value_heads, key_dim, value_dim, slots=2)
    outputs, states = problem.expect(1, 0, 5)
    pool = problem.pool.clone()
    result = problem.extend(pool, [1], [0, 5])
    assert_close(result.output[0], outputs, 1e-5)
    assert_close(pool[1], states[-1], 1e-5)
    out = problem.verify(problem.pool, [1], [0, 5], None, None, 5)
    assert_close(out[0], outputs, 1e-5)


@pytest.mark.parametrize("state_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_extend_matches_recurrence(dtype, state_dtype):
    bounds = [0, 0, 1, 66, 66, 194, 331]
    problem = Problem(340, dtype=dtype, state_dtype=state_dtype)
    slots = [5, 1, 4, 0, 2, 6]
    for x in (problem.q[0], problem.k[0], problem.v[0], problem.g, problem.beta):
        x[331:] = math.nan
    pool, storage = strided_pool(problem.pool)
    out = torch.full((1, 340, 6, 12), math.nan, dtype=dtype)
    result = problem.extend(pool, slots, bounds, out=out, return_chunk_states=True)
    assert result.output is out
    assert result.final_state is None
    assert result.chunk_states.shape == (1, 1 + 2 + 2 + 3, 6, 12, 20)
    assert result.chunk_states.dtype == state_dtype
    chunk = 0
    for slot, begin, end in zip(slots, bounds, bounds[1:], strict=False):
        outputs, states = problem.expect(slot, begin, end)
        history = [problem.pool[slot], *states]
        assert_close(out[0, begin:end], outputs, TOLERANCE[dtype])
        assert_close(pool[slot], history[-1], TOLERANCE[state_dtype])
        for at in range(0, end - begin, 64):
            assert_close(result.chunk_states[0, chunk], history[at], TOLERANCE[state_dtype])
            chunk += 1
    assert (out[0, 331:] == 0).all()
    assert torch.equal(pool[3], problem.pool[3])
    assert (storage[:, problem.pool[0].numel() :] == 7).all()


def test_extend_snapshots_and_padded_sequences():
    bounds = [0, 70, 140, 140, 270, 330]
    problem = Problem(330, slots=12, state_dtype=torch.bfloat16)
    problem.v[0, 270:] = math.nan
    slots = [0, 1, 2, 3, -1]
    pool = problem.pool.clone()
    result = problem.extend(
        pool, slots, bounds,
        snapshot_chunks=torch.tensor([1, 2, 0, 3, 0], dtype=torch.int32),
        snapshot_slots=torch.tensor([6, 7, 8, 12, 9], dtype=torch.int32),
        return_chunk_states=True,
    )  # fmt: skip
    assert result.chunk_states.shape[1] == 2 + 2 + 0 + 3 + 1
    assert (result.chunk_states[0, -1] == 0).all()
    assert (result.output[0, 270:] == 0).all()
    assert_close(pool[6], problem.expect(0, 0, 64)[1][-1], 1.6e-2)
    assert torch.equal(pool[7], pool[1])
    assert torch.equal(pool[8], problem.pool[2])
    assert torch.equal(pool[9:], problem.pool[9:])
    assert torch.equal(pool[[2, 4, 5]], problem.pool[[2, 4, 5]])


@pytest.mark.parametrize("g", [-1e-3, -0.5, -1.0, -1.4, -1.5, -2.0, -5.0, -27.6, -3e38, -math.inf])
def test_case_12_strong_decay(g):
    problem = Problem(64, 1, 1, 16, 16, slots=1)
    problem.pool.fill_(1.0)
    problem.g.fill_(-0.01)
    problem.g[20] = g
    problem.g[21] = g
    if g > -30:
        problem.g.fill_(g)
    problem.beta.fill_(0.5)
    pool = problem.pool.clone()
    outputs, states = problem.expect(0, 0, 64)
    result = problem.extend(pool, [0], [0, 64])
    assert_close(result.output[0], outputs, 1e-5)
    assert_close(pool[0], states[-1], 1e-5)


@pytest.mark.parametrize("beta", [0.835, 0.99, 1.0])
def test_case_13_repeated_keys(beta):
    problem = Problem(448, 1, 2, 128, 16, slots=1)
    problem.k[:] = problem.k[:, :1].clone()
    problem.g.fill_(-1e-3)
    problem.beta.fill_(beta)
    pool = problem.pool.clone()
    outputs, states = problem.expect(0, 0, 448)
    result = problem.extend(pool, [0], [0, 448])
    assert_close(result.output[0], outputs, 1e-5)
    assert_close(pool[0], states[-1], 1e-5)


def test_precision_of_tokens_after_a_forgotten_one():
    problem = Problem(64, 1, 1, 16, 8, slots=1)
    problem.g.fill_(-1e-2)
    problem.g[3:30:3] = -5000.0
    outputs, _ = problem.expect(0, 0, 64)
    assert_close(problem.extend(problem.pool.clone(), [0], [0, 64]).output[0], outputs, 1e-6)


@pytest.mark.parametrize("split", [1, 63, 64, 65, 99])
def test_case_40_extend_continues(split):
    key_dim, tokens = 128, 100
    q = k = torch.eye(key_dim)[:tokens].view(1, tokens, 1, key_dim)
    v = torch.arange(1.0, tokens + 1).view(1, tokens, 1, 1)
    zeros, ones = torch.zeros(1, tokens, 1), torch.ones(1, tokens, 1)
    pool = torch.zeros(1, 1, 1, key_dim)
    for part in (slice(0, split), slice(split, tokens)):
        length = len(range(*part.indices(tokens)))
        extend(
            q[:, part], k[:, part], v[:, part], zeros[:, part], ones[:, part], ssm_states=pool,
            cache_indices=torch.tensor([0]), query_start_loc=torch.tensor([0, length]), scale=1.0,
        )  # fmt: skip
    torch.testing.assert_close(pool[0, 0, 0, :tokens], v[0, :, 0, 0], rtol=2e-6, atol=0)
    assert (pool[0, 0, 0, tokens:] == 0).all()


@pytest.mark.parametrize("tokens", [1, 65])
def test_case_47_large_state_with_fp16_activations(tokens):
    q = k = torch.eye(4, dtype=torch.float16)[:1].expand(tokens, 4).reshape(1, tokens, 1, 4)
    v = torch.zeros(1, tokens, 1, 4, dtype=torch.float16)
    g = torch.zeros(1, tokens, 1)
    g[0, 0] = -4.0
    pool = torch.zeros(1, 1, 4, 4)
    pool[0, 0, 0, 0] = 65536.0
    out = extend(
        q, k, v, g, torch.zeros(1, tokens, 1), ssm_states=pool, cache_indices=torch.tensor([0]),
        query_start_loc=torch.tensor([0, tokens]), scale=0.5,
    ).output  # fmt: skip
    assert pool[0, 0, 0, 0].item() == pytest.approx(1200.33, rel=1e-5)
    assert out[0, -1, 0, 0].item() == pytest.approx(600.16, rel=1e-3)
    assert out.isfinite().all()


@pytest.mark.parametrize(("size", "first", "present"), [(0.0, 0.0, False), (1e-4, 0.066227, True), (300.0, None, True)])
def test_case_54_zero_and_tiny_vectors(size, first, present):
    dtype = torch.float16 if size == 300.0 else torch.float32
    k = torch.full((1, 1, 1, 128), size, dtype=dtype)
    v = torch.ones(1, 1, 1, 2, dtype=dtype)
    gates = {"A_log": torch.zeros(1), "dt_bias": torch.full((1,), -100.0)}
    pool = torch.zeros(1, 1, 2, 128)
    decode(
        k, k, v, torch.zeros(1, 1), torch.full((1, 1), 50.0), **gates, ssm_states=pool, cache_indices=torch.tensor([0])
    )
    expected = 128**-0.5 if first is None else first
    torch.testing.assert_close(pool, torch.full_like(pool, expected if present else 0.0), rtol=1e-5, atol=1e-9)


def test_case_25_state_is_value_major():
    state = (10 * torch.arange(4.0)[:, None] + torch.arange(4.0)).view(1, 1, 4, 4)
    q = torch.eye(4)[3].view(1, 1, 1, 4)
    k, v = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4)
    pool = state.clone()
    low = torch.full((1, 1), -1000.0)
    out = decode(
        q, k, v, low, low, A_log=torch.zeros(1), dt_bias=torch.zeros(1), ssm_states=pool,
        cache_indices=torch.tensor([0]), scale=1.0,
    )  # fmt: skip
    torch.testing.assert_close(out.flatten(), 10 * torch.arange(4.0) + 3, rtol=1e-6, atol=0)
    assert torch.equal(pool, state)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float32, 0.98176), (torch.bfloat16, 0.5), (torch.float16, 0.875)]
)
def test_case_46_state_is_rounded_once_per_call(dtype, expected):
    one = torch.ones(1, 1, 1, 1)
    low, b = torch.full((1, 1), -1000.0), torch.full((1, 1), math.log(2**-9 / (1 - 2**-9)))
    pool = torch.zeros(1, 1, 1, 1, dtype=dtype)
    for _ in range(2048):
        decode(
            one, one, one, low, b, A_log=torch.zeros(1), dt_bias=torch.zeros(1), ssm_states=pool,
            cache_indices=torch.tensor([0]),
        )  # fmt: skip
    assert pool.item() == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("state_dtype", FLOATS)
def test_verify_chain_stores_every_state(state_dtype):
    problem = Problem(11, state_dtype=state_dtype)
    bounds, slots, rows = [0, 4, 4, 7, 11, 11], [3, 0, 6, 2, -1], [2, 0, 5, 9, 1]
    buffer = torch.full((6, 5, 6, 12, 20), 7.0, dtype=state_dtype)
    pool = problem.pool.clone()
    out = torch.full((1, 11, 6, 12), math.nan)
    problem.verify(pool, slots, bounds, buffer, rows, 4, out=out)
    assert torch.equal(pool, problem.pool)
    touched = torch.zeros(6, 5, dtype=torch.bool)
    for slot, row, begin, end in zip(slots, rows, bounds, bounds[1:], strict=False):
        if slot < 0:
            continue
        outputs, states = problem.expect(slot, begin, end)
        assert_close(out[0, begin:end], outputs, 1e-5)
        if row < 6:
            for step, state in enumerate(states):
                assert_close(buffer[row, step], state, TOLERANCE[state_dtype])
                touched[row, step] = True
    assert (buffer[~touched] == 7).all()


@pytest.mark.parametrize("with_buffer", [True, False])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_case_15_tree_starts_from_parents(state_dtype, with_buffer):
    problem = Problem(10, state_dtype=state_dtype)
    trees = [[-1, 0, 0, 1, 2], [99, 0, 1, 2, 3]]
    parents = torch.tensor(trees, dtype=torch.int32).repeat_interleave(2, 1)[:, ::2]
    buffer = torch.full((2, 5, 6, 12, 20), math.nan, dtype=state_dtype) if with_buffer else None
    out = problem.verify(problem.pool, [4, 1], [0, 5, 10], buffer, [1, 0], 5, retrieve_parent_token=parents)
    for request, (slot, tree) in enumerate(zip([4, 1], trees, strict=True)):
        for node in range(5):
            path = [node]
            while path[0]:
                path.insert(0, tree[path[0]])
            rows = [5 * request + at for at in path]
            outputs, states = recurrence(
                problem.pool[slot], problem.q[0, rows], problem.k[0, rows], problem.v[0, rows],
                problem.g[rows], problem.beta[rows],
            )  # fmt: skip
            assert_close(out[0, rows[-1]], outputs[-1], 1e-5)
            if with_buffer:
                assert_close(buffer[1 - request, node], states[-1], TOLERANCE[state_dtype])


def test_linear_parents_reproduce_the_chain_bit_for_bit():
    problem = Problem(4, state_dtype=torch.bfloat16)
    chain, tree = (torch.zeros(1, 4, 6, 12, 20, dtype=torch.bfloat16) for _ in range(2))
    expected = problem.verify(problem.pool, [2], [0, 4], chain, [0], 4)
    parents = torch.tensor([[0, 0, 1, 2]])
    assert torch.equal(problem.verify(problem.pool, [2], [0, 4], tree, [0], 4, retrieve_parent_token=parents), expected)
    assert torch.equal(chain, tree)


def test_parents_that_are_no_earlier_draft_count_as_the_root():
    problem = Problem(4)
    outs = [
        problem.verify(problem.pool, [2], [0, 4], None, None, 4, retrieve_parent_token=torch.tensor([parents]))
        for parents in ([0, 0, 0, 0], [5, 3, -7, 2**31 - 1])
    ]
    assert torch.equal(*outs)
    assert_close(outs[1][0, :2], problem.expect(2, 0, 2)[0], 1e-5)


@pytest.mark.parametrize("bounds", [[0, 3, 2, 4], [0, 2, 5], [-1, 2, 4]])
def test_case_60_bad_boundaries_are_refused_before_any_write(bounds):
    problem = Problem(4)
    pool = problem.pool.clone()
    with pytest.raises(InputError, match="query_start_loc"):
        problem.extend(pool, [0] * (len(bounds) - 1), bounds)
    assert torch.equal(pool, problem.pool)


def test_case_82_more_tokens_than_steps_is_refused():
    problem = Problem(6)
    buffer = torch.full((1, 4, 6, 12, 20), 7.0)
    with pytest.raises(InputError):
        problem.verify(problem.pool, [0], [0, 6], buffer, [0], 4)
    assert (buffer == 7).all()


def test_case_18_nothing_to_do():
    problem = Problem(0)
    none = torch.zeros(0, dtype=torch.int32)
    pool = problem.pool.clone()
    assert problem.decode(pool, none).shape == (1, 0, 6, 12)
    packed = packed_decode(
        problem.mixed_qkv(), problem.a, problem.b, **problem.gates, ssm_states=pool, cache_indices=none
    )
    assert packed.shape == (1, 0, 6, 12)
    result = problem.extend(pool, [], [0], return_chunk_states=True)
    assert result.output.shape == (1, 0, 6, 12)
    assert result.chunk_states.shape == (1, 0, 6, 12, 20)
    assert problem.verify(pool, [], [0], torch.zeros(0, 3, 6, 12, 20), [], 3).shape == (1, 0, 6, 12)
    assert torch.equal(pool, problem.pool)


def test_case_10_write_strength_is_never_rounded():
    one = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)
    b, low = torch.full((1, 1), 0.5, dtype=torch.bfloat16), torch.full((1, 1), -1000.0)
    gates = {"A_log": torch.zeros(1), "dt_bias": torch.zeros(1)}
    expected = pytest.approx(0.62245935 / (1 + 1e-6) ** 0.5, abs=1e-6)
    index, bounds = torch.tensor([0]), torch.tensor([0, 1])
    pools = [torch.zeros(1, 1, 1, 1) for _ in range(3)]
    decode(one, one, one, low, b, **gates, ssm_states=pools[0], cache_indices=index)
    packed_decode(torch.ones(1, 3, dtype=torch.bfloat16), low, b, **gates, ssm_states=pools[1], cache_indices=index)
    g, beta = gating(gates["A_log"], low, b, gates["dt_bias"])
    extend(one, one, one, g, beta, ssm_states=pools[2], cache_indices=index, query_start_loc=bounds)
    assert [pool.item() for pool in pools] == [expected] * 3
    buffer = torch.zeros(1, 1, 1, 1, 1)
    verify(
        gates["A_log"], gates["dt_bias"], one, one, one, low, b, ssm_states=torch.zeros(1, 1, 1, 1),
        cache_indices=index, query_start_loc=bounds, intermediate_states_buffer=buffer,
        intermediate_state_indices=index, cache_steps=1,
    )  # fmt: skip
    assert buffer.item() == expected
