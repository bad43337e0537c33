"""resolve and explain around the pure resolver: caching, binding, logging, threads. Backends here are fakes."""

from __future__ import annotations

import logging
import sys
import threading
import types

import pytest

import gdn
from gdn import api
from gdn import registry
from gdn.registry import BackendStatus
from tests.unit.builders import backend
from tests.unit.builders import row

CONFIG = gdn.GdnConfig(num_k_heads=2, num_v_heads=4, head_k_dim=64, head_v_dim=128)
CPU_ROW = {"target": {"platform": "cpu"}, "cuda_graph": False}
VERIFY = (
    "ssm_states", "cache_indices", "query_start_loc", "intermediate_states_buffer", "intermediate_state_indices"
)  # fmt: skip
_built = []


def build(context):
    def operation():
        return context.operation, context.row.op

    _built.append(operation)
    return operation


def refuse(context):
    raise gdn.BackendRefused("the toolkit on this host is too old")


def crash(context):
    raise OSError("libacme.so: undefined symbol: go")


def rows(factory="build", ops=("decode", "extend", "verify"), **changes):
    return [row(op, **CPU_ROW, factory=f"{__name__}:{factory}", **changes) for op in ops]


@pytest.fixture
def install(monkeypatch):
    """Replace the registry's backends by fakes."""

    def use(*manifests, broken=()):
        fake = registry.Registry()
        fake._manifests = manifests
        fake._statuses = tuple(
            BackendStatus(m.name, True, m.name, "gdn", "1", None, True, m) for m in manifests
        ) + tuple(
            BackendStatus(name, False, name, f"gdn-{name}", "1", None, False, stage="load", error="ImportError: x")
            for name in broken
        )
        fake.generation = next(registry._generations)
        monkeypatch.setattr(registry, "_registry", fake)
        _built.clear()
        gdn.clear_cache()

    for name in list(filter(lambda n: n.startswith("GDN_"), __import__("os").environ)):
        monkeypatch.delenv(name)
    yield use
    gdn.clear_cache()


def resolve(**options):
    return gdn.resolve(CONFIG, device="cpu", **options)


def test_the_triple_holds_the_very_functions(install):
    install(backend("one", rows()))
    triple = resolve()
    assert {triple.decode, triple.extend} < set(_built)
    assert (triple.decode(), triple.extend()) == (("decode", "decode"), ("extend", "extend"))
    with pytest.raises(gdn.InputError, match="retrieve_parent_token"):
        triple.verify(*[None] * 7, retrieve_parent_token=1, cache_steps=1, **dict.fromkeys(VERIFY))
    assert triple.packed_decode is None
    assert dict(triple.backends) == {"decode": "one", "extend": "one", "verify": "one"}


def test_equal_calls_share_a_triple_and_different_ones_do_not(install, monkeypatch):
    install(backend("one", rows()), backend("two", rows()))
    first = resolve()
    assert resolve() is first
    assert gdn.resolve(CONFIG.model_copy(), device="cpu") is first
    assert resolve(require="two") is not first
    assert resolve(prefer="two").backends["decode"] == "two"
    assert resolve(prefer=["two", "one"]).backends["decode"] == "two"
    assert resolve(exclude=("one",)).backends["decode"] == "two"
    assert gdn.resolve(CONFIG.model_copy(update={"max_slots": 3}), device="cpu") is not first
    monkeypatch.setenv("GDN_BACKEND", "two")
    assert resolve().backends["decode"] == "two"
    monkeypatch.delenv("GDN_BACKEND")
    assert resolve() is first


def test_equal_questions_share_a_report_and_different_ones_do_not(install, monkeypatch):
    install(backend("one", rows()), backend("two", rows(requires=["acme>=3"])))
    first = gdn.explain(CONFIG, device="cpu")
    assert gdn.explain(CONFIG, device="cpu") is first
    assumed = gdn.explain(CONFIG, device="cpu", assume_installed=["acme==3.0"], prefer=["two"])
    assert assumed.chosen["decode"] == "two"
    assert gdn.explain(CONFIG, device="cpu", prefer=["two"]).chosen["decode"] == "one"
    monkeypatch.setenv("GDN_DISABLE_BACKENDS", "one")
    assert gdn.explain(CONFIG, device="cpu").chosen["decode"] is None
    gdn.clear_cache()
    monkeypatch.delenv("GDN_DISABLE_BACKENDS")
    assert gdn.explain(CONFIG, device="cpu") is not first


def test_threads_get_one_triple_and_one_log_line(install, caplog):
    install(backend("one", rows()))
    barrier, triples = threading.Barrier(8), []

    def work():
        barrier.wait()
        triples.append(resolve())

    with caplog.at_level(logging.INFO, "gdn.resolver"):
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(map(id, triples))) == 1
    assert len(_built) == 3
    assert len([r for r in caplog.records if r.message.startswith("triple")]) == 1


def test_one_line_for_the_triple_and_one_for_each_better_candidate_that_lost(install, caplog):
    install(backend("best", rows(dtypes=["float32"]), tier="preferred"), backend("plain", rows()))
    with caplog.at_level(logging.DEBUG, "gdn.resolver"):
        resolve()
        resolve()
    lines = [r.message for r in caplog.records]
    assert lines[0].startswith("triple decode=plain extend=plain verify=plain packed_decode=no state=float32/vk")
    lost = [line for line in lines if "best lost to plain" in line]
    assert len(lost) == 3
    assert all("activation_dtype" in line for line in lost)
    assert len(lines) == 4
    assert caplog.records[0].gdn["chosen"]["decode"] == "plain"


