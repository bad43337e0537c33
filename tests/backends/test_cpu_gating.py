"""Gating and QKV split of the cpu backend."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from gdn.backends.cpu.gating import gating
from gdn.backends.cpu.split import factory as split_factory
from gdn.config import GdnConfig

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def decay(A_log, x):
    """g of one head."""
    g, _ = gating(torch.tensor([A_log]), torch.tensor([[x]]), torch.zeros(1, 1), torch.zeros(1))
    return g.item()


@pytest.mark.parametrize("parameter_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_gating_in_every_mix_of_dtypes(dtype, parameter_dtype):
    torch.manual_seed(0)
    wide = torch.randn(50, 21).to(dtype)
    a, b = wide[:, 3:10], wide[:, 1:15:2]
    A_log, dt_bias = torch.randn(7).to(parameter_dtype), torch.randn(7).to(parameter_dtype)
    g, beta = gating(A_log, a, b, dt_bias)
    assert g.shape == beta.shape == (1, 50, 7)
    assert g.dtype == beta.dtype == torch.float32
    expected = -A_log.double().exp() * torch.nn.functional.softplus(a.double() + dt_bias.double())
    torch.testing.assert_close(g[0].double(), expected, rtol=2e-7, atol=0)
    torch.testing.assert_close(beta[0].double(), b.double().sigmoid(), rtol=4e-7, atol=0)


def test_case_50_raw_A_log():
    assert decay(2.046875, 0.0) == pytest.approx(-5.3675, rel=1e-4)


@pytest.mark.parametrize(("x", "expected"), [(100.0, -0.1), (200.0, -0.2), (math.inf, None)])
def test_case_51_linear_softplus(x, expected):
    g = decay(math.log(0.001), x)
    assert g == pytest.approx(expected, rel=1e-6) if expected is not None else g < -1e38


@pytest.mark.parametrize(
    ("A_log", "x", "expected"),
    [(0.0, -100.0, -3.72e-44), (89.0, -100.0, -1.67017e-5), (89.0, -110.0, -7.5826e-10), (100.0, -200.0, -3.72e-44)],
)
def test_case_51_extremes_in_log_space(A_log, x, expected):
    assert decay(A_log, x) == pytest.approx(expected, rel=1e-2)


def test_case_51_never_nan_and_never_positive():
    values = torch.tensor([-3e38, -1e4, -100.0, 0.0, 20.0, 100.0, 1e4, 3e38])
    g, beta = gating(values, values[:, None].expand(8, 8), values[:, None].expand(8, 8), torch.zeros(8))
    assert g.isfinite().all()
    assert (g <= 0).all()
    assert beta[0, 0, 0] == 0
    assert beta[0, -1, 0] == 1


def test_case_51_continuous_at_the_threshold():
    assert decay(0.0, 20.001) - decay(0.0, 19.999) == pytest.approx(-0.002, abs=4e-6)


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("layout", ["rows", "transposed", "wide"])
def test_split_gives_contiguous_copies(tokens, layout):
    config = GdnConfig(num_k_heads=2, num_v_heads=6, head_k_dim=5, head_v_dim=3)
    values = torch.arange(tokens * config.conv_dim, dtype=torch.float32).view(tokens, config.conv_dim)
    mixed = values.clone()
    if layout == "transposed":
        mixed = values.t().contiguous().t()
    elif layout == "wide":
        mixed = torch.cat((values, values), 1)[:, : config.conv_dim]
    q, k, v = split_factory(SimpleNamespace(config=config))(mixed)
    assert q.shape == k.shape == (1, tokens, 2, 5)
    assert v.shape == (1, tokens, 6, 3)
    assert torch.equal(torch.cat([part[0].flatten(1) for part in (q, k, v)], 1), values)
    assert all(part.is_contiguous() for part in (q, k, v))
    mixed.fill_(-1.0)
    assert all((part >= 0).all() for part in (q, k, v))
