"""A folder for what a test run makes once: logs of servers, certificates."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path


@cache
def run_folder() -> Path:
    """A folder of this process, which goes when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="objectcache-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
