"""Metadata of an orchestrator that is killed at any point."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from objectcache.orchestrator.metadata import Metadata

_WRITER = """
import sys
from pathlib import Path
from objectcache.orchestrator.metadata import Metadata, RegisteredEngine
metadata = Metadata(Path(sys.argv[1]))
for number in range(10**9):
    metadata.add_engine(RegisteredEngine(f"http://{number}:1", str(number), "{}"))
    print(number, flush=True)
"""


def test_a_kill_at_any_point_loses_no_acknowledged_registration(tmp_path: Path) -> None:
    for number in range(4):
        folder = tmp_path / str(number)
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(folder)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.05 * number)  # it registers meanwhile: the moments to kill it at are what is tried
        process.send_signal(signal.SIGKILL)
        told = [int(line) for line in process.stdout.read().split()]
        process.stdout.close()
        process.wait()
        metadata = Metadata(folder)
        names = {each.name for each in metadata.engines()}
        metadata.close()
        assert names >= {str(each) for each in [0, *told]}
