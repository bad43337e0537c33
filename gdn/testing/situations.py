"""The awkward situations that every operation must get right, as named cases."""

from __future__ import annotations

from typing import Final

from gdn.testing.case import Case
from gdn.testing.case import Heads

_PLAIN: Final = Case()
_DRAFTS: Final = (4, 1, 0, 3, 4)

_RECURRENT: Final = (
    _PLAIN,
    _PLAIN.but("padded", slots=(2, -1, 0, 9, 5), lengths=(1,) * 5, pool_slots=6),
    _PLAIN.but("wide-indices", slots=(2, -7, 2**31 - 1, 0), lengths=(1,) * 4, pool_slots=3, index="int64"),
    _PLAIN.but("pool-smaller-than-batch", slots=(-1, 0, -1, 1), lengths=(1,) * 4, pool_slots=2),
    _PLAIN.but("views", views=True, slot_gap=24, lengths=(1,) * 5),
    _PLAIN.but("out", out=True, scale=0.3, lengths=(1,) * 7),
    _PLAIN.but("nobody", lengths=()),
    _PLAIN.but("activation-parameters", parameters="activation"),
    _PLAIN.but("strong", gates="strong"),
    _PLAIN.but("no-decay", gates="none"),
    _PLAIN.but("one-head", heads=Heads(1, 1, 64, 32)),
    _PLAIN.but("ratio-3", heads=Heads(2, 6, 32, 64)),
    _PLAIN.but("ratio-8", heads=Heads(1, 8, 64, 32), lengths=(1,) * 9),
    _PLAIN.but("wide", heads=Heads(1, 2, 128, 128), lengths=(1,) * 33),
)

_MANY_DRAFTS: Final = [
    _PLAIN.but(f"{drafts}-drafts{name}", drafts=drafts, lengths=(drafts, 3, drafts - 2), buffer=buffer)
    for drafts in (12, 40)
    for name, buffer in (("", True), ("-unbuffered", False))
]

