"""Three gloo processes resolve together, on machines that are made to differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gdn

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
WORLD = 3
CORE = ("decode", "extend", "verify")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank got, by scenario."""
    rendezvous = f"file://{tmp_path_factory.mktemp('group')}/store"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GDN_")}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), environment.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "tests.distributed.worker"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD), rendezvous],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(errors for _, errors in outputs)
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def results(ranks, scenario):
    """The scenario's result on each rank; every rank chose alike."""
    played = [rank[scenario] for rank in ranks]
    assert all("result" in one for one in played), played
    found = [one["result"] for one in played]
    assert len({one["key"] for one in found}) == 1
    assert all(one["chosen"] == found[0]["chosen"] for one in found)
    return found


def errors(ranks, scenario):
    return [(rank[scenario].get("error"), rank[scenario].get("text", "")) for rank in ranks]


def messages(result, backend, code):
    return {message for name, _, kind, message in result["rejected"] if (name, kind) == (backend, code)}


def core(result):
    return {result["chosen"][operation] for operation in CORE}


def test_the_built_in_backends_serve_every_rank(ranks):
    for result in results(ranks, "builtin_backends"):
        assert core(result) == {"cpu"}
        assert result["function"].startswith("gdn.backends.cpu")


def test_a_backend_disabled_on_one_rank_is_used_on_none(ranks):
    found = results(ranks, "disabled_on_1")
    assert core(found[0]) == {"slow"}
    assert messages(found[0], "fast", "disabled") == {"rank 1: switched off by GDN_DISABLE_BACKENDS"}
    assert messages(found[1], "fast", "disabled") == {"switched off by GDN_DISABLE_BACKENDS"}
    assert messages(found[2], "fast", "disabled") == messages(found[0], "fast", "disabled")


def test_a_factory_that_refuses_on_one_rank_counts_for_all(ranks):
    found = results(ranks, "refused_on_2")
    assert core(found[0]) == {"slow"}
    assert messages(found[0], "fast", "bind_refused") == {"rank 2: no compiler on this host"}
    assert messages(found[2], "fast", "bind_refused") == {"no compiler on this host"}


def test_a_kernel_that_fails_to_load_on_one_rank_counts_for_all(ranks):
    found = results(ranks, "crashing_on_1")
    assert core(found[2]) == {"slow"}
    assert messages(found[2], "fast", "bind_refused") == {"rank 1: OSError: libfast.so: undefined symbol: go"}


def test_a_backend_that_one_rank_lacks_is_used_on_none(ranks):
    found = results(ranks, "not_installed_on_0")
    assert core(found[0]) == {"slow"}
    assert messages(found[1], "fast", "requires_missing") == {"rank 0: no backend fast is installed there"}


def test_an_operation_around_the_triple_that_one_rank_lacks_is_left_out(ranks):
    found = results(ranks, "no_packed_decode_on_1")
    assert core(found[0]) == {"one"}
    assert found[0]["chosen"]["packed_decode"] is None
    assert any(message.startswith("rank 1: ") for message in messages(found[0], "one", "packed_decode"))


def test_the_state_contract_is_one_that_all_serve(ranks):
    found = results(ranks, "only_bfloat16_on_2")
    assert [one["state"][0] for one in found] == ["bfloat16"] * WORLD


def test_the_strictest_alignment_and_the_most_scratch_slots_hold_for_all(ranks):
    found = results(ranks, "strictest_contract")
    assert [one["state"] for one in found] == [["float32", 64, 3]] * WORLD
    assert [one["called"] for one in found] == [["decode", 64]] * WORLD, "factories get the joint contract"


def test_different_versions_are_noted(ranks):
    for result in results(ranks, "versions"):
        assert result["notes"] == ["one differs: gdn-one 1 on ranks 0, 2, gdn-one 2 on rank 1"]


def test_the_first_rank_orders(ranks):
    found = results(ranks, "preference_of_0")
    assert core(found[1]) == {"two"}
    assert messages(found[1], "one", "policy") == {"rank 0 chose two for all"}


