"""The causal depthwise convolution over sequences, chains of drafts and trees of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def activated(y: Tensor, activation: str | None) -> Tensor:
    return y if activation is None else y * torch.sigmoid(y)


def conv_extend(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, conv_states: Tensor, query_start_loc: Tensor,
    cache_indices: Tensor, has_initial_state: Tensor | None, activation: str | None = "silu",
    seq_lens_cpu: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """See `gdn.ops.ConvExtend`. Inputs count as rounded to the state's dtype only once they are stored there."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    offsets = query_start_loc.tolist()
    history = weight.shape[1] - 1
    for sequence, slot in enumerate(cache_indices.tolist()):
        begin, end = offsets[sequence], offsets[sequence + 1]
        if not 0 <= slot < conv_states.shape[0] or begin == end:
            continue
        known = has_initial_state is None or bool(has_initial_state[sequence])
        stored = conv_states[slot, :, :history].double()
        window = torch.cat((stored if known else torch.zeros_like(stored), x[:, begin:end].double()), dim=1)
        for token in range(end - begin):
            out[:, begin + token] = _step(window[:, token : token + history + 1], weight, bias, activation)
        conv_states[slot, :, :history] = window[:, window.shape[1] - history :]
    return out


def conv_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = "silu",
    conv_state_indices: Tensor | None = None, intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None, retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None, retrieve_parent_token: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `gdn.ops.ConvUpdate`."""
    steps = (x.unsqueeze(2) if x.dim() == 2 else x).double()
    out = torch.zeros(steps.shape, dtype=torch.float64)
    history, drafts = weight.shape[1] - 1, steps.shape[2]
    for request in range(steps.shape[0]):
        slot = request if conv_state_indices is None else int(conv_state_indices[request])
        if not 0 <= slot < conv_state.shape[0]:
            continue
        tree = retrieve_next_token is not None and retrieve_next_sibling is not None
        if tree:
            assert retrieve_next_token is not None
            assert retrieve_next_sibling is not None
            parents = parents_of(retrieve_next_token[request].tolist(), retrieve_next_sibling[request].tolist())
        else:
            parents = list(range(-1, drafts - 1))
        row = request if intermediate_state_indices is None else int(intermediate_state_indices[request])
        stored = conv_state[slot, :, :history].double()
        newest = stored
        for draft in range(drafts):
            window = _window(stored, steps[request], parents, draft)
            out[request, :, draft] = _step(window, weight, bias, activation)
            newest = window[:, 1:]
            if intermediate_conv_window is not None and 0 <= row < intermediate_conv_window.shape[0]:
                intermediate_conv_window[row, draft] = newest
        if not tree:
            conv_state[slot, :, :history] = newest
        elif retrieve_parent_token is not None:
            retrieve_parent_token[request] = torch.tensor([0, *parents[1:]])
    return out.reshape(x.shape)


def parents_of(next_token: list[int], next_sibling: list[int]) -> list[int]:
    """Parent of each draft, -1 for the root: found from the links of earlier drafts; drafts no link names get 0."""
    parents = [-1] + [0] * (len(next_token) - 1)
    for draft, (child, sibling) in enumerate(zip(next_token, next_sibling, strict=True)):
        if draft < child < len(parents):
            parents[child] = draft
        if draft < sibling < len(parents):
            parents[sibling] = max(parents[draft], 0)
    return parents


def _window(stored: Tensor, steps: Tensor, parents: list[int], draft: int) -> Tensor:
    """The last W inputs on the path that ends with `draft`, oldest first."""
    path = []
    while draft >= 0:
        path.append(steps[:, draft])
        draft = parents[draft]
    inputs = torch.cat((stored, torch.stack(path[::-1], dim=1)), dim=1)
    return inputs[:, inputs.shape[1] - stored.shape[1] - 1 :]


def _step(window: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    y = (window * weight.double()).sum(1)
    return activated(y if bias is None else y + bias.double(), activation)
