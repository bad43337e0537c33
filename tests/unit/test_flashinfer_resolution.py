"""Which triple a machine gets with the Triton and FlashInfer manifests, and why FlashInfer doesn't serve the rest."""

from typing import Any
from typing import NamedTuple

import pytest

from gdn.backends.flashinfer import MANIFEST as FLASHINFER
from gdn.backends.triton import MANIFEST as TRITON
from gdn.config import GdnConfig
from gdn.device import DeviceInfo
from gdn.environment import Environment
from gdn.resolver import explain
from gdn.selection import build_selection
from tests.unit.builders import codes
from tests.unit.builders import facts

BASE = {"torch": "2.11.0", "triton": "3.6.0"}
FULL = {**BASE, "flashinfer-python": "0.7.4"}
T, F, N = "triton", "flashinfer", None
BF16 = {"state_dtype": "bfloat16"}
SM100_DEFAULT = {**BF16, "max_tokens": 8192}


def version(text: str) -> dict[str, str]:
    return {**BASE, "flashinfer-python": text}


class Row(NamedTuple):
    sm: int
    config: dict[str, Any]
    wish: dict[str, Any]
    triple: tuple[str | None, str | None, str | None]
    """decode, extend, verify"""
    codes: dict[str, list[str]]
    """Of FlashInfer's closest row, by operation."""
    installed: dict[str, str] = FULL
    cuda: str | None = "13.0"
    state: str | None = None
    """None: that of the config, fp32 by default."""


PREFER, REQUIRE = {"prefer": F}, {"require": F}
EXPERIMENTAL = ["experimental"]

ROWS = {
    "hopper": Row(90, {}, {}, (T, F, T), {"decode": EXPERIMENTAL, "extend": [], "verify": EXPERIMENTAL}),
    "hopper-fp16": Row(90, {"activation_dtype": "float16"}, {}, (T, F, T), {"decode": ["activation_dtype", "experimental"]}),
    "hopper-fp32-activations": Row(90, {"activation_dtype": "float32"}, {}, (T, T, T), {"extend": ["activation_dtype"]}),
    "hopper-bf16-state": Row(90, BF16, {}, (T, T, T), {"extend": ["policy"]}),
    "hopper-fp16-state": Row(90, {"state_dtype": "float16"}, {}, (T, T, T), {"extend": ["policy"], "decode": ["state_dtype", "experimental"]}),
    "hopper-auto-state": Row(90, {"state_dtype": "auto"}, {}, (T, F, T), {}, state="float32"),
    "hopper-strided": Row(90, {"strided_state": True}, {}, (T, F, T), {"extend": []}),
    "hopper-checkpoints": Row(90, {"state_checkpoints": True}, {}, (T, F, T), {"extend": []}),
    "hopper-graphs": Row(90, {"cuda_graph": True}, {}, (T, F, T), {"extend": []}),
    "hopper-deterministic": Row(90, {"deterministic": True}, {}, (T, T, T), {"extend": ["deterministic"]}),
    "hopper-k64": Row(90, {"head_k_dim": 64}, {}, (T, T, T), {"extend": ["head_dim"]}),
    "hopper-v256": Row(90, {"head_v_dim": 256}, {}, (T, T, T), {"extend": ["head_dim"]}),
    "hopper-k256": Row(90, {"head_k_dim": 256, "head_v_dim": 256}, {}, (T, T, T), {"extend": ["head_dim"] * 2}),
    "hopper-any-ratio": Row(90, {"num_v_heads": 48}, {}, (T, F, T), {"extend": []}),
    "hopper-cuda-12": Row(90, {}, {}, (T, F, T), {"extend": []}, cuda="12.8"),
    "hopper-prefer": Row(90, {}, PREFER, (F, F, F), {}),
    "hopper-prefer-bf16": Row(90, BF16, PREFER, (F, F, F), {}),
    "hopper-prefer-replay": Row(90, {"replay_window": 16}, PREFER, (T, F, F), {"decode": ["replay"]}),
    "hopper-prefer-tree": Row(90, {"max_draft_tokens": 8, "tree_drafts": True}, PREFER, (F, F, F), {"tree_verify": ["tree_verify"]}),
    "hopper-prefer-32-drafts": Row(90, {"max_draft_tokens": 32}, PREFER, (F, F, T), {"verify": ["draft_tokens"]}),
    "hopper-prefer-triton": Row(90, {}, {"prefer": T}, (T, T, T), {"extend": ["policy"]}),
    "hopper-require-triton-extend": Row(90, {}, {"require": {"extend": T}}, (T, T, T), {"extend": ["policy"]}),
    "hopper-exclude": Row(90, {}, {"exclude": F}, (T, T, T), {"extend": ["excluded"]}),
    "hopper-disabled": Row(90, {}, {"environment": Environment(disabled=(F,))}, (T, T, T), {"extend": ["disabled"]}),
    "hopper-absent": Row(90, {}, {}, (T, T, T), {"extend": ["requires_missing"]}, installed=BASE),
    "hopper-0.6.18": Row(90, {}, {}, (T, T, T), {"extend": ["requires_version"]}, installed=version("0.6.18")),
    "hopper-0.7.2": Row(90, {}, PREFER, (F, T, T), {"extend": ["requires_version"], "verify": ["requires_version"]}, installed=version("0.7.2")),
    "hopper-0.7.2-bf16": Row(90, BF16, PREFER, (F, T, F), {"extend": ["requires_version"]}, installed=version("0.7.2")),
    "ampere": Row(80, {}, {}, (T, T, T), {"extend": EXPERIMENTAL, "decode": ["sm_range", "experimental"]}),
    "ampere-prefer": Row(80, {}, PREFER, (T, F, T), {"decode": ["sm_range"], "verify": ["sm_range"]}),
    "ada-prefer": Row(89, {}, PREFER, (T, F, T), {"decode": ["sm_range"]}),
    "turing": Row(75, {}, {}, (N, N, N), {"extend": ["sm_range"]}),
    "blackwell-default": Row(100, SM100_DEFAULT, {}, (T, F, T), {"extend": []}),
    "blackwell-103-default": Row(103, {**BF16, "max_tokens": 1}, {}, (T, F, T), {"extend": []}),
    "blackwell-auto-state": Row(100, {"state_dtype": "auto", "max_tokens": 4096}, {}, (T, F, T), {}, state="bfloat16"),
    "blackwell-unknown-tokens": Row(100, BF16, {}, (T, T, T), {"extend": ["policy"]}),
    "blackwell-8193-tokens": Row(100, {**BF16, "max_tokens": 8193}, {}, (T, T, T), {"extend": ["policy"]}),
    "blackwell-fp32-state": Row(100, {"max_tokens": 8192}, {}, (T, T, T), {"extend": ["policy"]}),
    "blackwell-checkpoints": Row(100, {**SM100_DEFAULT, "state_checkpoints": True}, {}, (T, T, T), {"extend": ["policy"]}),
    "blackwell-strided": Row(100, {**SM100_DEFAULT, "strided_state": True}, {}, (T, T, T), {"extend": ["policy"]}),
    "blackwell-four-unmet": Row(100, {"strided_state": True, "state_checkpoints": True}, {}, (T, T, T), {"extend": ["policy"] * 4}),
    "blackwell-k64": Row(100, {**SM100_DEFAULT, "head_k_dim": 64}, {}, (T, T, T), {"extend": ["head_dim"]}),
    "blackwell-cuda-12": Row(100, SM100_DEFAULT, {}, (T, T, T), {"extend": ["runtime_version"]}, cuda="12.9"),
    "blackwell-cuda-unknown": Row(100, SM100_DEFAULT, {}, (T, T, T), {"extend": ["runtime_version"]}, cuda=None),
    "blackwell-prefer-triton": Row(100, SM100_DEFAULT, {"prefer": {"extend": T}}, (T, T, T), {"extend": ["policy"]}),
    "blackwell-prefer-fp32": Row(100, {}, PREFER, (F, F, F), {}),
    "blackwell-absent": Row(100, SM100_DEFAULT, {}, (T, T, T), {"extend": ["requires_missing"]}, installed=BASE),
    "thor": Row(110, {}, PREFER, (T, T, T), {"extend": ["sm_range"], "decode": ["sm_range"], "verify": ["sm_range"]}),
    "sm120": Row(120, {}, {}, (T, T, T), {"extend": EXPERIMENTAL}),
    "sm120-prefer-fp32": Row(120, {}, PREFER, (T, F, T), {"decode": ["state_dtype"], "verify": ["state_dtype"]}),
    "sm120-prefer-bf16": Row(120, BF16, PREFER, (F, T, F), {"extend": ["state_dtype"]}),
    "sm120-prefer-auto": Row(120, {"state_dtype": "auto"}, PREFER, (F, T, F), {}, state="bfloat16"),
    "sm120-require-fp32": Row(120, {}, REQUIRE, (N, F, N), {"decode": ["state_dtype"]}),
    "sm121-cuda-12": Row(121, {}, PREFER, (T, T, T), {"extend": ["runtime_version"]}, cuda="12.9"),
}  # fmt: skip


