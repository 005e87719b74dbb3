"""Running servers, in processes of their own or in a thread of this one."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from gateway.app import GatewaySettings
from gateway.s3.credentials import Credential
from nixl_client.client import Client
from nixl_client.session.signed_http import SignedHttp
from objectcache.cli.listening import Listen
from objectcache.cli.serve import Together
from storage_server.kernel.data.disk import Disk
from storage_server.service.storage import WrapSource, unwrapped_source
from storage_server.settings import StorageSettings
from tests.support.layer_hold import LayerHold
from tests.support.processes import ServerProcess
from tests.support.requests import OTHER, OWNER, READER, Reply, request, s3_client

CONFIG = f"""
[[credentials]]
access_key = "{OWNER[0]}"
secret_key = "{OWNER[1]}"
[[credentials]]
access_key = "{OTHER[0]}"
secret_key = "{OTHER[1]}"
[[credentials]]
access_key = "{READER[0]}"
secret_key = "{READER[1]}"
buckets = ["shared-*"]
actions = ["GetObject", "ListBucket"]
"""
READY = "is listening on "


@dataclass
class Stack:
    """Running servers. `storage_pid` is the process that moves data."""

    url: str
    data_dir: Path
    storage_pid: int
    processes: list[ServerProcess] = field(default_factory=list)
    _clients: dict[tuple[str, str], Any] = field(default_factory=dict)

    def s3(self, key: tuple[str, str] = OWNER) -> Any:
        """A client that all tests of these servers share: do not change it."""
        if key not in self._clients:
            self._clients[key] = s3_client(self.url, key)
        return self._clients[key]

    def client(self, bucket: str, transport: str = "auto", key: tuple[str, str] = OWNER) -> Client:
        return Client(self.url, bucket, access_key=key[0], secret_key=key[1], transport=transport)

    def request(self, method: str, target: str, **options: Any) -> Reply:
        return request(self.url, method, target, **options)

    def footprint(self) -> tuple[int, int]:
        """Open file descriptors and threads of the storage process."""
        process = psutil.Process(self.storage_pid)
        return process.num_fds(), process.num_threads()

    def rss_bytes(self) -> int:
        return psutil.Process(self.storage_pid).memory_info().rss


@contextlib.contextmanager
def started(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[tuple[str, Any]]:
    """Run `objectcache ARGUMENTS` until the block ends, then SIGTERM it and demand exit code 0. Yields its address and
    its ServerProcess.
    """
    process = ServerProcess(arguments, environment)
    assert process.stdout is not None
    with process.stdout:
        try:
            line = process.stdout.readline()
            assert READY in line, f"{arguments}: {line!r}, exit {process.poll()}"
            yield line.strip().partition(READY)[2], process
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=30) == 0
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def stack(kind: str, directory: Path, config: str = CONFIG, **environment: str) -> Iterator[Stack]:
    """Gateway and storage server in one process ("together") or two that talk HTTP over loopback ("apart")."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "config.toml"
    file.write_text(config)
    data = directory / "data"
    common = ("--config", str(file))
    if kind == "together":
        with started("serve", "--data", str(data), "--port", "0", "--ucx", *common, environment=environment) as (
            url,
            process,
        ):
            yield Stack(url, data, process.pid, [process])
        return
    secret = directory / "peer-secret"
    storage = (
        "storage-server",
        "--data",
        str(data),
        "--listen",
        "127.0.0.1:0",
        "--peer-secret-file",
        str(secret),
        "--ucx",
    )
    with started(*storage, *common, environment=environment) as (storage_url, storage_process):
        front = ("gateway", "--storage", storage_url, "--peer-secret-file", str(secret), "--port", "0")
        with started(*front, *common, environment=environment) as (url, process):
            yield Stack(url, data, storage_process.pid, [storage_process, process])


UCX: Final = ("lo",)
"""The interfaces on which a server in a test offers it."""


def ucx_for(transport: str) -> tuple[str, ...]:
    """The interfaces that a test of this transport needs."""
    return UCX if transport == "ucx" else ()


def ucx_of(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Those that a test needs: one whose `transport` it is, or that is marked `with_ucx`."""
    is_marked = request.node.get_closest_marker("with_ucx") is not None
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    return UCX if is_marked else ucx_for(parameters.get("transport", ""))


class LocalStack:
    """Gateway and storage server in a thread of this process, so that a test can hold layers back, and give the server
    another disk or put something around the store's ChunkSource. UCX, whose process takes most of a second to start, is
    there with `ucx=UCX`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        disk: Disk | None = None,
        wrap_source: WrapSource = unwrapped_source,
        **settings: Any,
    ) -> None:
        self._disk = disk
        self._wrap_source = wrap_source
        self._hold = LayerHold()
        self._settings = StorageSettings(data_dir=directory, **settings)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> LocalStack:
        self._thread.start()
        self.server = self.call(self._start())
        self.url = self.server.url
        return self

    async def _start(self) -> Together:
        keys = [Credential(*OWNER), Credential(*OTHER)]
        server = Together(
            self._settings,
            GatewaySettings(),
            keys,
            Listen(),
            disk=self._disk,
            wrap_source=self._wrap_source,
            wrap_destination=self._hold.wrap,
        )
        await server.start()
        return server

    def __exit__(self, *_: object) -> None:
        self.call(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    @property
    def storage(self) -> Any:
        return self.server.storage

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def client(
        self,
        bucket: str,
        transport: str = "auto",
        key: tuple[str, str] = OWNER,
        url: str | None = None,
        **options: Any,
    ) -> Client:
        """A client of this server, or of `url`, which leads to this server."""
        return Client(url or self.url, bucket, access_key=key[0], secret_key=key[1], transport=transport, **options)

    def http(self, key: tuple[str, str] = OWNER) -> SignedHttp:
        """Signed requests over connections that are kept alive."""
        return SignedHttp(self.url, *key, region="us-east-1", timeout_s=60.0)

    def damage(self, bucket: str, key: str, offset: int) -> None:
        """Flip a bit of a stored object, on disk."""
        sql = (
            "SELECT file_id, file_offset + ? - object_offset FROM extents WHERE ? >= object_offset AND version ="
            " (SELECT version FROM objects WHERE bucket = ? AND key = ?) ORDER BY object_offset DESC"
        )
        database = sqlite3.connect(self.storage.settings.data_dir / "index.sqlite3")
        file_id, at = database.execute(sql, (offset, offset, bucket, key)).fetchone()
        database.close()
        with (self.storage.settings.data_dir / "extents" / file_id[:2] / file_id).open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x20]))

    def hold_from_layer(self, layer_index: int) -> threading.Event:
        """Hold every payload of this and later layers back until the event is set."""
        return self._hold.hold_from(layer_index)


def is_idle(local: LocalStack) -> bool:
    """Rate, memory, pins, files, reads and writes are all given back."""
    return has_stopped(local) and local.storage.store.files.pinned_count == 0


def has_stopped(local: LocalStack) -> bool:
    """Nothing is delivered any more, and its memory is given back. The DRAM tier may still be reading files."""
    storage = local.storage
    pools = [storage.staging]
    if storage.ucx is not None:
        pools += [pool for pool in (storage.ucx.memory.staging, storage.ucx.memory.whole) if pool is not None]
    return (
        storage.requests.active_count == 0
        and storage.pipeline.active_count == 0
        and storage.object_requests_active_count == 0
        and all(pool.free_count == pool.slot_count for pool in pools)
        and (storage.ucx is None or storage.ucx.engine.in_flight_count == 0)
    )
