"""hypothesis strategies: configs, and cases of every operation."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from gdn.config import GdnConfig
from gdn.testing.case import Case
from gdn.testing.case import Heads
from gdn.types import Operation

_DTYPES = st.sampled_from(("float32", "float16", "bfloat16"))


@st.composite
def any_config(draw: Any) -> GdnConfig:
    """Configs far beyond what any backend serves."""
    key_heads = draw(st.integers(1, 64))
    return GdnConfig(
        num_k_heads=key_heads,
        num_v_heads=key_heads * draw(st.integers(1, 24)),
        head_k_dim=draw(st.integers(1, 600)),
        head_v_dim=draw(st.integers(1, 600)),
        conv_kernel_size=draw(st.integers(1, 12)),
        activation_dtype=draw(_DTYPES),
        state_dtype=draw(st.one_of(_DTYPES, st.just("auto"))),
        max_draft_tokens=(drafts := draw(st.integers(0, 64))),
        tree_drafts=bool(drafts) and draw(st.booleans()),
        replay_window=draw(st.integers(0, 64)),
        strided_state=draw(st.booleans()),
        state_checkpoints=draw(st.booleans()),
        deterministic=draw(st.booleans()),
        cuda_graph=draw(st.booleans()),
    )


@st.composite
def any_case(draw: Any, operation: Operation, dims: tuple[int, ...] = (32, 48, 64)) -> Case:
    """Cases of one operation: ragged and empty sequences, padding anywhere, views, gaps, every option."""
    long = operation in ("extend", "conv_extend")
    lengths = tuple(draw(st.lists(st.integers(0, 140 if long else 7), max_size=5)))
    count = len(lengths)
    pool = draw(st.integers(1, count + 3))
    pool_slots = pool + (count if operation == "extend" else 0)
    real = draw(st.permutations(range(pool)))[:count]
    rows = [*real, *[-1] * (count - len(real))]
    slots = tuple(draw(st.sampled_from((slot, slot, slot, -1, pool_slots))) for slot in rows)
    key_heads = draw(st.integers(1, 2))
    ring = draw(st.integers(1, 5))
    snapshots = tuple(draw(st.integers(-1, -(-length // 64))) for length in lengths)
    return Case(
        name="drawn",
        heads=Heads(
            key_heads, key_heads * draw(st.integers(1, 3)), draw(st.sampled_from(dims)), draw(st.sampled_from(dims))
        ),
        lengths=lengths,
        slots=slots,
        pool_slots=pool_slots,
        index=draw(st.sampled_from(("int32", "int64"))),
        views=draw(st.booleans()),
        slot_gap=draw(st.sampled_from((0, 24))),
        tail=draw(st.integers(0, 3)),
        gates=draw(st.sampled_from(("usual", "none", "slow", "strong"))),
        scale=draw(st.sampled_from((None, 0.5))),
        out=draw(st.booleans()),
        drafts=draw(st.integers(1, 7)),
        buffer=draw(st.booleans()),
        tree=operation == "conv_update" and draw(st.booleans()),
        chunk_states=draw(st.booleans()),
        snapshots=draw(st.sampled_from((None, snapshots))),
        ring=ring,
        cursors=tuple(draw(st.integers(0, ring - 1)) for _ in lengths),
        width=draw(st.integers(2, 8)),
        bias=draw(st.booleans()),
        act=draw(st.sampled_from(("silu", "swish", None))),
        history=draw(st.sampled_from(("all", "none", "mixed"))),
    )  # fmt: skip
