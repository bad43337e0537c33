"""Importing gdn, explaining and listing load no framework."""

import importlib.util
import subprocess
import sys

import pytest

HEAVY = "{'torch', 'triton', 'numpy', 'transformers', 'cutlass', 'flashinfer', 'torch_npu', 'hypothesis', 'pytest'}"


@pytest.mark.parametrize(
    "code",
    [
        "import gdn",
        "import gdn; gdn.backends()",
        "import gdn; gdn.distributed.resolve",
        "import gdn; gdn.backends(); import gdn.backends.triton; assert gdn.backends() is gdn.backends()",
        "import gdn.backends.cpu; import gdn; assert {s.name for s in gdn.backends()} >= {'cpu', 'triton'}",
        "import gdn; gdn.explain(gdn.presets()['qwen3-next-80b-a3b'], device=gdn.DeviceInfo.parse('sm90'))",
        "import gdn; gdn.explain(gdn.presets()['qwen3.5-27b'], device='cpu')",
        "from gdn.cli import main; main(['--device', 'sm90', '--config', 'qwen3-next-80b-a3b'])",
        "from gdn.cli import main; main(['--schema'])",
    ],
)
def test_no_framework_is_imported(code):
    check = f"import sys\n{code}\nloaded = {HEAVY} & set(sys.modules)\nassert not loaded, loaded"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


SERVING = {"Batch", "GdnAttention", "LayerParams", "StatePool"}
"""Names of the serving layer: classes over tensors, so they need torch."""


def test_every_public_name_is_there():
    unavailable = set() if importlib.util.find_spec("torch") else SERVING
    code = f"import gdn; names = [getattr(gdn, n) for n in gdn.__all__ if n not in {unavailable}]; assert dir(gdn) == sorted(gdn.__all__); gdn.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "AttributeError: module 'gdn' has no attribute 'nothing'"


def test_a_torch_that_fails_to_import_changes_nothing():
    code = """
import sys, types
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise OSError("libtorch.so: cannot open shared object file")
sys.meta_path.insert(0, Broken())
import gdn
from gdn.cli import main
device = gdn.detect_device()
assert device.type == "cpu", device
assert any("torch is broken" in p for p in device.problems), device.problems
assert main([]) == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr + done.stdout
