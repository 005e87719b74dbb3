"""docs/start/quick-start.md: its commands as written, in their order, in a network of their own (port 9000)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.tree import repository

PAGE = repository() / "docs" / "start" / "quick-start.md"
WAIT = "timeout 60 bash -c 'until grep -q listening serve.log; do sleep 0.1; done'"
TIMEOUT_S = 180


def blocks() -> list[str]:
    """The commands of each block of the page."""
    return re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)


def script() -> str:
    """All blocks: the one that serves goes on in the background, as in a terminal of its own."""
    parts = ["set -eu -o pipefail", "ip link set lo up"]
    for block in blocks():
        if block.startswith("objectcache serve "):
            parts += [f"{{ exec {block.strip()}; }} > serve.log 2>&1 &", "server=$!", "trap 'kill $server' EXIT", WAIT]
        else:
            parts.append(block.replace("make install\n", ""))  # .venv is that of the test
    return "\n".join([*parts, "cmp back.md README.md"])


@pytest.mark.slow
def test_the_quick_start_runs_as_it_is_written(tmp_path: Path) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--net"]
    if shutil.which("ip") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this host gives its tests no network of their own")
    assert len(blocks()) == 5
    (tmp_path / ".venv").symlink_to(repository() / ".venv")
    shutil.copy(repository() / "README.md", tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "OBJECTCACHE_"))}
    environment["HOME"] = str(tmp_path)
    command = [*unshare, "bash", "-c", script()]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    told = ended.stdout + ended.stderr + (tmp_path / "serve.log").read_text()
    assert ended.returncode == 0, told
    assert re.search(r"good +key and bucket +http://127\.0\.0\.1:9000: ok, bucket kv-cache", ended.stdout), told
    assert "notes/README.md" in ended.stdout, told
    assert "deleted 1 objects" in ended.stdout, told
    assert "next        objectcache status http://127.0.0.1:9000" in (tmp_path / "serve.log").read_text()
