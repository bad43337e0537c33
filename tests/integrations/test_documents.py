"""What the README and the quick start promise: their code runs, and so does the example behind `make run`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNNABLE = {"README.md": 1, "docs/index.md": 2, "docs/serving.md": 1}
"""How many code blocks of each page, from its first, stand on their own."""


def blocks():
    for page, count in RUNNABLE.items():
        found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        for number, code in enumerate(found[:count]):
            yield pytest.param(code, id=f"{page}-{number}")


def run(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
    )  # fmt: skip


@pytest.mark.parametrize("code", list(blocks()))
def test_code_of_the_documents_runs(code):
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


def test_the_readme_shows_a_padded_row_as_zeros():
    code = next(blocks()).values[0]
    assert "torch.Size([1, 2, 8, 128]) tensor(0." in run("-c", code).stdout


@pytest.mark.parametrize("model", ["qwen3-next", "qwen3.5", "qwen3.5-moe"])
def test_the_example_generates_the_same_tokens_both_ways(model):
    pytest.importorskip("transformers")
    options = ("--device", "cpu", "--prompt-length", "70", "--new-tokens", "4", "--batch", "1")
    done = run("examples/generate.py", "--model", model, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "greedy tokens equal" in done.stdout
    assert "triple decode=cpu" in done.stdout
    assert re.search(r"^gdn +[\d,]+ +[\d,]+$", done.stdout, re.MULTILINE)


def test_the_server_gives_the_tokens_of_greedy_decoding_with_and_without_drafts():
    pytest.importorskip("transformers")
    options = ("--device", "cpu", "--requests", "4", "--slots", "3", "--prompt-length", "70", "--new-tokens", "40")
    done = run("examples/serve.py", *options, "--chunk", "33")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens equal those of transformers' greedy decoding" in done.stdout
    assert "triple decode=cpu" in done.stdout
    greedy, drafted = (
        re.search(rf"^{name} +[\d,]+ +(\d+).* equal$", done.stdout, re.MULTILINE)
        for name in ("greedy", "n-gram drafts")
    )
    accepted, proposed = re.search(r"(\d+) of (\d+)", drafted[0]).groups()
    assert 0 < int(accepted) < int(proposed)
    assert int(drafted[1]) < int(greedy[1])
