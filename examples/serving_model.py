"""A Qwen3-Next model from transformers as a server runs it: packed tokens of many requests, states in a gdn pool.

Projections, norms and experts are the model's own modules. Gated DeltaNet layers go through `gdn.GdnAttention`; the
other attention layers keep keys and values of each request in one plain tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb

import gdn


@dataclass(eq=False)
class Request:
    """Prompt and generated tokens; `computed` of them have gone through the layers."""

    tokens: list[int]
    prompt_length: int
    slot: int = -1
    computed: int = 0
    cache: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values `[heads, positions, head_dim]`, by layer."""


class ServedModel:
    """The model's layers over a `gdn.StatePool`.

    Args:
        model: a `Qwen3NextForCausalLM`.
        slots: requests at a time.
        drafts: tokens per request of a verify step.
        max_length: most tokens of a request, drafts included.
    """

    def __init__(self, model: Any, *, slots: int, drafts: int, max_length: int) -> None:
        self.model = model
        self.max_length = max_length
        self.device, dtype = model.lm_head.weight.device, model.lm_head.weight.dtype
        config = gdn.GdnConfig.from_hf(
            model.config, activation_dtype=dtype, state_dtype="float32", max_draft_tokens=drafts
        )  # fmt: skip
        self.triple = gdn.resolve(config, device=str(self.device))
        layers = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]
        self.pool = gdn.StatePool(
            config, slots, self.device, num_layers=len(layers), max_requests=slots, contract=self.triple.state
        )  # fmt: skip
        self.attention = gdn.GdnAttention(self.triple, self.pool)
        self.parameters = {
            layer: gdn.LayerParams(
                conv_weight=layer.conv1d.weight,
                A_log=layer.A_log,
                dt_bias=layer.dt_bias,
                activation=layer.activation,
                layer_id=index,
            )
            for index, layer in enumerate(layers)
        }

    def batch(self, requests: Sequence[Request], counts: Sequence[int]) -> gdn.Batch:
        """The plan of a step in which each request brings so many tokens."""
        offsets = torch.tensor([0, *counts]).cumsum(0)
        return gdn.Batch(
            slots=self._tensor([request.slot for request in requests]),
            query_start_loc=self._tensor(offsets.tolist()),
            has_initial_state=torch.tensor([request.computed > 0 for request in requests], device=self.device),
            seq_lens_cpu=list(counts),
        )

    @torch.no_grad()
    def forward(
        self, kind: str, batch: gdn.Batch, requests: Sequence[Request], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """The most likely next token after every token given, `[T]`. `kind`: "extend", "decode" or "verify"."""
        spans = [(request, request.computed, len(new)) for request, new in zip(requests, tokens, strict=True)]
        positions = torch.cat([torch.arange(begin, begin + count) for _, begin, count in spans]).to(self.device)
        body = self.model.model
        hidden = body.embed_tokens(torch.tensor([token for new in tokens for token in new], device=self.device))
        rotation = body.rotary_emb(hidden[None], positions[None])
        for index, layer in enumerate(body.layers):
            normed = layer.input_layernorm(hidden)
            if hasattr(layer, "linear_attn"):
                hidden = hidden + self._linear(kind, layer.linear_attn, batch, normed)
            else:
                hidden = hidden + self._full(index, layer.self_attn, spans, normed, rotation)
            update = layer.mlp(layer.post_attention_layernorm(hidden)[None])
            hidden = hidden + (update[0] if isinstance(update, tuple) else update).view_as(hidden)
        return self.model.lm_head(body.norm(hidden)).argmax(-1)

    def _linear(self, kind: str, layer: Any, batch: gdn.Batch, hidden: Tensor) -> Tensor:
        parts = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden[None]), layer.in_proj_ba(hidden[None]))
        query, key, value, z, b, a = (part[0] for part in parts)
        mixed_qkv = torch.cat([part.flatten(1) for part in (query, key, value)], dim=-1)
        forward = getattr(self.attention, f"forward_{kind}")
        out = forward(self.parameters[layer], batch, mixed_qkv, a.contiguous(), b.contiguous())
        return layer.out_proj(layer.norm(out[0].flatten(0, 1), z.flatten(0, 1)).view(hidden.shape[0], -1))

    def _full(self, index: int, layer: Any, spans: Any, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        shape = (hidden.shape[0], -1, layer.head_dim)
        query, gate = layer.q_proj(hidden).view(shape[0], -1, 2 * layer.head_dim).chunk(2, dim=-1)
        heads = layer.q_norm(query), layer.k_norm(layer.k_proj(hidden).view(shape)), layer.v_proj(hidden).view(shape)
        query, key, value = (part.transpose(0, 1)[None] for part in heads)
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        outputs, first = [], 0
        for request, begin, count in spans:
            rows, end = slice(first, first + count), begin + count
            keys, values = self._cache(request, index, key)
            keys[:, begin:end], values[:, begin:end] = key[0, :, rows], value[0, :, rows]
            mask = torch.ones(count, end, dtype=torch.bool, device=self.device).tril(begin)
            outputs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    query[:, :, rows], keys[None, :, :end], values[None, :, :end], mask, scale=layer.scaling,
                    enable_gqa=True,
                )
            )  # fmt: skip
            first += count
        attended = torch.cat(outputs, dim=2)[0].transpose(0, 1).flatten(1)
        return layer.o_proj(attended * torch.sigmoid(gate.flatten(1)))

    def _cache(self, request: Request, index: int, key: Tensor) -> tuple[Tensor, Tensor]:
        if index not in request.cache:
            shape = (key.shape[1], self.max_length, key.shape[3])
            request.cache[index] = key.new_empty(shape), key.new_empty(shape)
        return request.cache[index]

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
