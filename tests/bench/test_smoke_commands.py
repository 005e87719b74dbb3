"""The benches that need a model or an engine, as commands, in small."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.tree import repository

COMMANDS = {
    "ttft": ("ttft", "--device", "cpu", "--smoke"),
    "engine": ("engine", "--smoke"),
    "engine-beside": ("engine", "--beside", "--smoke"),
}


@pytest.mark.bench_smoke
@pytest.mark.environments
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_command_runs_and_checks_its_bytes(command: tuple[str, ...]) -> None:
    run = [sys.executable, "-m", "objectcache", "bench", *command]
    done = subprocess.run(run, capture_output=True, text=True, cwd=repository(), timeout=890)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
