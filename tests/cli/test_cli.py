"""gdn-capabilities as an operator calls it: formats, what-if devices, exit codes, bad usage."""

import json
import re

import pytest

from gdn.cli import main
from gdn.config import GdnConfig

SM90 = [
    "--device",
    "sm90",
    "--cuda",
    "13.0",
    "--assume-installed",
    "torch==2.13.0",
    "--assume-installed",
    "triton==3.6.0",
]
CPU = ["--device", "cpu", "--assume-installed", "torch==2.13.0"]
PRESET = ["--config", "qwen3-next-80b-a3b"]


def run(capsys, *arguments):
    code = main(list(arguments))
    streams = capsys.readouterr()
    return code, streams.out, streams.err


def run_json(capsys, *arguments):
    code, out, _ = run(capsys, *arguments, "--format", "json")
    return code, json.loads(out)


def test_json_keys_and_a_full_triple_on_the_cpu(capsys):
    code, data = run_json(capsys, *CPU, *PRESET)
    assert code == 0
    assert list(data) == ["gdn_version", "device", "config", "backends", "resolution"]
    assert data["resolution"]["chosen"]["decode"] == "cpu"
    assert data["device"]["type"] == "cpu"
    assert GdnConfig(**data["config"]).num_v_heads == 32
    assert {b["name"] for b in data["backends"]} >= {"cpu", "triton", "cutedsl", "flashinfer", "npu"}


def test_every_no_has_its_reason(capsys):
    _, data = run_json(capsys, *CPU, *PRESET)
    for backend in data["backends"]:
        for operation in backend["operations"].values():
            assert operation["chosen"] != bool(operation["reasons"])
            assert all(reason["code"] and reason["message"] for reason in operation["reasons"])


def test_the_table_names_device_backends_reasons_and_triple(capsys):
    code, out, _ = run(capsys, *CPU, *PRESET)
    assert code == 0
    for words in ("device cpu", "cutedsl", "head dims", "op_not_declared", "triple decode=cpu extend=cpu verify=cpu"):
        assert words in out


def test_markdown_is_a_table(capsys):
    code, out, _ = run(capsys, *CPU, *PRESET, "--format", "markdown")
    assert code == 0
    assert re.search(r"^\| backend \| runs on ", out, re.MULTILINE)
    assert re.search(r"^\| decode \| cpu \| ", out, re.MULTILINE)


def test_what_if_on_a_machine_that_is_not_here(capsys):
    code, data = run_json(capsys, *SM90, *PRESET)
    assert (data["device"]["sm"], data["device"]["hypothetical"]) == (90, True)
    assert code == (0 if data["resolution"]["complete"] else 1)


def test_exit_1_without_a_triple(capsys):
    code, data = run_json(capsys, "--device", "ascend910b", *PRESET)
    assert code == 1
    assert data["resolution"]["chosen"]["decode"] is None


def test_a_plain_listing_exits_0_even_without_a_triple(capsys):
    assert run(capsys, "--device", "ascend910b")[0] == 0


def test_an_unmet_requirement_exits_1(capsys):
    code, data = run_json(capsys, *CPU, "--require", "npu")
    assert code == 1
    wanted = {"backend": "cpu", "operation": "decode", "code": "policy"}
    assert any(wanted.items() <= rejection.items() for rejection in data["resolution"]["rejected"])


def test_require_prefer_exclude_reach_the_resolver(capsys):
    _, data = run_json(capsys, *CPU, "--exclude", "cpu")
    assert "excluded" in [r["code"] for r in data["resolution"]["rejected"]]
    _, data = run_json(capsys, *CPU, "--prefer", "npu")
    assert {f["preferred"] for f in data["resolution"]["fallbacks"]} == {"npu"}
    code, data = run_json(capsys, *CPU, "--require", "decode=cpu")
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--require", "cpuu"], "did you mean 'cpu'"),
        (["--config", "no-such-preset"], "neither a file nor a preset"),
        (["--device", "warp9"], "warp9"),
        (["--require", "cpu", "--exclude", "cpu"], "forbids"),
        (["--require", "cpu", "--require", "npu"], "two names"),
        (["--require", "flying=cpu"], "operation 'flying'"),
        (["--assume-installed", "!!"], "!!"),
        (["--cuda", "13.0"], "--device"),
    ],
)
def test_bad_usage_exits_2_and_says_why(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert words in err


@pytest.mark.parametrize("arguments", [["--format", "yaml"], ["--no-such-flag"]])
def test_flags_that_do_not_exist_exit_2(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "JSON"),
        ("[]", "expected a JSON object"),
        ('{"num_k_heads": 4}', "num_v_heads"),
        ('{"num_k_heads": 4, "num_v_heads": 6, "head_k_dim": 64, "head_v_dim": 64}', "not a multiple"),
    ],
)
def test_config_files_that_make_no_sense_exit_2(capsys, tmp_path, text, words):
    path = tmp_path / "config.json"
    path.write_text(text)
    code, _, err = run(capsys, *CPU, "--config", str(path))
    assert code == 2
    assert words in err


def test_config_files_of_ours_and_of_models(capsys, tmp_path):
    ours = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 48, "head_v_dim": 80, "activation_dtype": "float16"}
    model = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 48,
        "linear_value_head_dim": 80, "linear_conv_kernel_dim": 4, "dtype": "float16",
    }  # fmt: skip
    path = tmp_path / "config.json"
    answers = []
    for content in (ours, model):
        path.write_text(json.dumps(content))
        code, data = run_json(capsys, *CPU, "--config", str(path))
        assert code == 0
        answers.append(data["config"])
    assert answers[0] == answers[1]


def test_schema_is_json(capsys):
    code, out, _ = run(capsys, "--schema")
    assert code == 0
    assert json.loads(out)["title"] == "BackendManifest"
