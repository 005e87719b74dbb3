"""Starts the stores of a comparison, and their processes; those that cannot run are named with the reason."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from bench.beds.kv_peers.install import LMCACHE, MOONCAKE
from bench.beds.kv_peers.running import running_owner
from bench.beds.kv_stores.adapter import Replay, Replayed
from bench.beds.processes import BaselineError, Child, failure_of, free_port, last_words, serving_program
from bench.core.lines import from_line, to_line
from calibration.servers import BUCKET, running_server

CHECK_TIMEOUT_S = 120.0
START_TIMEOUT_S = 30.0
REPLAY_TIMEOUT_S = 600.0


class StoreName(Enum):
    """Stores of KV blocks that have an adapter."""

    OBJECTCACHE = "objectcache"
    FILES = "files"
    LMCACHE = "lmcache"
    HDF5 = "hdf5"
    REDIS = "redis"
    MOONCAKE = "mooncake"


SAID = {
    StoreName.OBJECTCACHE: "ObjectCache, block by block over HTTP",
    StoreName.FILES: "a file for each block",
    StoreName.LMCACHE: "LMCache, FSConnector",
    StoreName.HDF5: "HDF5 (h5py), one file",
    StoreName.REDIS: "Redis (hiredis)",
    StoreName.MOONCAKE: "Mooncake Store, TCP",
}
WITHOUT = {
    "PDC": "not on PyPI and not in Debian; built from source it needs Mercury and MPI, and a server on a parallel file "
    "system, which this machine lacks"
}
"""What CASCADE compares with and has no adapter here, with the reason."""
NEEDS: Mapping[StoreName, tuple[str, str]] = {
    StoreName.LMCACHE: (str(LMCACHE.python), "lmcache.v1.storage_backend.connector.fs_connector"),
    StoreName.MOONCAKE: (str(MOONCAKE.python), "mooncake.store"),
    StoreName.HDF5: (sys.executable, "h5py"),
    StoreName.REDIS: (sys.executable, "redis"),
}
"""Interpreter and module; the others need nothing."""


@dataclass(frozen=True, slots=True)
class RunningStore:
    """A store, and the process that has its adapter. `stored_bytes` is what the store's files take; None for one in
    memory.
    """

    name: StoreName
    child: Child
    folder: Path
    data: Path | None

    def replay(self, work: Replay) -> Replayed:
        """Play prompts. Raises BaselineError."""
        file = self.folder / "work.json"
        file.write_text(to_line(work))
        self.child.tell(str(file))
        return from_line(Replayed, self.child.answer(timeout_s=REPLAY_TIMEOUT_S))

    def stored_bytes(self) -> int | None:
        """The bytes that the file system has allocated for the store's files; None for a store in memory."""
        if self.data is None:
            return None
        return sum(path.stat().st_blocks * 512 for path in self.data.rglob("*") if path.is_file())


def start(name: StoreName, block_bytes: int, nbytes_max: int, parent: Path | None, stack: ExitStack) -> RunningStore:
    """Start a store for at most so many bytes; `stack` ends it. Raises BaselineError, LocalServerError."""
    python, module = NEEDS.get(name, (sys.executable, ""))
    if module:
        if not Path(python).exists():
            raise BaselineError("not installed: make peers")
        problem = failure_of([python, "-c", f"import {module}"], CHECK_TIMEOUT_S)
        if problem is not None:
            raise BaselineError(problem)
    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="objectcache-store-", dir=parent)))
    arguments, data = STARTS[name](place, block_bytes, nbytes_max, stack)
    try:
        child = Child("bench.beds.kv_stores.worker", name.value, place, *arguments, python=python)
    except BaselineError as error:
        raise BaselineError(last_words(place / "log") or str(error)) from error
    stack.callback(child.close)
    return RunningStore(name, child, place, data)


def _ours(place: Path, block_bytes: int, nbytes_max: int, stack: ExitStack) -> tuple[Sequence[str], Path | None]:
    server = stack.enter_context(running_server(place))
    return (server.url, server.access_key, server.secret_key, BUCKET), server.data / "extents"


def _files(place: Path, block_bytes: int, nbytes_max: int, stack: ExitStack) -> tuple[Sequence[str], Path | None]:
    return (), place / "blocks"


def _lmcache(place: Path, block_bytes: int, nbytes_max: int, stack: ExitStack) -> tuple[Sequence[str], Path | None]:
    return (str(block_bytes),), place / "blocks"


def _hdf5(place: Path, block_bytes: int, nbytes_max: int, stack: ExitStack) -> tuple[Sequence[str], Path | None]:
    return (), place


def _redis(place: Path, block_bytes: int, nbytes_max: int, stack: ExitStack) -> tuple[Sequence[str], Path | None]:
    program = shutil.which("redis-server")
    if program is None:
        raise BaselineError("redis-server not installed (Debian: redis-server)")
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    stack.enter_context(serving_program(command, place / "redis.log", port, START_TIMEOUT_S, place))
    return (f"127.0.0.1:{port}",), None


def _mooncake(place: Path, block_bytes: int, nbytes_max: int, stack: ExitStack) -> tuple[Sequence[str], Path | None]:
    master, _ = stack.enter_context(running_owner(MOONCAKE.folder / "bin", nbytes_max, place))
    return (master,), None


Start = Callable[[Path, int, int, ExitStack], tuple[Sequence[str], Path | None]]
"""Starts a store; returns the adapter's arguments, and the folder of its files."""
STARTS: Mapping[StoreName, Start] = {
    StoreName.OBJECTCACHE: _ours,
    StoreName.FILES: _files,
    StoreName.LMCACHE: _lmcache,
    StoreName.HDF5: _hdf5,
    StoreName.REDIS: _redis,
    StoreName.MOONCAKE: _mooncake,
}
