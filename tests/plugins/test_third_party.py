"""Really installed third-party backends: a good one is used, a broken one is shown and breaks nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.plugins.distributions import MODULES
from tests.plugins.distributions import STAGES
from tests.plugins.distributions import write_distributions


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which pip installed every distribution."""
    folder = tmp_path_factory.mktemp("plugins")
    sources = folder / "sources"
    sources.mkdir()
    trees = map(str, write_distributions(sources))
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-index")
    target = folder / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", str(target), *trees], check=True)
    return target


def run(site, *command, **environment):
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(site), **environment},
    )  # fmt: skip


def python(site, code, **environment):
    done = run(site, "-c", code, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def statuses(site):
    code = "import gdn, json; print(json.dumps([s.to_dict() for s in gdn.backends()]))"
    return {s["entry_point"].split(" = ")[0]: s for s in python(site, code) if not s["builtin"]}


def test_every_distribution_is_listed(statuses):
    assert statuses.keys() == MODULES.keys()


@pytest.mark.parametrize("entry", STAGES)
def test_a_broken_plugin_is_listed_with_its_stage_and_error(statuses, entry):
    stage, words = STAGES[entry]
    status = statuses[entry]
    assert not status["ok"]
    assert status["stage"] == stage
    assert words in status["error"]
    assert status["distribution"] == f"gdn-{entry}"
    assert status["version"] == "1.2.3"


def test_the_good_one_loads(statuses):
    assert statuses["acme"]["ok"]
    assert statuses["acme"]["manifest"]["name"] == "acme"


RESOLVE = """
import gdn, json
config = gdn.GdnConfig(num_k_heads=1, num_v_heads=1, head_k_dim=8, head_v_dim=8)
triple = gdn.resolve(config, device="cpu", require="acme")
print(json.dumps([triple.decode(), triple.extend()]))
"""


def test_the_good_one_is_resolved_and_called(site):
    assert python(site, RESOLVE) == ["decode", "extend"]


EXPLAIN = """
import gdn, json
config = gdn.GdnConfig(num_k_heads=1, num_v_heads=1, head_k_dim=8, head_v_dim=8)
report = gdn.explain(config, device="cpu", assume_installed=("torch==2.13.0",))
broken = sorted({r.backend for r in report.rejected if r.code == "plugin_broken"})
print(json.dumps([report.chosen["decode"], broken]))
"""


def test_explain_goes_on_and_names_the_broken(site):
    chosen, broken = python(site, EXPLAIN)
    assert chosen == "cpu"
    assert {"missing-library", "future", "twin"} <= set(broken)
    assert "cpu" not in broken


def test_the_cli_shows_them(site):
    done = run(site, "-m", "gdn.cli", "--device", "cpu", "--format", "json", "--assume-installed", "torch==2.13.0")
    assert done.returncode == 0, done.stderr
    shown = {b["name"]: b for b in json.loads(done.stdout)["backends"]}
    assert shown["missing-library"]["stage"] == "load"
    table = run(site, "-m", "gdn.cli", "--device", "cpu").stdout
    assert "missing-library" in table
    assert "stage" in table


def test_each_failure_is_warned_about_with_its_remedy(site):
    done = run(site, "-c", "import gdn; gdn.backends()")
    assert "pip uninstall gdn-missing-library" in done.stderr


def test_strict_plugins_make_it_an_error(site):
    done = run(site, "-c", "import gdn; gdn.backends()", GDN_STRICT_PLUGINS="1")
    assert done.returncode == 1
    assert "PluginError" in done.stderr


def test_an_allow_list_keeps_others_out(site):
    code = "import gdn, json; print(json.dumps([s.name for s in gdn.backends() if not s.builtin]))"
    assert python(site, code, GDN_PLUGINS="gdn-acme, gdn-invalid") == ["acme", "invalid"]


def test_a_missing_install_is_a_clear_error(tmp_path):
    import gdn

    package = os.path.dirname(gdn.__file__)
    (tmp_path / "gdn").symlink_to(package)
    code = """
import sys
sys.path = [p for p in sys.path if p]
from importlib import metadata
original = metadata.entry_points
metadata.entry_points = lambda **kw: [p for p in original(**kw) if p.dist.name != "gdn"]
import gdn
try:
    gdn.backends()
except gdn.InstallationError as error:
    assert "install it again" in str(error), error
else:
    raise SystemExit("no error")
"""
    done = run(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