def resolved(row: Row):
    config = GdnConfig(**{"num_k_heads": 16, "num_v_heads": 32, "head_k_dim": 128, "head_v_dim": 128, **row.config})
    device = DeviceInfo(type="cuda", index=0, sm=row.sm, runtime=row.cuda)
    wish = dict(row.wish)
    selection = build_selection(wish.pop("environment", Environment()), (T, F), **wish)
    return config, explain(config, device, facts(TRITON, FLASHINFER, installed=row.installed, selection=selection))


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_the_triple_and_the_codes(row):
    config, report = resolved(row)
    assert tuple(report.chosen[op] for op in ("decode", "extend", "verify")) == row.triple
    for operation, expected in row.codes.items():
        assert codes(report, F, operation)[: len(expected) or None] == expected, operation
    if report.complete:
        assert report.state.dtype == (row.state or config.state_dtype)


def test_sm100_says_which_conditions_failed():
    _, report = resolved(ROWS["blackwell-four-unmet"])
    messages = [reason.message for reason in report.reasons("extend", F)]
    for fact, needs in (
        ("max_tokens=None", "1 to 8192"), ("state.dtype='float32'", "'bfloat16'"), ("state_checkpoints=True", "False"),
        ("strided_state=True", "False"),
    ):  # fmt: skip
        assert any(fact in message and needs in message for message in messages), fact


def test_the_state_contract_carries_alignment_and_scratch():
    _, report = resolved(ROWS["hopper-prefer-bf16"])
    assert (report.state.alignment, report.state.slots(64)) == (32, 65)
    _, report = resolved(ROWS["hopper"])
    assert (report.state.alignment, report.state.slots(64)) == (32, 64)


def test_every_row_names_what_it_needs_of_the_library():
    for row in FLASHINFER.capabilities:
        assert [text.partition(">=")[0] for text in row.requires] == ["flashinfer-python"]
        assert (row.head_dims.k.values, row.head_dims.v.values) == ((128,), (128,))
        assert row.state_alignment == 32
