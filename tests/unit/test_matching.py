"""One row against one config: every constraint has its code, what was got and what is needed."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdn.capabilities import CapabilityRow
from gdn.device import CpuInfo
from gdn.device import DeviceInfo
from gdn.matching import match
from gdn.reasons import REASON_CODES
from gdn.types import StateContract
from tests.unit.builders import CONFIG
from tests.unit.builders import CPU
from tests.unit.builders import H200
from tests.unit.builders import cuda
from tests.unit.builders import row


def reasons(changes, operation="decode", config=CONFIG, device=H200, state="float32", installed=None):
    made = CapabilityRow.model_validate(row(**changes))
    return match(made, operation, config, device, StateContract(state), (installed or {}).get)


def with_config(**changes):
    return CONFIG.model_copy(update=changes)


def test_a_row_that_fits_has_no_reason():
    assert reasons({}) == ()


CASES = [
    ("device_type", {}, {"device": CPU}, "device is cpu, needs cuda"),
    ("device_type", {"target": {"platform": "rocm", "gfx": "gfx942"}}, {"device": DeviceInfo("rocm", gfx="gfx1151")},
     "device is gfx1151, needs gfx942"),
    ("device_type", {"target": {"platform": "npu", "soc": "ascend910b"}}, {"device": DeviceInfo("npu", soc="ascend310p")},
     "device is ascend310p, needs ascend910b"),
    ("device_type", {"target": {"platform": "cpu", "features": "amx_bf16"}}, {"device": CPU},
     "CPU features are avx2, needs amx_bf16"),
    ("sm_range", {"target": cuda(100, 103)}, {}, "device is SM90, needs SM100-103"),
    ("runtime_version", {"target": cuda(90, runtime=">=13.1")}, {}, "CUDA is 13.0, needs >=13.1"),
    ("requires_missing", {"requires": "acme>=1"}, {}, "acme is not installed, needs acme>=1"),
    ("requires_version", {"requires": "acme>=1"}, {"installed": {"acme": "0.9"}}, "acme is 0.9, needs >=1"),
    ("head_dim", {"head_dims": {"k": [128]}}, {}, "head_k_dim=64, needs 128"),
    ("head_dim", {"head_dims": {"v": [64]}}, {}, "head_v_dim=128, needs 64"),
    ("head_ratio", {"head_ratios": [1, 4]}, {}, "num_v_heads/num_k_heads=2, needs 1,4"),
    ("activation_dtype", {"dtypes": ["float16"]}, {}, "activation_dtype=bfloat16, needs float16"),
    ("state_dtype", {"state_dtypes": ["bfloat16"]}, {}, "state_dtype=float32, needs bfloat16"),
    ("packed_decode", {}, {"operation": "packed_decode"}, "packed_decode=False"),
    ("replay", {}, {"config": with_config(replay_window=16)}, "replay_window=16"),
    ("tree_verify", {"op": "verify"}, {"operation": "tree_verify", "config": with_config(max_draft_tokens=4)}, "tree=False"),
    ("draft_tokens", {"op": "verify", "max_draft_tokens": 4}, {"operation": "verify", "config": with_config(max_draft_tokens=8)},
     "max_draft_tokens=8, needs <= 4"),
    ("strided_state", {}, {"config": with_config(strided_state=True)}, "strided_state=False"),
    ("state_checkpoints", {"op": "extend"}, {"operation": "extend", "config": with_config(state_checkpoints=True)},
     "state_checkpoints=False"),
    ("conv_width", {"op": "conv_update", "conv_widths": [2, 3]}, {"operation": "conv_update"},
     "conv_kernel_size=4, needs 2,3"),
    ("deterministic", {}, {"config": with_config(deterministic=True)}, "deterministic=False"),
    ("cuda_graph", {"cuda_graph": False}, {"config": with_config(cuda_graph=True)}, "cuda_graph=False"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "changes", "question", "words"), CASES)
def test_each_constraint_alone_gives_its_code(code, changes, question, words):
    (reason,) = reasons(changes, **question)
    assert reason.code == code
    assert words in reason.message


def test_every_code_of_a_row_is_covered_here():
    from_elsewhere = {
        "op_not_declared",
        "excluded",
        "disabled",
        "experimental",
        "bind_refused",
        "plugin_broken",
        "policy",
    }
    assert {case[0] for case in CASES} | from_elsewhere == set(REASON_CODES)


def test_all_failing_constraints_are_collected():
    found = reasons(
        {"target": cuda(100), "head_dims": {"k": [128], "v": [64]}, "requires": "acme>=1", "dtypes": ["float32"]},
        config=with_config(strided_state=True, deterministic=True),
        state="float16",
    )
    assert [r.code for r in found] == [
        "sm_range", "requires_missing", "head_dim", "head_dim", "activation_dtype", "strided_state", "deterministic",
    ]  # fmt: skip


def test_gating_has_no_state():
    assert reasons({"op": "gating", "state_dtypes": ["bfloat16"]}, "gating", with_config(strided_state=True)) == ()


def test_unknown_facts_never_match():
    unknown = dataclasses.replace(H200, sm=None, runtime=None)
    assert [r.code for r in reasons({"target": cuda(90, runtime=">=12")}, device=unknown)] == [
        "sm_range",
        "runtime_version",
    ]


def test_markers_that_do_not_apply_are_ignored():
    assert reasons({"requires": 'acme>=1; python_version < "3"'}) == ()


def test_features_of_the_cpu_all_have_to_be_there():
    wide = DeviceInfo("cpu", cpu=CpuInfo(features=frozenset({"avx2", "avx512_bf16"})))
    assert reasons({"target": {"platform": "cpu", "features": ["avx2", "avx512_bf16"]}}, device=wide) == ()


@given(sm=st.integers(50, 130), low=st.integers(50, 130), span=st.integers(0, 40))
def test_closed_sm_ranges(sm, low, span):
    device = dataclasses.replace(H200, sm=sm)
    found = [r.code for r in reasons({"target": cuda(low, low + span)}, device=device)]
    assert found == ([] if low <= sm <= low + span else ["sm_range"])


FIELDS = {
    "head_k_dim": (st.sampled_from([32, 96, 256]), "head_dim"),
    "head_v_dim": (st.sampled_from([32, 96, 256]), "head_dim"),
    "activation_dtype": (st.sampled_from(["float32", "float16"]), "activation_dtype"),
    "num_v_heads": (st.sampled_from([2, 8, 16]), "head_ratio"),
    "max_draft_tokens": (st.integers(5, 64), "draft_tokens"),
}


@given(data=st.data())
def test_changing_one_field_outside_a_row_yields_exactly_its_code(data):
    narrow = {
        "op": "verify", "head_dims": {"k": [64], "v": [128]}, "head_ratios": [2], "dtypes": ["bfloat16"],
        "max_draft_tokens": 4,
    }  # fmt: skip
    assert reasons(narrow, "verify") == ()
    name = data.draw(st.sampled_from(sorted(FIELDS)))
    values, code = FIELDS[name]
    found = reasons(narrow, "verify", with_config(**{name: data.draw(values)}))
    assert [r.code for r in found] == [code]
