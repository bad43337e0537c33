"""Convolution, gating and split kernels in Triton's interpreter, against the cpu backend. Set TRITON_INTERPRET=1."""

from __future__ import annotations

import itertools
import math
import os
import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, set before triton is imported", allow_module_level=True)

from gdn.backends.cpu import conv as cpu_conv
from gdn.backends.cpu import gating as cpu_gating
from gdn.backends.cpu import split as cpu_split
from gdn.backends.triton import conv
from gdn.backends.triton import gating
from gdn.backends.triton import split
from gdn.config import GdnConfig
from gdn.errors import InputError

pytestmark = pytest.mark.interpret

FLOATS = (torch.float32, torch.float16)
INDICES = (torch.int32, torch.int64)
COUNTING = torch.tensor([[1000.0, 100.0, 10.0, 1.0]])
conv_extend = conv.extend_factory(None)
conv_update = conv.update_factory(None)


def tolerance(dtype):
    return {"atol": 2e-3, "rtol": 2e-3} if dtype == torch.float16 else {"atol": 2e-6, "rtol": 2e-6}


def spread(values, axis_steps):
    """The same values in a view whose axes step over gaps of 99."""
    shape = [size * step for size, step in zip(values.shape, axis_steps, strict=True)]
    storage = torch.full(shape, 99, dtype=values.dtype)
    view = storage[tuple(slice(None, None, step) for step in axis_steps)]
    view.copy_(values)
    return view


def indices(values, dtype, rng):
    """An index tensor, sometimes strided, sometimes a slice that isn't aligned to 16 bytes."""
    tensor = torch.tensor(values, dtype=dtype)
    choice = rng.randrange(3)
    if choice == 0:
        return tensor
    if choice == 1:
        return spread(tensor, [2] * tensor.dim())
    return torch.cat((torch.zeros(1, dtype=dtype), tensor.flatten()))[1:].view(tensor.shape)


def make_pool(rng, slots, dim, columns, dtype):
    """A pool of one of three layouts, with spare columns."""
    values = torch.randn(slots, dim, columns).to(dtype)
    layout = rng.randrange(3)
    if layout == 0:
        return values
    if layout == 1:
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    return spread(values, (2, 1, 1))


