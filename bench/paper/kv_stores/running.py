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
from bench.beds.processes import BaselineError, Child, failure_of, free_port, last_words, serving_program
from bench.core.lines import from_line, to_line
from bench.paper.kv_stores.adapter import Replay, Replayed
from objectcache.calibration.servers import BUCKET, running_server

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


WITHOUT = {
    "PDC": "not on PyPI and not in Debian; built from source it needs Mercury and MPI, and a server on a parallel file "
    "system, which this machine lacks"
}
"""What CASCADE compares with and has no adapter here, with the reason."""


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
    store = STORES[name]
    if store.needs:
        if not store.python.exists():
            raise BaselineError("not installed: make peers")
        problem = failure_of([str(store.python), "-c", f"import {store.needs}"], CHECK_TIMEOUT_S)
        if problem is not None:
            raise BaselineError(problem)
    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="objectcache-store-", dir=parent)))
    arguments, data = store.start(place, block_bytes, nbytes_max, stack)
    try:
        child = Child("bench.paper.kv_stores.worker", *store.adapter, place, *arguments, python=store.python)
    except BaselineError as error:
        raise BaselineError(last_words(place / "log") or str(error)) from error
    stack.callback(child.close)
    return RunningStore(name, child, place, data)


Started = tuple[Sequence[str], Path | None]
"""The adapter's arguments, and the folder of the store's files."""


def _ours(place: Path, block_bytes: int, nbytes_max: int, stack: ExitStack) -> Started:
    server = stack.enter_context(running_server(place))
    return (server.url, server.access_key, server.secret_key, BUCKET), server.data / "extents"


def _in_blocks(place: Path, *_: object) -> Started:
    return (), place / "blocks"


def _redis(place: Path, block_bytes: int, nbytes_max: int, stack: ExitStack) -> Started:
    program = shutil.which("redis-server")
    if program is None:
        raise BaselineError("redis-server not installed (Debian: redis-server)")
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    stack.enter_context(serving_program(command, place / "redis.log", port, START_TIMEOUT_S, place))
    return (f"127.0.0.1:{port}",), None


def _mooncake(place: Path, block_bytes: int, nbytes_max: int, stack: ExitStack) -> Started:
    master, _ = stack.enter_context(running_owner(MOONCAKE.folder / "bin", nbytes_max, place))
    return (master,), None


@dataclass(frozen=True, slots=True)
class Store:
    """A store as people read it, its adapter's module and class, how it is started, and what interpreter can import."""

    said: str
    adapter: tuple[str, str]
    start: Callable[[Path, int, int, ExitStack], Started]
    needs: str = ""
    python: Path = Path(sys.executable)


STORES: Mapping[StoreName, Store] = {
    StoreName.OBJECTCACHE: Store("ObjectCache, block by block over HTTP", ("adapters", "ObjectCacheAdapter"), _ours),
    StoreName.FILES: Store("a file for each block", ("adapters", "FilesAdapter"), _in_blocks),
    StoreName.LMCACHE: Store(
        "LMCache, FSConnector",
        ("lmcache_adapter", "LMCacheAdapter"),
        lambda place, block_bytes, *_: ((str(block_bytes),), place / "blocks"),
        "lmcache.v1.storage_backend.connector.fs_connector",
        LMCACHE.python,
    ),
    StoreName.HDF5: Store("HDF5 (h5py), one file", ("adapters", "Hdf5Adapter"), lambda place, *_: ((), place), "h5py"),
    StoreName.REDIS: Store("Redis (hiredis)", ("adapters", "RedisAdapter"), _redis, "redis"),
    StoreName.MOONCAKE: Store(
        "Mooncake Store, TCP", ("mooncake_adapter", "MooncakeAdapter"), _mooncake, "mooncake.store", MOONCAKE.python
    ),
}
SAID = {name: store.said for name, store in STORES.items()}
