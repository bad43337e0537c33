"""The example backend as its author ships it: installed by pip in an environment of its own, used, and removed again."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import gdn

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/gdn-backend-example"
PAGE = ROOT / "docs/write-a-backend.md"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A folder with an environment that sees this one's packages, and the example's sources."""
    folder = tmp_path_factory.mktemp("outside")
    venv.create(folder / "venv", with_pip=False)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    seen = [sysconfig.get_path("purelib"), str(Path(gdn.__file__).parents[1])]
    (site / "parent.pth").write_text("\n".join(seen))
    shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def python(outside):
    """Run its interpreter, outside of the checkout."""

    def run(*arguments, check=True):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment = {k: v for k, v in environment.items() if k != "PYTHONPATH" and not k.startswith("GDN_")}
        command = [str(outside / "venv/bin/python"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=outside, env=environment, timeout=300)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def chosen(python, **options):
    code = (
        "import gdn, json\n"
        "config = gdn.GdnConfig(num_k_heads=1, num_v_heads=2, head_k_dim=32, head_v_dim=32)\n"
        f"triple = gdn.resolve(config, device='cpu', **{options!r})\n"
        "print(json.dumps([dict(triple.backends), triple.decode.__module__, triple.key]))"
    )
    return json.loads(python("-c", code).splitlines()[-1])


@pytest.fixture(scope="module")
def story(outside, python):
    """What resolve says before, with and after the package."""
    to = ("--python", str(outside / "venv/bin/python"))
    told = {"before": chosen(python)}
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([*PIP, *to, "install", *options, str(outside / "source")], check=True)
    told["plain"] = chosen(python)
    told["preferred"] = chosen(python, prefer="example")
    told["where"] = python("-c", "import gdn_backend_example; print(gdn_backend_example.__file__)")
    told["table"] = python("-m", "gdn.cli", "--device", "cpu")
    told["json"] = json.loads(python("-m", "gdn.cli", "--device", "cpu", "--format", "json"))
    told["tests"] = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not large", "source/tests", check=False
    )
    subprocess.run([*PIP, *to, "uninstall", "--yes", "gdn-backend-example"], check=True)
    told["after"] = chosen(python)
    return told


def test_it_is_used_where_it_is_preferred(story):
    backends, module, _ = story["preferred"]
    assert (backends["decode"], module) == ("example", "gdn_backend_example.decode")
    assert backends["extend"] == backends["verify"] == "cpu"
    assert str(ROOT) not in story["where"]


def test_it_changes_nothing_unasked(story):
    assert story["plain"] == story["before"]


def test_removing_it_restores_the_former_triple(story):
    assert story["after"] == story["before"] != story["preferred"]


def test_gdn_capabilities_shows_it(story):
    assert "example" in story["table"]
    (shown,) = [backend for backend in story["json"]["backends"] if backend["name"] == "example"]
    assert (shown["ok"], shown["distribution"], shown["version"]) == (True, "gdn-backend-example", "0.1.0")


def test_its_own_tests_pass(story):
    summary = story["tests"].splitlines()[-1]
    passed = re.search(r"(\d+) passed", summary)
    assert "failed" not in summary, story["tests"]
    assert "error" not in summary, story["tests"]
    assert passed, story["tests"]
    assert int(passed[1]) > 100, "the conformance run reached fewer tests than it must"


def test_the_tutorial_is_the_package():
    blocks = dict(re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', PAGE.read_text(), re.DOTALL))
    files = {str(path.relative_to(EXAMPLE)) for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml")}
    assert blocks.keys() == files
    for name, code in blocks.items():
        assert code == (EXAMPLE / name).read_text(), f"{PAGE.name} shows another {name}"
