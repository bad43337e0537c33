"""Draft trees of the convolution: parents from child and sibling links, ancestors as columns of the window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def draft_parents(next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """Parent of every draft, int64 `[B, D]`: that of a first child is the draft that links it, that of a sibling its
    sibling's. The root's is 0, as is that of drafts no link reaches; links that don't point forward are ignored.
    """
    requests, drafts = next_token.shape
    nowhere = drafts
    parents = torch.zeros((requests, drafts + 1), dtype=torch.int64, device=next_token.device)
    for draft in range(drafts):
        own = torch.full((requests, 1), draft, dtype=torch.int64, device=next_token.device)
        for links, parent in ((next_token, own), (next_sibling, parents[:, draft : draft + 1].clone())):
            link = links[:, draft : draft + 1].to(torch.int64)
            target = torch.where((link > draft) & (link < drafts), link, nowhere)
            parents.scatter_(1, target, parent)
    return parents[:, :drafts]


def ancestor_columns(parents: Tensor, width: int) -> Tensor:
    """Column of `[W-1 state columns | D drafts]` that each tap of each draft reads, int64 `[W, B, D]`, oldest first.

    Past the root the columns of the state follow, newest first.
    """
    requests, drafts = parents.shape
    history = width - 1
    columns = torch.arange(history + drafts, device=parents.device).expand(requests, -1)
    previous = columns - 1
    previous[:, history + 1 :] = history + parents[:, 1:]
    taps = [columns[:, history:]]
    for _ in range(history):
        taps.append(previous.gather(1, taps[-1]))
    return torch.stack(taps[::-1])