def test_a_preference_that_another_rank_cannot_meet_is_a_fallback(ranks):
    found = results(ranks, "unmet_preference")
    assert ["decode", "fast", "slow", "disabled", "rank 1: switched off by GDN_DISABLE_BACKENDS"] in found[0][
        "fallbacks"
    ]
    assert any(level == "WARNING" and "rank 1" in text for level, text in ranks[0]["unmet_preference"]["log"])


def test_what_one_rank_requires_holds_for_all(ranks):
    found = results(ranks, "required_by_2")
    assert core(found[0]) == {"slow"}
    assert messages(found[0], "fast", "policy") == {"rank 2: GDN_BACKEND asks for slow"}


def test_a_requirement_that_cannot_be_met_is_the_same_error_everywhere(ranks):
    found = errors(ranks, "requirement_unmet")
    assert {name for name, _ in found} == {"RequirementError"}
    assert "rank 2: require asks for slow" in found[0][1]
    assert len({text for _, text in found}) == 1


def test_no_triple_is_the_same_error_everywhere_with_the_ranks_in_its_text(ranks):
    found = errors(ranks, "nobody")
    assert {name for name, _ in found} == {"NoBackendError"}
    assert len({text for _, text in found}) == 1
    assert "decode: slow: rank 1: switched off by GDN_DISABLE_BACKENDS [disabled]" in found[0][1]


def test_a_rank_that_raises_keeps_nobody_waiting(ranks):
    found = errors(ranks, "unknown_name_on_1")
    assert [name for name, _ in found] == ["RankError", "UnknownBackendError", "RankError"]
    assert found[2][1].startswith("rank 1 failed while all ranks resolved together: UnknownBackendError: exclude names")


def test_different_configs_are_refused_everywhere(ranks):
    found = errors(ranks, "configs_differ")
    assert set(found) == {("ConfigError", "ranks 0 and 2 resolve different configs: num_v_heads 4 and 8")}


def test_a_device_of_another_machine_cannot_be_bound(ranks):
    found = errors(ranks, "hypothetical_device_on_1")
    assert [name for name, _ in found] == ["RankError", "UnknownDeviceError", "RankError"]


def test_explain_answers_for_mixed_gpus(ranks):
    found = results(ranks, "mixed_gpus")
    assert core(found[0]) == {"any"}
    assert messages(found[0], "hopper", "sm_range") == {"ranks 1-2: device is SM120, needs SM90"}


def test_explain_shows_what_is_missing_where(ranks):
    found = [rank["incomplete_explanation"]["result"] for rank in ranks]
    assert [one["state"] for one in found] == [None] * WORLD
    assert core(found[1]) == {None}
    assert messages(found[1], "hopper", "sm_range") == {"rank 0: device is SM80, needs SM90"}


def test_a_subgroup_resolves_alone_and_names_world_ranks(ranks):
    outside, *inside = (rank["subgroup"] for rank in ranks)
    assert (outside["error"], outside["text"]) == ("ConfigError", "rank 0 is not in the group")
    assert inside[0]["result"]["key"] == inside[1]["result"]["key"]
    assert core(inside[0]["result"]) == {"slow"}
    assert messages(inside[0]["result"], "fast", "disabled") == {"rank 2: switched off by GDN_DISABLE_BACKENDS"}


def test_the_first_rank_logs_and_the_others_keep_quiet(ranks):
    for scenario, first in (("disabled_on_1", 0), ("subgroup", 1)):
        for number, rank in enumerate(ranks):
            levels = [level for level, text in rank[scenario]["log"] if text.startswith("triple ")]
            expected = [] if number < first else ["INFO" if number == first else "DEBUG"]
            assert levels == expected, (scenario, number)
    assert ["INFO", "decode: fast lost to slow: rank 1: switched off by GDN_DISABLE_BACKENDS [disabled]"] in (
        ranks[0]["disabled_on_1"]["log"]
    )


def test_without_a_process_group_the_error_says_what_to_do():
    with pytest.raises(gdn.ConfigError, match="init_process_group"):
        gdn.distributed.resolve(gdn.presets()["gigachat3.5"])
