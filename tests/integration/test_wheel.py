"""The wheel beside others: what it installs has names that no neighbour installs, and works after them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.tree import repository

ASKED_FOR = {"descriptors", "gateway", "nixl_client", "storage_server"}
"""Top-level packages whose names were asked for; PyPI has one distribution of such a name, `descriptors`."""
NEIGHBOURS = ("adapters", "calibration", "kv_codecs", "orchestrator", "bench", "demo", "docker", "fuzz", "tests")
"""Names that other distributions install, `adapters` and `orchestrator` of PyPI among them, or that a folder of a
checkout has.
"""


def installed_wheel(folder: Path) -> Path:
    """A folder with what the wheel of a copy of this checkout installs."""
    source, target = folder / "source", folder / "target"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "objectcache", *sorted(ASKED_FOR)):
        path = repository() / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(path, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(source)], check=True, timeout=100)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


@pytest.mark.slow
def test_the_wheel_works_beside_distributions_that_install_likely_names(tmp_path: Path) -> None:
    target = installed_wheel(tmp_path)
    tops = {path.name for path in target.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"objectcache", *ASKED_FOR}
    assert all((target / name / "py.typed").is_file() for name in tops)
    for name in NEIGHBOURS:
        (target / name).mkdir()
        (target / name / "__init__.py").write_text(f"raise ImportError('this is the other {name}')\n")
    script = (
        "import objectcache, objectcache.cli.main, objectcache.orchestrator.process, objectcache.calibration.measure\n"
        "for name in objectcache.__all__: getattr(objectcache, name)\n"
        "print(objectcache.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(target / "objectcache" / "__init__.py")
    command = [sys.executable, "-P", "-m", "objectcache", "bench", "aggregate", "--smoke"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "checkout" in done.stderr) == (2, True)
    points = (next(target.glob("*.dist-info")) / "entry_points.txt").read_text()
    assert "objectcache = nixl_client.connectors.vllm.plugin:register" in points