def copy_of(pool):
    """A copy with the same strides."""
    storage = pool.as_strided((pool.untyped_storage().size() // pool.element_size(),), (1,), 0).clone()
    return storage.as_strided(pool.shape, pool.stride(), pool.storage_offset())


def everything(pool):
    return pool.as_strided((pool.untyped_storage().size() // pool.element_size(),), (1,), 0)


def close_with_nans(got, expected, dtype):
    torch.testing.assert_close(got, expected, equal_nan=True, **tolerance(dtype))


@pytest.mark.parametrize("seed", range(40))
def test_extend_random(seed, monkeypatch):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(conv, "EXTEND_TILE", conv.Tile(rng.choice([1, 4, 16]), 16, 4))
    dtype, state_dtype, weight_dtype = (rng.choice(FLOATS) for _ in range(3))
    dim, width, sequences = rng.choice([1, 5, 16, 37]), rng.choice([1, 2, 3, 4, 5, 8]), rng.randrange(6)
    first, tail = rng.choice([0, 0, 3]), rng.choice([0, 0, 6])
    bounds = list(itertools.accumulate((rng.randrange(10) for _ in range(sequences)), initial=first))
    tokens = bounds[-1] + tail
    x = torch.randn(tokens, dim).to(dtype)
    x = [x.t(), x.t().contiguous(), spread(x, (1, 2)).t(), spread(x, (2, 1)).t()][rng.randrange(4)]
    slot_count = sequences + 3
    slots = rng.sample(range(slot_count), sequences)
    slots = [rng.choice([-1, -7, slot_count, 2**30]) if rng.random() < 0.2 else slot for slot in slots]
    flags = [rng.random() < 0.6 for _ in slots]
    pool = make_pool(rng, slot_count, dim, width - 1 + rng.choice([0, 2]), state_dtype)
    for (begin, end), slot, flag in zip(itertools.pairwise(bounds), slots, flags, strict=True):
        if not 0 <= slot < slot_count:
            x[:, begin:end] = math.nan
        elif not flag:
            pool[slot] = math.nan
    x[:, : bounds[0]] = math.nan
    x[:, bounds[-1] :] = math.nan
    weight = torch.randn(dim, width).to(weight_dtype)
    weight = spread(weight, (1, 2)) if rng.random() < 0.3 else weight
    bias = torch.randn(dim).to(dtype) if rng.random() < 0.6 else None
    index_dtype = rng.choice(INDICES)
    options = {
        "query_start_loc": indices(bounds, rng.choice(INDICES), rng),
        "cache_indices": indices(slots, index_dtype, rng),
        "has_initial_state": spread(torch.tensor(flags, dtype=torch.bool), (2,)),
        "activation": rng.choice(["silu", "swish", None]),
    }
    expected_pool = copy_of(pool)
    expected = cpu_conv.conv_extend(x, weight, bias, conv_states=expected_pool, **options)
    got = conv_extend(x, weight, bias, conv_states=pool, **options)
    assert got.stride() == expected.stride()
    close_with_nans(got, expected, dtype)
    assert torch.equal(everything(pool).view(torch.int8), everything(expected_pool).view(torch.int8))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4])
def test_extend_split_anywhere_gives_the_same(length):
    x = torch.tensor([[4.0, 5.0, 6.0, 7.0]])[:, :length]
    digits = [1, 2, 3, 4, 5, 6, 7][: 3 + length]
    for at in range(length + 1):
        pool = torch.tensor([[[1.0, 2.0, 3.0]]])
        parts = [
            conv_extend(
                part, COUNTING, None, conv_states=pool, query_start_loc=torch.tensor([0, part.shape[1]]),
                cache_indices=torch.tensor([0]), has_initial_state=None, activation=None,
            )
            for part in (x[:, :at], x[:, at:])
        ]  # fmt: skip
        assert torch.cat(parts, 1).tolist() == [[float("".join(map(str, digits[t : t + 4]))) for t in range(length)]]
        assert pool.flatten().tolist() == digits[-3:]


def random_links(rng, drafts):
    """Links of a random tree, or values of any sort."""
    if rng.random() < 0.3:
        return [[rng.randrange(-2, drafts + 2) for _ in range(drafts)] for _ in range(2)]
    parents = [0] + [rng.randrange(node) for node in range(1, drafts)]
    child, sibling = [-1] * drafts, [-1] * drafts
    for parent in range(drafts):
        children = [node for node in range(1, drafts) if parents[node] == parent]
        if children:
            child[parent] = children[0]
        for before, after in itertools.pairwise(children):
            sibling[before] = after
    return [child, sibling]


@pytest.mark.parametrize("mode", ["plain", "chain", "tree"])
@pytest.mark.parametrize("seed", range(30))
def test_update_random(seed, mode, monkeypatch):
    rng = random.Random(1000 + seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(conv, "DRAFT_TILE", conv.Tile(rng.choice([1, 4, 8]), 16, 4))
    monkeypatch.setattr(conv, "STEP_TILES", ((None, conv.Tile(rng.choice([1, 4]), 16, 4)),))
    update = conv.update_factory(None)
    dtype, state_dtype, window_dtype = (rng.choice(FLOATS) for _ in range(3))
    dim, width, requests = rng.choice([1, 5, 16, 37]), rng.choice([1, 2, 3, 4, 5, 8]), rng.randrange(6)
    drafts = 1 if mode == "plain" else rng.randrange(1, 10)
    x = torch.randn(requests, drafts, dim).to(dtype)
    x = [x.transpose(1, 2), x.transpose(1, 2).contiguous(), spread(x, (1, 2, 1)).transpose(1, 2)][rng.randrange(3)]
    slot_count = requests + 2
    slots = rng.sample(range(slot_count), requests)
    slots = [rng.choice([-1, slot_count, 2**30]) if rng.random() < 0.2 else slot for slot in slots]
    no_slots = rng.random() < 0.2
    if no_slots:
        slot_count = max(1, slot_count - 4)
        slots = list(range(requests))
    for row, slot in enumerate(slots):
        if not 0 <= slot < slot_count:
            x[row] = math.nan
    pool = make_pool(rng, slot_count, dim, width - 1 + rng.choice([0, 2]), state_dtype)
    expected_pool = copy_of(pool)
    weight, bias = torch.randn(dim, width), torch.randn(dim).to(dtype) if rng.random() < 0.6 else None

    options = {
        "activation": rng.choice(["silu", "swish", None]),
        "conv_state_indices": None if no_slots else indices(slots, rng.choice(INDICES), rng),
    }
    outputs = {}
    if rng.random() < 0.7:
        rows = requests + 1
        outputs["intermediate_conv_window"] = torch.full((rows, drafts + 1, dim, width - 1), 7.0, dtype=window_dtype)
        if rng.random() < 0.5 and width > 1 and mode != "tree":
            span = drafts + width - 1
            storage = torch.full((rows * dim * span,), 7.0, dtype=window_dtype)
            outputs["intermediate_conv_window"] = storage.as_strided(
                (rows, drafts, dim, width - 1), (dim * span, 1, span, 1)
            )
        if rng.random() < 0.8:
            kept = [rng.choice([-1, rows]) if rng.random() < 0.2 else row for row in rng.sample(range(rows), requests)]
            options["intermediate_state_indices"] = indices(kept, rng.choice(INDICES), rng)
    if mode == "tree":
        links = [random_links(rng, drafts) for _ in range(requests)]
        for side, name in enumerate(("retrieve_next_token", "retrieve_next_sibling")):
            values = torch.tensor([link[side] for link in links]).view(requests, drafts)
            options[name] = values.to(rng.choice(INDICES))
        if rng.random() < 0.8:
            parents = torch.full((requests, drafts), 77, dtype=rng.choice(INDICES))
            outputs["retrieve_parent_token"] = spread(parents, (1, 2)) if rng.random() < 0.5 else parents
    if drafts == 1 and rng.random() < 0.5:
        x = x[..., 0]
    expected_outputs = {name: copy_of(value) for name, value in outputs.items()}
    expected = cpu_conv.conv_update(x, expected_pool, weight, bias, **options, **expected_outputs)
    got = update(x, pool, weight, bias, **options, **outputs)
    assert got.stride() == expected.stride()
    close_with_nans(got, expected, dtype)
    assert torch.equal(everything(pool), everything(expected_pool))
    for name, value in outputs.items():
        assert torch.equal(everything(value), everything(expected_outputs[name])), name


def test_step_chain_linear_tree_and_prompt_give_the_same_bits():
    torch.manual_seed(0)
    dim, drafts = 24, 6
    x, weight, bias = torch.randn(1, dim, drafts), torch.randn(dim, 4), torch.randn(dim)
    pool = torch.randn(1, dim, 3)
    pools = [pool.clone() for _ in range(3)]
    links = torch.tensor([[1, 2, 3, 4, 5, -1]])
    tree = conv_update(
        x, pool, weight, bias, retrieve_next_token=links, retrieve_next_sibling=torch.full_like(links, -1)
    )
    chain = conv_update(x, pools[0], weight, bias)
    steps = torch.stack([conv_update(x[..., t], pools[1], weight, bias) for t in range(drafts)], -1)
    prompt = conv_extend(
        x[0], weight, bias, conv_states=pools[2], query_start_loc=torch.tensor([0, drafts]),
        cache_indices=torch.tensor([0]), has_initial_state=None,
    )  # fmt: skip
    assert torch.equal(tree, chain)
    assert torch.equal(steps, chain)
    assert torch.equal(prompt, chain[0])
    assert all(torch.equal(state[0], x[0, :, -3:]) for state in pools)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tokens", "heads"), [(0, 3), (1, 1), (9, 3), (50, 48), (3, 200)])
def test_gating(tokens, heads, dtype):
    torch.manual_seed(0)
    wide = (torch.randn(tokens, 3 * heads) * 10).to(dtype)
    a, b = wide[:, heads : 2 * heads], wide[:, : 2 * heads : 2]
    A_log, dt_bias = spread(torch.randn(heads), (2,)), torch.randn(heads).to(dtype)
    g, beta = gating.factory(None)(A_log, a, b, dt_bias)
    expected_g, expected_beta = cpu_gating.gating(A_log, a, b, dt_bias)
    assert g.dtype == beta.dtype == torch.float32
    torch.testing.assert_close(g, expected_g, rtol=4e-6, atol=1e-37)
    torch.testing.assert_close(beta, expected_beta, rtol=2e-6, atol=1e-37)


@pytest.mark.filterwarnings("ignore:(overflow|divide|underflow|invalid):RuntimeWarning")
def test_gating_extremes_are_finite():
    rates = torch.tensor([-3e38, -200.0, -88.0, -20.0, 0.0, 20.0, 80.0, 89.0, 100.0, 170.0, 200.0, 3e38, -math.inf])
    inputs = torch.tensor([-3e38, -200.0, -110.0, -100.0, -87.0, -17.1, -16.9, -1.0, 0.0, 19.9, 20.1, 200.0, 3e38])
    a = inputs[:, None].expand(-1, len(rates))
    run = gating.factory(None)
    expected_g, expected_beta = cpu_gating.gating(rates, a, a, torch.zeros(len(rates)))
    for shift in (0.0, 3e38, -3e38):
        g, beta = run(rates, a, a, torch.full((len(rates),), shift))
        assert g.isfinite().all()
        assert (g <= 0).all()
        torch.testing.assert_close(beta, expected_beta, rtol=2e-6, atol=1e-37)
        if shift == 0.0:
            ordinary = (expected_g.abs() > 1e-37) & (expected_g.abs() < 3e38)
            torch.testing.assert_close(g[ordinary], expected_g[ordinary], rtol=2e-5, atol=0)
    spot = run(torch.tensor([89.0, 100.0]), torch.tensor([[-100.0, -110.0]]), torch.zeros(1, 2), torch.zeros(2))[0]
    assert spot.flatten().tolist() == pytest.approx([-1.67017e-5, -4.53999e-5], rel=1e-4)


def test_gating_does_not_hide_nan():
    nan = torch.tensor([[math.nan, 0.0]])
    g, beta = gating.factory(None)(torch.zeros(2), nan, nan, torch.zeros(2))
    assert g.isnan().tolist() == beta.isnan().tolist() == [[[True, False]]]


@pytest.mark.parametrize("tokens", [0, 1, 19])
@pytest.mark.parametrize("layout", ["rows", "transposed", "wide"])
@pytest.mark.parametrize("heads", [(2, 6, 5, 3), (1, 1, 16, 32), (3, 3, 200, 70)])
def test_split(tokens, layout, heads, monkeypatch):
    monkeypatch.setattr(split, "BLOCK_COLUMNS", 64)
    key_heads, value_heads, key_dim, value_dim = heads
    config = GdnConfig(num_k_heads=key_heads, num_v_heads=value_heads, head_k_dim=key_dim, head_v_dim=value_dim)
    mixed = torch.randn(tokens, config.conv_dim)
    if layout == "transposed":
        mixed = mixed.t().contiguous().t()
    elif layout == "wide":
        mixed = torch.cat((mixed, mixed), 1)[:, : config.conv_dim]
    context = SimpleNamespace(config=config)
    for got, expected in zip(split.factory(context)(mixed), cpu_split.factory(context)(mixed), strict=True):
        assert got.shape == expected.shape
        assert got.is_contiguous()
        assert torch.equal(got, expected)


def test_bad_arguments_are_refused():
    pool = torch.ones(2, 3, 3)
    with pytest.raises(InputError, match="weight"):
        conv_update(torch.zeros(1, 3), pool, torch.zeros(4, 4))
    with pytest.raises(InputError, match="seq_lens_cpu"):
        conv_extend(
            torch.zeros(3, 2), torch.zeros(3, 4), None, conv_states=pool, query_start_loc=torch.tensor([0, 2]),
            cache_indices=torch.tensor([0]), has_initial_state=None, seq_lens_cpu=[1, 1],
        )  # fmt: skip
    assert (pool == 1).all()
