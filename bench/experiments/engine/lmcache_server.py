"""LMCache's own server, which engines on CPUs need: the process inside the engine knows no transfer without a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.beds.kv_peers.work import S3Target
from bench.beds.processes import BaselineError, await_ready, free_port, last_words, running_program
from bench.experiments.engine.ways import LMCACHE_CHUNK_TOKENS
from descriptors.units import GIB

START_TIMEOUT_S = 120.0
QUIET_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 10.0
POLL_S = 0.05
WRITES = (
    ("store_controllers", "pending_keys_count"),
    ("store_controllers", "in_flight_task_count"),
    ("l1_managers", "write_locked_count"),
    ("l1_managers", "staging_object_count"),
)
"""Counts of its status that say what it has still to write."""
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class LmcacheServer:
    """A running one. `port` is for engines. Every method raises BaselineError where it does not answer."""

    port: int
    http_port: int

    def await_quiet(self) -> None:
        """Return when it stores and fetches nothing."""
        self._await_no(self._work)

    def forget(self) -> None:
        """Drop what it keeps in its own memory, so that the next load comes from S3."""
        self._await_no(self._chunks)

    def _await_no(self, left: Callable[[], str]) -> None:
        deadline_s = time.monotonic() + QUIET_TIMEOUT_S
        while found := left():
            if time.monotonic() > deadline_s:
                raise BaselineError(f"LMCache still has {found} after {QUIET_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)

    def _work(self) -> str:
        storage = self._call("GET", "/status")["storage_manager"]
        stores = sum(each[count] for of, count in WRITES for each in storage[of].values())
        fetches = storage["prefetch_controller"]["in_flight_request_count"]
        return f"{stores} stores and {fetches} fetches" if stores or fetches else ""

    def _chunks(self) -> str:
        self._call("POST", "/cache/clear")
        managers = self._call("GET", "/status")["storage_manager"]["l1_managers"].values()
        count = sum(manager["total_object_count"] for manager in managers)
        return f"{count} chunks in its memory" if count else ""

    def _call(self, method: str, path: str) -> dict[str, Any]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.http_port}{path}", method=method)
        try:
            with _NO_PROXY.open(request, timeout=CALL_TIMEOUT_S) as answer:
                parsed: dict[str, Any] = json.load(answer)
                return parsed
        except (OSError, ValueError, urllib.error.URLError) as error:
            raise BaselineError(f"LMCache does not answer: {error}") from error


@contextmanager
def running_lmcache(python: Path, log: Path, memory_bytes: int, s3: S3Target | None) -> Iterator[LmcacheServer]:
    """Serve with so much memory of its own, over S3 where given. Raises BaselineError where it does not start."""
    server = LmcacheServer(free_port(), free_port())
    environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
    options = {
        "host": "127.0.0.1",
        "port": server.port,
        "http-host": "127.0.0.1",
        "http-port": server.http_port,
        "chunk-size": LMCACHE_CHUNK_TOKENS,
        "l1-size-gb": memory_bytes / GIB,
        "shm-name": f"objectcache-bench-{server.port}",
        "supported-transfer-mode": "auto",
        "eviction-policy": "LRU",
    }
    if s3 is not None:
        environment |= s3.proxy()
        adapter = {
            "type": "s3",
            "s3_endpoint": f"s3://{s3.address}",
            "s3_region": s3.region,
            "s3_prefer_http2": False,
            "disable_tls": True,
            "aws_access_key_id": s3.access_key,
            "aws_secret_access_key": s3.secret_key,
        }
        options["l2-adapter"] = json.dumps(adapter)
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [str(python), "-m", "lmcache.cli.main", "server", *words, "--disable-observability"]

    def is_quiet() -> bool:
        with contextlib.suppress(BaselineError):
            server.await_quiet()
            return True
        return False

    with running_program(command, log, number=signal.SIGINT, environment=environment) as process:
        try:
            await_ready(process, is_quiet, "LMCache's server", START_TIMEOUT_S)
        except BaselineError as error:
            raise BaselineError(f"{error}: {last_words(log) or 'it says nothing'}") from error
        yield server
