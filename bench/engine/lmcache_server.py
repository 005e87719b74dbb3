"""LMCache's own server, which engines on CPUs need: the process inside the engine knows no transfer without a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.child import BaselineError
from bench.engine.ways import LMCACHE_CHUNK_TOKENS
from bench.kv_peers.work import S3Target
from descriptors.units import GIB

START_TIMEOUT_S = 120.0
QUIET_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
CALL_TIMEOUT_S = 10.0
POLL_S = 0.05
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class LmcacheServer:
    """A running one. `port` is for engines. Every method raises BaselineError where it does not answer."""

    port: int
    http_port: int

    def await_quiet(self) -> None:
        """Return when it stores and fetches nothing."""
        deadline_s = time.monotonic() + QUIET_TIMEOUT_S
        while (busy := _busy(self._call("GET", "/status"))) is not None:
            if time.monotonic() > deadline_s:
                raise BaselineError(f"LMCache still has {busy} after {QUIET_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)

    def forget(self) -> None:
        """Drop what it keeps in its own memory, so that the next load comes from S3."""
        deadline_s = time.monotonic() + QUIET_TIMEOUT_S
        while True:
            self._call("POST", "/cache/clear")
            left = sum(manager["total_object_count"] for manager in _managers(self._call("GET", "/status")))
            if left == 0:
                return
            if time.monotonic() > deadline_s:
                raise BaselineError(f"LMCache keeps {left} chunks in its memory")
            time.sleep(POLL_S)

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
    server = LmcacheServer(_free_port(), _free_port())
    environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
    if s3 is not None:
        environment |= _proxy(s3)
    with log.open("wb") as said:
        process = subprocess.Popen(
            _command(python, server, memory_bytes, s3), stdout=said, stderr=subprocess.STDOUT, env=environment
        )
        try:
            _await_start(process, server, log)
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _command(python: Path, server: LmcacheServer, memory_bytes: int, s3: S3Target | None) -> list[str]:
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
        options["l2-adapter"] = json.dumps(_adapter(s3))
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [str(python), "-m", "lmcache.cli.main", "server", *words, "--disable-observability"]


def _adapter(s3: S3Target) -> Mapping[str, object]:
    """LMCache addresses a bucket by Host name alone. Its defaults but for TLS."""
    return {
        "type": "s3",
        "s3_endpoint": f"s3://{s3.bucket}.localhost:{urlsplit(s3.url).port}",
        "s3_region": s3.region,
        "s3_prefer_http2": False,
        "disable_tls": True,
        "aws_access_key_id": s3.access_key,
        "aws_secret_access_key": s3.secret_key,
    }


def _proxy(s3: S3Target) -> Mapping[str, str]:
    """Where such names do not resolve, the server itself serves as the client's HTTP proxy."""
    with contextlib.suppress(socket.gaierror):
        socket.getaddrinfo(f"{s3.bucket}.localhost", urlsplit(s3.url).port)
        return {}
    return {"HTTP_PROXY": s3.url}


def _await_start(process: subprocess.Popen[bytes], server: LmcacheServer, log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(BaselineError):
            server.await_quiet()
            return
        time.sleep(POLL_S)
    said = log.read_text(errors="replace").strip().splitlines() or ["it says nothing"]
    raise BaselineError(f"LMCache's server did not start: {said[-1].strip()}")


def _busy(status: Mapping[str, Any]) -> str | None:
    """What it is doing, None when nothing."""
    storage = status["storage_manager"]
    counts = {
        "chunks to store": sum(each["pending_keys_count"] for each in storage["store_controllers"].values()),
        "stores in flight": sum(each["in_flight_task_count"] for each in storage["store_controllers"].values()),
        "chunks being written": sum(
            each["write_locked_count"] + each["staging_object_count"] for each in _managers(status)
        ),
        "fetches in flight": storage["prefetch_controller"]["in_flight_request_count"],
    }
    return next((f"{count} {what}" for what, count in counts.items() if count), None)


def _managers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(status["storage_manager"]["l1_managers"].values())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
