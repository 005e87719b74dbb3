"""A memory file system of a few MiB, in a mount namespace that a process holds."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """`prefix` is a command that runs another inside; `inside` and `outside` are one folder of it, seen from there and
    from this process.
    """

    prefix: tuple[str, ...]
    inside: Path
    outside: Path


@contextlib.contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[SmallDisk]:
    """Mounted while the block runs."""
    mount = f"mount -t tmpfs -o size={nbytes} small {folder} && echo mounted && exec cat"
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != "mounted\n":
            pytest.skip("this host lets its tests mount nothing")
        prefix = ("nsenter", "-t", str(holder.pid), "-U", "-m", "--preserve-credentials")
        yield SmallDisk(prefix, folder / "data", Path(f"/proc/{holder.pid}/root{folder}/data"))