SITUATIONS: Final[dict[str, tuple[Case, ...]]] = {
    "decode": (
        *_RECURRENT,
        _PLAIN.but("offsets", offsets=True, lengths=(1, 0, 1, 1, 0), tail=2),
        _PLAIN.but("offsets-padded", offsets=True, lengths=(1, 0, 1), slots=(1, 0, -1), out=True),
    ),
    "packed_decode": _RECURRENT,
    "replay_decode": (
        *(case.but("ring") for case in _RECURRENT),
        _PLAIN.but("every-position", lengths=(1,) * 8, ring=8),
        _PLAIN.but("forced", lengths=(1,) * 6, ring=16, cursors=(0, 1, 15, 14, 5, 0), forced=(1, 0, 0, 1, 1, 0)),
        _PLAIN.but("ring-of-one", ring=1),
        _PLAIN.but("forgetting-ring", ring=8, gates="forgetting", lengths=(1,) * 8),
        _PLAIN.but("ring-of-two", ring=2, slots=(1, -1, 0)),
    ),
    "extend": (
        _PLAIN.but("one-token"),
        _PLAIN.but("chunk-edges", lengths=(63, 64, 65, 129, 1, 0, 130)),
        _PLAIN.but("empty-ones", lengths=(0, 3, 0, 0, 70, 0), tail=3),
        _PLAIN.but("only-empty", lengths=(0, 0)),
        _PLAIN.but("nobody", lengths=()),
        _PLAIN.but("padded", lengths=(5, 70, 4, 65), slots=(2, -1, 99, 0), pool_slots=5, tail=5),
        _PLAIN.but("views", views=True, slot_gap=24, lengths=(70, 1, 66), index="int64"),
        _PLAIN.but("out", out=True, scale=0.3, lengths=(7, 66), tail=1),
        _PLAIN.but("checkpoints", lengths=(130, 0, 64, 5), chunk_states=True, snapshots=(1, 0, 1, -1)),
        _PLAIN.but("checkpoints-padded", lengths=(70, 65, 3), slots=(1, -1, 0), chunk_states=True, snapshots=(2, 0, 1)),
        _PLAIN.but("host-lengths", lengths=(100, 0, 3), chunk_states=True, host_lengths=True),
        _PLAIN.but("strong", gates="strong", lengths=(200,)),
        _PLAIN.but("no-decay", gates="none", lengths=(200,)),
        _PLAIN.but("slow", gates="slow", lengths=(300,)),
        _PLAIN.but("forgetting", gates="forgetting", lengths=(150, 20)),
        _PLAIN.but("ratio-3", heads=Heads(2, 6, 32, 64), lengths=(80,)),
        _PLAIN.but("one-head", heads=Heads(1, 1, 64, 32), lengths=(80,)),
        _PLAIN.but("wide", heads=Heads(1, 2, 128, 128), lengths=(200, 64)),
    ),
    "verify": tuple(
        case.but(drafts=4)
        for case in (
            _PLAIN.but("ragged", lengths=_DRAFTS),
            _PLAIN.but("one-draft", lengths=(1, 1)),
            _PLAIN.but("padded", lengths=_DRAFTS, slots=(2, -1, 0, 99, 1), tail=2),
            _PLAIN.but("views", lengths=_DRAFTS, views=True, slot_gap=24, index="int64"),
            _PLAIN.but("unbuffered", lengths=_DRAFTS, buffer=False, out=True),
            _PLAIN.but("rows-outside", lengths=_DRAFTS, rows_outside=True),
            _PLAIN.but("nobody", lengths=()),
            _PLAIN.but("strong", lengths=_DRAFTS, gates="strong", parameters="activation"),
            _PLAIN.but("ratio-3", lengths=_DRAFTS, heads=Heads(2, 6, 32, 64)),
            _PLAIN.but("wide", lengths=_DRAFTS, heads=Heads(1, 2, 128, 128), scale=0.3),
        )
    ) + tuple(_MANY_DRAFTS),
    "tree_verify": tuple(
        case.but(drafts=7)
        for case in (
            _PLAIN.but("ragged", lengths=(7, 1, 0, 5, 7)),
            _PLAIN.but("padded", lengths=(7, 7, 3), slots=(2, -1, 0), tail=2),
            _PLAIN.but("views", lengths=(7, 6), views=True, slot_gap=24, index="int64"),
            _PLAIN.but("unbuffered", lengths=(7, 4), buffer=False, out=True),
            _PLAIN.but("rows-outside", lengths=(7, 6, 5), rows_outside=True),
            _PLAIN.but("wide", lengths=(7, 7), heads=Heads(1, 2, 128, 128)),
            _PLAIN.but("strong", lengths=(7, 5), gates="strong"),
        )
    ) + tuple(_MANY_DRAFTS),
    "conv_extend": (
        _PLAIN.but("short", lengths=(1, 0, 2, 3, 4, 9)),
        _PLAIN.but("long", lengths=(300, 17)),
        _PLAIN.but("padded", lengths=(5, 4, 70), slots=(1, -1, 0), tail=3),
        _PLAIN.but("fresh-and-known", lengths=(1, 2, 70, 3), history="mixed"),
        _PLAIN.but("fresh", lengths=(2, 3, 1), history="none"),
        _PLAIN.but("width-2", lengths=(1, 2, 9), width=2, bias=False),
        _PLAIN.but("width-3", lengths=(1, 2, 9), width=3, act=None),
        _PLAIN.but("width-8", lengths=(1, 9, 4), width=8, act="swish"),
        _PLAIN.but("views", lengths=(3, 40), views=True, slot_gap=5, wide_window=2, index="int64"),
        _PLAIN.but("nobody", lengths=()),
        _PLAIN.but("only-empty", lengths=(0, 0), tail=4),
        _PLAIN.but("host-lengths", lengths=(3, 0, 8), host_lengths=True, parameters="activation"),
    ),
    "conv_update": (
        _PLAIN.but("single", drafts=1, buffer=False),
        _PLAIN.but("single-padded", drafts=1, buffer=False, slots=(2, -1, 0, 77), lengths=(1,) * 4, wide_window=3),
        _PLAIN.but("single-views", drafts=1, buffer=False, views=True, slot_gap=5, index="int64"),
        _PLAIN.but("chain", drafts=5),
        _PLAIN.but("chain-unbuffered", drafts=3, buffer=False, bias=False, act=None),
        _PLAIN.but("chain-padded", drafts=2, slots=(-1, 1, 0), width=3),
        _PLAIN.but("width-2", drafts=3, width=2),
        _PLAIN.but("width-8", drafts=4, width=8, act="swish"),
        _PLAIN.but("tree", drafts=8, tree=True, lengths=(1,) * 5),
        _PLAIN.but("rows-outside", drafts=3, rows_outside=True),
        _PLAIN.but("tree-padded", drafts=4, tree=True, slots=(0, -1, 2), buffer=False, index="int64"),
        _PLAIN.but("tree-views", drafts=6, tree=True, views=True, slot_gap=5),
        _PLAIN.but("nobody", drafts=1, buffer=False, lengths=()),
    ),
    "gating": (
        _PLAIN.but("rows", lengths=(70,)),
        _PLAIN.but("views", lengths=(5,), views=True, parameters="activation"),
        _PLAIN.but("nobody", lengths=()),
        _PLAIN.but("one-head", lengths=(3,), heads=Heads(1, 1, 32, 32)),
    ),
    "qkv_split": (
        _PLAIN.but("rows", lengths=(70,)),
        _PLAIN.but("views", lengths=(5,), views=True),
        _PLAIN.but("nobody", lengths=()),
        _PLAIN.but("wider-than-8192", lengths=(3,), heads=Heads(16, 48, 128, 128)),
    ),
}  # fmt: skip
"""By operation, in fp32; `gdn.testing.conformance` varies the dtypes."""
