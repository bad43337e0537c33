"""Build the wheel, install it in a clean environment outside the checkout, and use it there."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILT_IN = {"cpu", "triton", "cutedsl", "flashinfer", "npu"}


def run(*command: str | Path, cwd: Path) -> str:
    return subprocess.run([str(part) for part in command], cwd=cwd, check=True, capture_output=True, text=True).stdout


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        outside = Path(folder)
        run(sys.executable, "-m", "build", "--wheel", "--outdir", outside / "dist", ROOT, cwd=outside)
        (wheel,) = (outside / "dist").glob("gdn-*.whl")
        tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
        assert all(top == "gdn" or top.endswith(".dist-info") for top in tops), f"the wheel carries more: {tops}"
        assert "gdn/py.typed" in zipfile.ZipFile(wheel).namelist()
        venv.create(outside / "venv", with_pip=True)
        binaries = outside / "venv" / "bin"
        run(binaries / "pip", "install", "--quiet", wheel, cwd=outside)
        listing = json.loads(run(binaries / "gdn-capabilities", "--format", "json", cwd=outside))
        names = {backend["name"] for backend in listing["backends"] if backend["ok"]}
        assert names == BUILT_IN, f"expected the five built-in backends, got {names}"
        assert not listing["resolution"]["complete"], "no torch here, yet a triple was found"
        where = run(binaries / "python", "-c", "import gdn; print(gdn.__file__)", cwd=outside)
        assert str(outside) in where, f"the checkout was imported instead of the wheel: {where}"
    print(f"{wheel.name}: installed and answered outside the checkout")
    return 0


if __name__ == "__main__":
    sys.exit(main())
