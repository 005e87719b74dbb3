"""Servers, requests and data the tests share."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

import boto3
import numpy as np
import psutil
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

from descriptors.layout import ChunkLayout
from descriptors.objects import BodyDigests
from gateway.app import GatewaySettings
from gateway.credentials import Credential
from nixl_client.client import ObjectCacheClient
from objectcache.serve import Listen, Together
from storage_server.settings import StorageSettings

OWNER = ("OWNERKEY", "owner-secret-1")
OTHER = ("OTHERKEY", "other-secret-2")
READER = ("READERKEY", "reader-secret-3")
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
LAYOUT = ChunkLayout(num_layers=6, chunk_tokens=16, per_layer_chunk_bytes=20_000)
N = 9
"""The shape and chunk count most tests use: several payloads a layer at the small settings of `local`."""


@dataclass
class Stack:
    """Running servers. `storage_pid` is the process that moves data."""

    url: str
    data_dir: Path
    storage_pid: int
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def s3(self, key: tuple[str, str] = OWNER) -> Any:
        return s3_client(self.url, key)

    def client(self, bucket: str, transport: str = "auto", key: tuple[str, str] = OWNER) -> ObjectCacheClient:
        return ObjectCacheClient(self.url, bucket, access_key=key[0], secret_key=key[1], transport=transport)

    def request(self, method: str, target: str, **options: Any) -> Reply:
        return request(self.url, method, target, **options)

    def footprint(self) -> tuple[int, int]:
        """Open file descriptors and threads of the storage process."""
        process = psutil.Process(self.storage_pid)
        return process.num_fds(), process.num_threads()

    def rss_bytes(self) -> int:
        return psutil.Process(self.storage_pid).memory_info().rss


def s3_client(url: str, key: tuple[str, str] = OWNER, **config: Any) -> Any:
    config.setdefault("retries", {"max_attempts": 0})
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=key[0],
        aws_secret_access_key=key[1],
        config=Config(s3={"addressing_style": "path"}, **config),
    )


@contextlib.contextmanager
def started(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[tuple[str, Any]]:
    """Run `objectcache ARGUMENTS` until the block ends, then SIGTERM it and demand exit code 0."""
    command = [sys.executable, "-m", "objectcache.cli", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}, cwd=repository()
    )
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


def repository() -> Path:
    return Path(__file__).resolve().parent.parent


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


class LocalStack:
    """Gateway and storage server in a thread of this process, so that a test can hold layers back."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self._settings = StorageSettings(data_dir=directory, **{"ucx": ("lo",), **settings})
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> LocalStack:
        self._thread.start()
        self.server = self.call(self._start())
        self.url = self.server.url
        return self

    async def _start(self) -> Together:
        keys = [Credential(*OWNER), Credential(*OTHER)]
        server = Together(self._settings, GatewaySettings(), keys, Listen())
        await server.start()
        return server

    def __exit__(self, *_: object) -> None:
        self.call(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def storage(self) -> Any:
        return self.server.storage

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def client(
        self, bucket: str, transport: str = "auto", key: tuple[str, str] = OWNER, **options: Any
    ) -> ObjectCacheClient:
        return ObjectCacheClient(self.url, bucket, access_key=key[0], secret_key=key[1], transport=transport, **options)

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
        released = threading.Event()

        async def gate(_: str, payload: Any) -> None:
            while payload.group_index >= layer_index and not released.is_set():  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.002)

        self.storage.pipeline.gate = gate
        return released


@dataclass(frozen=True)
class Reply:
    """A raw answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str | None:
        return ElementTree.fromstring(self.body).findtext("Code")

    @property
    def named_field(self) -> str | None:
        return ElementTree.fromstring(self.body).findtext("ArgumentName")


def signed(
    url: str, method: str, target: str, body: bytes, headers: Mapping[str, str], key: tuple[str, str]
) -> dict[str, str]:
    """Headers of a signed request."""
    aws = AWSRequest(method=method, url=url + target, data=body, headers=dict(headers))
    S3SigV4Auth(Credentials(*key), "s3", "us-east-1").add_auth(aws)
    return dict(aws.headers.items())


def request(
    url: str,
    method: str,
    target: str,
    *,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    key: tuple[str, str] | None = OWNER,
    change: Callable[[dict[str, str]], None] | None = None,
    sent_body: bytes | None = None,
) -> Reply:
    """One request; `change` edits the headers after signing, `sent_body` replaces the body after signing."""
    all_headers = dict(headers or {}) if key is None else signed(url, method, target, body, headers or {}, key)
    if change is not None:
        change(all_headers)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.request(method, target, body=body if sent_body is None else sent_body, headers=all_headers)
        answer = connection.getresponse()
        return Reply(answer.status, {n.lower(): v for n, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def make_chunks(chunk_count: int, layout: ChunkLayout, seed: int = 1) -> tuple[list[str], np.ndarray]:
    """Distinct keys and chunk objects, uint8 of shape (chunk_count, L*S)."""
    rng = np.random.default_rng(seed)
    keys = [f"{seed:08x}{index:056x}" for index in range(chunk_count)]
    return keys, rng.integers(0, 256, (chunk_count, layout.chunk_bytes), dtype=np.uint8)


def layer_of(chunks: np.ndarray, layout: ChunkLayout, layer_index: int) -> np.ndarray:
    """The expected layer: uint8 of shape (chunk_count, S)."""
    return chunks.reshape(len(chunks), layout.num_layers, layout.per_layer_chunk_bytes)[:, layer_index]


def eventually(is_true: Callable[[], bool], timeout_s: float = 15.0) -> bool:
    """Wait for a state another process reaches on its own."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if is_true():
            return True
        time.sleep(0.02)
    return is_true()


class BytesBody:
    """A body in some pieces, as a gateway would pass it on."""

    def __init__(self, data: bytes, pieces: int = 3, digests: BodyDigests | None = None) -> None:
        self._data = data
        self._step = max(1, -(-len(data) // pieces))
        self._digests = digests or BodyDigests()

    @property
    def has_sha256(self) -> bool:
        return self._digests.sha256 is not None

    @property
    def is_held_back(self) -> bool:
        return False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._data), self._step):
            yield self._data[start : start + self._step]

    def digests(self) -> BodyDigests:
        return self._digests
