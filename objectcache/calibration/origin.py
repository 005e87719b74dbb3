"""Where figures come from: when, of which commit, on which machine."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

GIT_TIMEOUT_S = 10
PACKAGES = ("aiohttp", "awscrt", "boto3", "nixl-cu12", "numpy", "obstore", "uvloop")
ROOT = Path(__file__).resolve().parents[2]


def python_path() -> str:
    """PYTHONPATH for a process of ours: this checkout or installation, then what there is."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def describe_commit() -> dict[str, Any]:
    """`commit`, `tree` and `has_local_changes`, all None where this is no git checkout of ours. The tree names the
    files that were measured, also after their commit was written again with another author or parent.
    """
    top, _, commits = _git("rev-parse", "--show-toplevel", "HEAD", "HEAD^{tree}").partition("\n")
    if not top or Path(top).resolve() != ROOT:
        return {"commit": None, "tree": None, "has_local_changes": None}
    commit, _, tree = commits.partition("\n")
    return {"commit": commit, "tree": tree, "has_local_changes": bool(_git("status", "--porcelain"))}


def describe_machine() -> dict[str, Any]:
    """Processor, memory in bytes, kernel and the versions that matter."""
    return {
        "cpu_model": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe_origin() -> dict[str, Any]:
    """Now and here."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"measured_at": now, **describe_commit(), "machine": describe_machine()}
