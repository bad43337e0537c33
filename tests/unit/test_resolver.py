"""The joint choice: order, state contract, selection, reasons."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdn.device import DeviceInfo
from gdn.environment import Environment
from gdn.errors import ConfigError
from gdn.errors import UnknownBackendError
from gdn.resolver import explain
from gdn.selection import build_selection
from gdn.types import AUXILIARY_OPERATIONS
from gdn.types import OPERATIONS
from tests.unit.builders import CONFIG
from tests.unit.builders import CPU
from tests.unit.builders import H200
from tests.unit.builders import backend
from tests.unit.builders import codes
from tests.unit.builders import cuda
from tests.unit.builders import facts
from tests.unit.builders import row
from tests.unit.builders import triple_rows

TRITON = backend("triton", [*triple_rows(), *(row(op) for op in AUXILIARY_OPERATIONS)])
SM120 = DeviceInfo(type="cuda", index=0, sm=120, runtime="13.0")


def select(*names, environment=None, **wishes):
    return build_selection(environment or Environment(), names, **wishes)


def config(**changes):
    return type(CONFIG).model_validate({**CONFIG.model_dump(), **changes})


def test_one_backend_serves_all():
    report = explain(CONFIG, H200, facts(TRITON))
    assert report.complete
    assert report.chosen == {
        op: "triton" if op not in ("packed_decode", "replay_decode", "tree_verify") else None for op in OPERATIONS
    }
    assert report.state.dtype == "float32"
    assert codes(report, "triton", "packed_decode") == ["packed_decode"]


def test_packed_decode_comes_from_the_backend_of_decode():
    packing = backend("packing", [row(packed_decode=True, packed_factory="m:p"), *triple_rows()[1:]])
    report = explain(CONFIG, H200, facts(TRITON, packing))
    assert (report.chosen["decode"], report.chosen["packed_decode"]) == ("triton", None)
    report = explain(CONFIG, H200, facts(TRITON, packing, selection=select("packing", require={"decode": "packing"})))
    assert (report.chosen["decode"], report.chosen["packed_decode"]) == ("packing", "packing")


def test_sm120_gives_a_mixed_triple_where_one_library_has_no_common_state():
    """Extend wants an fp32 pool and decode a bf16 one: no triple of that library alone can be right."""
    library = backend(
        "flashinfer",
        [
            row("decode", target=cuda(120), state_dtypes=["bfloat16"]),
            row("extend", target=cuda(120), state_dtypes=["float32"]),
        ],
    )
    wish = select("flashinfer", "triton", prefer="flashinfer")
    for dtype, mixed in (("bfloat16", ("flashinfer", "triton")), ("float32", ("triton", "flashinfer"))):
        report = explain(config(state_dtype=dtype), SM120, facts(TRITON, library, selection=wish))
        assert (report.chosen["decode"], report.chosen["extend"], report.chosen["verify"]) == (*mixed, "triton")
        assert report.state.dtype == dtype
    report = explain(config(state_dtype="auto"), SM120, facts(TRITON, library, selection=wish))
    assert (report.chosen["decode"], report.chosen["extend"], report.state.dtype) == (
        "flashinfer",
        "triton",
        "bfloat16",
    )


def test_auto_state_takes_the_most_precise_of_equals():
    assert explain(config(state_dtype="auto"), H200, facts(TRITON)).state.dtype == "float32"
    only_half = backend("half", triple_rows(state_dtypes=["float16"]))
    assert explain(config(state_dtype="auto"), H200, facts(only_half)).state.dtype == "float16"


def test_no_common_state_is_no_triple():
    split = backend("split", [row("decode", state_dtypes=["bfloat16"]), *triple_rows(state_dtypes=["float32"])[1:]])
    report = explain(config(state_dtype="auto"), H200, facts(split))
    assert not report.complete
    assert report.state is None


def test_state_contract_takes_the_strictest_row():
    rows = [row("decode", state_alignment=32), row("extend", reserved_slots=1), row("verify", state_alignment=16)]
    state = explain(CONFIG, H200, facts(backend("strict", rows))).state
    assert (state.alignment, state.reserved_slots, state.slots(8)) == (32, 1, 9)


def test_answer_does_not_depend_on_plugin_order():
    manifests = [TRITON, backend("acme", triple_rows()), backend("zeta", triple_rows(), tier="preferred")]
    answers = {explain(CONFIG, H200, facts(*order)).key for order in itertools.permutations(manifests)}
    assert len(answers) == 1
    assert explain(CONFIG, H200, facts(*manifests[1:])).chosen["decode"] == "zeta"


def test_ties_go_to_built_in_then_name():
    one, two = backend("one", triple_rows()), backend("two", triple_rows())
    assert explain(CONFIG, H200, facts(two, one)).chosen["decode"] == "one"
    assert explain(CONFIG, H200, facts(two, one, third_party=frozenset({"one"}))).chosen["decode"] == "two"


def test_a_matching_backend_that_lost_says_after_whom():
    report = explain(CONFIG, H200, facts(TRITON, backend("acme", triple_rows())))
    (reason,) = report.reasons("decode", "acme")
    assert reason.code == "policy"
    assert "ranked after triton" in reason.message


def test_closest_row_comes_first_and_all_rows_are_kept():
    many = backend(
        "many", [row(target=cuda(100), head_dims={"k": [8]}), row(head_dims={"k": [128]}), *triple_rows()[1:]]
    )
    report = explain(CONFIG, H200, facts(many))
    assert codes(report, "many") == ["head_dim", "sm_range", "head_dim"]
    assert [r.code for r in report.lost if r.operation == "decode"] == ["head_dim"]


def test_undeclared_operations_say_so():
    report = explain(CONFIG, H200, facts(backend("empty", [])))
    assert codes(report, "empty") == ["op_not_declared"]
    assert not report.complete


def test_require_exclude_and_disabled():
    acme = backend("acme", triple_rows())
    names = ("triton", "acme")
    report = explain(CONFIG, H200, facts(TRITON, acme, selection=select(*names, require="acme")))
    assert {report.chosen[op] for op in ("decode", "extend", "verify")} == {"acme"}
    assert report.chosen["gating"] == "triton"
    assert codes(report, "triton") == ["policy"]
    report = explain(CONFIG, H200, facts(TRITON, acme, selection=select(*names, exclude=["triton"])))
    assert report.chosen["decode"] == "acme"
    assert codes(report, "triton") == ["excluded"]
    killed = Environment(disabled=("acme",))
    report = explain(CONFIG, H200, facts(TRITON, acme, selection=select(*names, environment=killed, require="acme")))
    assert not report.complete
    assert codes(report, "acme") == ["disabled"]


def test_prefer_unmet_is_a_fallback_with_its_reason():
    narrow = backend("narrow", triple_rows(head_dims={"k": [128]}))
    report = explain(CONFIG, H200, facts(TRITON, narrow, selection=select("narrow", "triton", prefer="narrow")))
    assert report.chosen["decode"] == "triton"
    fallback = next(f for f in report.fallbacks if f.operation == "decode")
    assert (fallback.preferred, fallback.given, fallback.code) == ("narrow", "triton", "head_dim")


def test_prefer_per_operation_and_in_order():
    one, two = backend("one", triple_rows()), backend("two", [row("extend")])
    wish = select("one", "two", "triton", prefer={"extend": ("two", "one"), "decode": ["two", "one"]})
    report = explain(CONFIG, H200, facts(TRITON, one, two, selection=wish))
    assert [report.chosen[op] for op in ("decode", "extend", "verify")] == ["one", "two", "triton"]
    assert [(f.operation, f.preferred, f.code) for f in report.fallbacks] == [("decode", "two", "op_not_declared")]


def test_experimental_rows_need_to_be_named():
    lab = backend("lab", triple_rows(), maturity="experimental")
    assert codes(explain(CONFIG, H200, facts(lab)), "lab") == ["experimental"]
    for wish in ({"require": "lab"}, {"prefer": "lab"}):
        assert explain(CONFIG, H200, facts(lab, selection=select("lab", **wish))).chosen["verify"] == "lab"


def test_maturity_of_a_row_overrides_the_manifests():
    mixed = backend("mixed", [row(), *triple_rows(maturity="experimental")[1:]])
    report = explain(CONFIG, H200, facts(mixed, TRITON, selection=select("mixed", prefer={"decode": "mixed"})))
    assert [report.chosen[op] for op in ("decode", "extend")] == ["mixed", "triton"]


def test_environment_fills_what_the_call_leaves_open():
    environment = Environment(backend="acme", backend_by_operation={"decode": "triton"})
    made = select("acme", "triton", environment=environment)
    assert made.require == {"decode": "triton", "extend": "acme", "verify": "acme"}
    assert made.required_by["decode"] == "GDN_BACKEND_DECODE"
    made = select("acme", "triton", environment=environment, require={"decode": "acme"})
    assert made.require["decode"] == "acme"
    assert made.overridden == ("GDN_BACKEND_DECODE=triton is overridden by require='acme' for decode",)


@pytest.mark.parametrize(
    ("wishes", "error", "words"),
    [
        ({"require": "trition"}, UnknownBackendError, "did you mean 'triton'"),
        ({"prefer": {"decode": "nope"}}, UnknownBackendError, "prefer names the backend 'nope'"),
        ({"exclude": "acmee"}, UnknownBackendError, "did you mean 'acme'"),
        ({"require": {"decod": "acme"}}, ConfigError, "operation 'decod'"),
        ({"require": "acme", "exclude": ("acme",)}, ConfigError, "forbids"),
        ({"environment": Environment(disabled=("acm",))}, UnknownBackendError, "GDN_DISABLE_BACKENDS"),
        ({"environment": Environment(backend="tritn")}, UnknownBackendError, "require names the backend 'tritn'"),
    ],
)
def test_wishes_that_make_no_sense_raise(wishes, error, words):
    with pytest.raises(error, match=words):
        select("acme", "triton", **wishes)


def test_refused_rows_fall_to_the_next_candidate():
    acme = backend("acme", [row("decode"), row("decode"), *triple_rows()[1:]], tier="preferred")
    refused = {("acme", "decode", 0): "no nvcc"}
    report = explain(CONFIG, H200, facts(acme, refused=refused))
    assert (report.chosen["decode"], report.rows["decode"]) == ("acme", 1)
    refused["acme", "decode", 1] = "still no nvcc"
    report = explain(CONFIG, H200, facts(acme, backend("next", triple_rows()), refused=refused))
    assert report.chosen["decode"] == "next"
    assert codes(report, "acme") == ["bind_refused", "bind_refused"]


def test_a_needed_replay_that_is_refused_takes_decode_with_it():
    ring = row(replay=True, replay_factory="m:r")
    one, two = backend("one", [ring, *triple_rows()[1:]]), backend("two", [ring, *triple_rows()[1:]])
    refused = {("one", "replay_decode", 0): "ring too long"}
    report = explain(config(replay_window=16), H200, facts(one, two, refused=refused))
    assert (report.chosen["decode"], report.chosen["replay_decode"]) == ("two", "two")
    assert codes(report, "one") == ["bind_refused"]


def test_tree_drafts_need_a_tree():
    tree = backend("trees", [row("verify", tree=True, tree_factory="m:t")])
    asked = config(max_draft_tokens=4, tree_drafts=True)
    assert not explain(asked, H200, facts(TRITON)).complete
    report = explain(asked, H200, facts(TRITON, tree))
    assert (report.chosen["verify"], report.chosen["tree_verify"]) == ("triton", "trees")


def test_trees_go_where_chains_go_if_they_can():
    rows = [*triple_rows()[:2], row("verify", tree=True, tree_factory="m:t")]
    wish = select("acme", "triton", require={"verify": "acme"})
    triton = backend("triton", rows)
    assert explain(CONFIG, H200, facts(triton, backend("acme", rows), selection=wish)).chosen["tree_verify"] == "acme"


def test_broken_plugins_are_candidates_that_lost():
    wish = select("broken", "triton", prefer="broken")
    report = explain(CONFIG, H200, facts(TRITON, broken={"broken": "stage load: ImportError"}, selection=wish))
    assert report.complete
    assert codes(report, "broken") == ["plugin_broken"]
    assert {f.code for f in report.fallbacks} == {"plugin_broken"}


FAKE_DEVICES = [
    DeviceInfo("cuda", 0, sm=sm, runtime="13.0") for sm in (70, 75, 80, 86, 89, 90, 100, 103, 110, 120, 121)
]
FAKE_DEVICES += [DeviceInfo("rocm", 0, gfx="gfx942"), DeviceInfo("rocm", 0, gfx="gfx1151"), CPU]


@pytest.mark.parametrize("device", FAKE_DEVICES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_case_57_a_decode_only_plugin_is_chosen_only_where_it_claims(device, dtype):
    everywhere = [
        backend(name, triple_rows(target=target, dtypes=["bfloat16", "float16", "float32"]), tier="fallback")
        for name, target in (
            ("anycuda", cuda(50, 200)),
            ("anyrocm", {"platform": "rocm"}),
            ("anycpu", {"platform": "cpu"}),
        )
    ]
    narrow = backend(
        "narrow", [row(target=cuda(90), dtypes=["bfloat16"], state_dtypes=["bfloat16"], head_dims={"k": [64]})]
    )
    report = explain(config(activation_dtype=dtype, state_dtype="bfloat16"), device, facts(narrow, *everywhere))
    assert report.complete
    assert (report.chosen["decode"] == "narrow") == (device.sm == 90 and dtype == "bfloat16")
    assert report.chosen["extend"] != "narrow"
    assert report.chosen["decode"] == "narrow" or codes(report, "narrow")


DTYPE = st.sampled_from(["float32", "bfloat16", "float16"])
ROW = st.builds(
    row,
    op=st.sampled_from(["decode", "extend", "verify"]),
    target=st.builds(cuda, st.sampled_from([80, 90, 100]), st.just(121)),
    state_dtypes=st.sets(DTYPE, min_size=1),
    dtypes=st.sets(DTYPE, min_size=1),
)
MANIFESTS = st.lists(st.lists(ROW, max_size=4), min_size=1, max_size=4).map(
    lambda rows: [backend(f"b{i}", r) for i, r in enumerate(rows)]
)


@given(manifests=MANIFESTS, state=st.sampled_from(["auto", "float32", "bfloat16"]), extra=st.lists(ROW, max_size=3))
def test_one_more_backend_never_takes_a_triple_away(manifests, state, extra):
    asked = config(state_dtype=state)
    before = explain(asked, H200, facts(*manifests))
    after = explain(asked, H200, facts(*manifests, backend("added", extra)))
    assert after.complete or not before.complete


@given(manifests=MANIFESTS, state=st.sampled_from(["auto", "float32", "bfloat16"]))
def test_every_backend_is_chosen_or_has_a_reason(manifests, state):
    report = explain(config(state_dtype=state), H200, facts(*manifests))
    for manifest, operation in itertools.product(manifests, ("decode", "extend", "verify")):
        assert (report.chosen[operation] == manifest.name) != bool(report.reasons(operation, manifest.name))