def test_case_58_an_unmet_wish_is_a_warning_with_its_reason(install, caplog):
    install(backend("one", rows()), backend("two", rows(requires=["acme-kernels>=3"])))
    with caplog.at_level(logging.INFO, "gdn.resolver"):
        triple = resolve(prefer="two")
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 3
    assert all("preferred two, given one" in line and "acme-kernels" in line for line in warnings)
    assert {f.code for f in triple.report.fallbacks if f.operation == "decode"} == {"requires_missing"}


def test_other_ranks_log_at_debug(install, caplog, monkeypatch):
    install(backend("one", rows()))
    distributed = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 3)
    cuda = types.SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(distributed=distributed, cuda=cuda))
    with caplog.at_level(logging.DEBUG, "gdn.resolver"):
        resolve()
    assert {r.levelno for r in caplog.records} == {logging.DEBUG}


@pytest.mark.parametrize(("factory", "words"), [("refuse", "too old"), ("crash", "OSError: libacme.so")])
def test_case_78_a_factory_that_fails_is_one_more_refused_candidate(install, caplog, factory, words):
    install(backend("best", rows(factory), tier="preferred"), backend("plain", rows()))
    with caplog.at_level(logging.INFO, "gdn.resolver"):
        triple = resolve()
    assert set(triple.backends.values()) == {"plain"}
    refused = [r for r in triple.report.rejected if r.code == "bind_refused"]
    assert {r.backend for r in refused} == {"best"}
    assert all(words in r.message for r in refused)
    assert any(r.levelno == logging.WARNING and words in r.message for r in caplog.records)
    assert resolve() is triple


def test_case_78_a_required_backend_that_fails_is_an_error(install):
    install(backend("best", rows("crash")), backend("plain", rows()))
    with pytest.raises(gdn.RequirementError, match=r"decode: .* asks for best.*\n.*undefined symbol.*bind_refused"):
        resolve(require="best")


def test_case_56_explicit_choices_are_used_exactly(install):
    install(*(backend(name, rows()) for name in ("aa", "bb", "cc")), backend("none", rows(ops=("decode",))))
    wanted = {"decode": "cc", "extend": "bb", "verify": "aa"}
    triple = resolve(require=wanted)
    assert dict(triple.backends) == wanted
    with pytest.raises(gdn.RequirementError, match=r"verify: .*asks for none.*\n.*op_not_declared"):
        resolve(require={**wanted, "verify": "none"})
    with pytest.raises(gdn.UnknownBackendError, match="did you mean 'none'"):
        resolve(require="nome")


def test_no_backend_at_all_names_every_reason(install):
    install(backend("one", rows(dtypes=["float32"])), backend("two", rows(ops=("decode",))))
    with pytest.raises(gdn.NoBackendError) as caught:
        resolve()
    text = str(caught.value)
    assert "one: " in text
    assert "activation_dtype" in text
    assert "two: the manifest declares no extend row" in text
    assert "gdn-capabilities --device cpu" in text
    assert caught.value.report.chosen["extend"] is None


def test_case_77_a_broken_plugin_never_breaks_resolve(install):
    install(backend("one", rows()), broken=("acme",))
    triple = resolve()
    assert [r.backend for r in triple.report.rejected if r.code == "plugin_broken"][:1] == ["acme"]
    with pytest.raises(gdn.RequirementError, match="ImportError: x"):
        resolve(require="acme")


def test_errors_are_not_cached(install, monkeypatch):
    install(backend("one", rows("crash")))
    with pytest.raises(gdn.NoBackendError):
        resolve()
    monkeypatch.setattr(sys.modules[__name__], "crash", build)
    assert resolve().decode() == ("decode", "decode")


def test_a_machine_that_is_not_here_is_explained_but_not_bound(install):
    install(backend("one", [row(op, factory=f"{__name__}:build") for op in ("decode", "extend", "verify")]))
    assert gdn.explain(CONFIG, device="sm100").complete
    assert gdn.explain(CONFIG, device="sm90").chosen["decode"] == "one"
    with pytest.raises(gdn.UnknownDeviceError, match="what-if"):
        gdn.resolve(CONFIG, device=gdn.DeviceInfo.parse("sm100"))


@pytest.mark.parametrize(
    ("config", "words"),
    [({"num_k_heads": 1}, "num_v_heads"), (None, "got NoneType"), ({**CONFIG.model_dump(), "heads": 3}, "heads")],
)
def test_what_is_no_config(install, config, words):
    install(backend("one", rows()))
    with pytest.raises(gdn.ConfigError, match=words):
        gdn.explain(config, device="cpu")


def test_require_and_exclude_contradict(install):
    install(backend("one", rows()), backend("two", rows()))
    with pytest.raises(gdn.ConfigError, match="one"):
        resolve(require="one", exclude="one")


def test_the_kill_switch_beats_a_requirement(install, monkeypatch):
    install(backend("one", rows()), backend("two", rows()))
    monkeypatch.setenv("GDN_DISABLE_BACKENDS", "one")
    assert resolve().backends["decode"] == "two"
    with pytest.raises(gdn.RequirementError, match="GDN_DISABLE_BACKENDS"):
        resolve(require="one")


def test_a_mapping_serves_as_config(install):
    install(backend("one", rows()))
    assert gdn.resolve(CONFIG.model_dump(), device="cpu").config == CONFIG


def test_the_index_of_the_current_gpu_is_part_of_the_key(monkeypatch):
    cuda = types.SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 1)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert api._current_index() == 1
