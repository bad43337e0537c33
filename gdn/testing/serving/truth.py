"""One request as the formulas of `gdn.ops` say, in fp64, token by token, all layers at once. Knows of no pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gdn.config import GdnConfig
from gdn.serving.parameters import LayerParams
from gdn.testing.tensors import DTYPES

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """Random parameters: conv `[layers, dim, W]`, bias `[layers, dim]`, A_log and dt_bias `[layers, HV]`."""

    config: GdnConfig
    conv: Tensor
    bias: Tensor
    A_log: Tensor
    dt_bias: Tensor

    @classmethod
    def random(cls, config: GdnConfig, layers: int, generator: torch.Generator) -> Weights:
        def normal(*shape: int) -> Tensor:
            return torch.randn(layers, *shape, generator=generator)

        dim, heads, dtype = config.conv_dim, config.num_v_heads, DTYPES[config.activation_dtype]
        conv, bias = normal(dim, config.conv_kernel_size).to(dtype), normal(dim).to(dtype)
        return cls(config, conv, bias, normal(heads) - 1.0, normal(heads))

    def layers(self, device: str) -> list[LayerParams]:
        """The parameters as the serving layer takes them."""
        return [
            LayerParams(
                conv_weight=self.conv[index].to(device),
                bias=self.bias[index].to(device),
                A_log=self.A_log[index].to(device),
                dt_bias=self.dt_bias[index].to(device),
                layer_id=index,
            )
            for index in range(self.conv.shape[0])
        ]


@dataclass(frozen=True)
class Inputs:
    """What the layers' projections gave for T tokens: x `[layers, T, dim]`, a and b `[layers, T, HV]`."""

    x: Tensor
    a: Tensor
    b: Tensor

    @classmethod
    def random(cls, config: GdnConfig, layers: int, tokens: int, generator: torch.Generator) -> Inputs:
        """Normal values in the activation dtype."""
        widths, dtype = (config.conv_dim, config.num_v_heads, config.num_v_heads), DTYPES[config.activation_dtype]
        return cls(*(torch.randn(layers, tokens, width, generator=generator).to(dtype) for width in widths))

    @classmethod
    def cat(cls, parts: list[Inputs]) -> Inputs:
        return cls(*(torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("x", "a", "b")))

    def of_layer(self, index: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """x, a, b of one layer, on a device."""
        return self.x[index].to(device), self.a[index].to(device), self.b[index].to(device)

    def rows(self, rows: list[int] | slice) -> Inputs:
        return Inputs(self.x[:, rows], self.a[:, rows], self.b[:, rows])


@dataclass(frozen=True)
class Truth:
    """Where a request stands after `position` tokens: window `[layers, dim, W-1]`, state `[layers, HV, V, K]`, fp64."""

    weights: Weights
    window: Tensor
    state: Tensor
    position: int = 0

    @classmethod
    def fresh(cls, weights: Weights) -> Truth:
        config, layers = weights.config, weights.conv.shape[0]
        window = torch.zeros(layers, config.conv_dim, config.conv_kernel_size - 1, dtype=torch.float64)
        state = torch.zeros(layers, config.num_v_heads, config.head_v_dim, config.head_k_dim, dtype=torch.float64)
        return cls(weights, window, state)

    def after(self, inputs: Inputs) -> tuple[Truth, Tensor]:
        """The request after more tokens, and their outputs `[layers, T, HV, V]`."""
        config, tokens, history = self.weights.config, inputs.x.shape[1], self.window.shape[2]
        stream = torch.cat((self.window, inputs.x.double().transpose(1, 2)), dim=2)
        y = self.weights.bias.double().unsqueeze(2).expand(-1, -1, tokens)
        for tap in range(history + 1):
            y = y + self.weights.conv[:, :, tap, None].double() * stream[:, :, tap : tap + tokens]
        y = (y * torch.sigmoid(y)).transpose(1, 2)
        keys = config.num_k_heads * config.head_k_dim
        q, k = (self._unit(part) for part in (y[..., :keys], y[..., keys : 2 * keys]))
        v = y[..., 2 * keys :].unflatten(-1, (config.num_v_heads, config.head_v_dim))
        rate = torch.nn.functional.softplus(inputs.a.double() + self.weights.dt_bias.double().unsqueeze(1))
        alpha = torch.exp(-torch.exp(self.weights.A_log.double()).unsqueeze(1) * rate)
        beta = torch.sigmoid(inputs.b.double())
        state, outputs = self.state, []
        for t in range(tokens):
            state = state * alpha[:, t, :, None, None]
            error = beta[:, t, :, None] * (v[:, t] - (state @ k[:, t].unsqueeze(-1)).squeeze(-1))
            state = state + error.unsqueeze(-1) * k[:, t].unsqueeze(-2)
            outputs.append((state @ q[:, t].unsqueeze(-1)).squeeze(-1) * config.head_k_dim**-0.5)
        output = torch.stack(outputs, dim=1) if outputs else v
        return Truth(self.weights, stream[:, :, tokens:], state, self.position + tokens), output

    def _unit(self, x: Tensor) -> Tensor:
        """`[layers, T, HV, K]`, of length 1, one for each value head."""
        config = self.weights.config
        x = x.unflatten(-1, (config.num_k_heads, config.head_k_dim))
        x = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return x.repeat_interleave(config.head_ratio, dim=2)
