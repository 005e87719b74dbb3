"""Servers of our own for one measurement: a fresh store, fresh credentials, and a process that must end well."""

from __future__ import annotations

import math
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from nixl_client.client import Client, Transport
from objectcache.adapters.nixl_agent import is_available
from objectcache.calibration.origin import python_path

BUCKET = "bench"
REGION = "us-east-1"
READY = "objectcache is listening on "
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
STATUS_PATH = "/_objectcache/scheduler"
POLL_S = 0.005
CHANGE_TIMEOUT_S = 10.0
CHUNKWISE_FRACTION = 1e-6
"""Chunk-major requests keep this fraction of a played link from layer-major ones: there is only one request at a time.
"""


class LocalServerError(Exception):
    """The server did not start, did not take a change, or did not end with status 0."""


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A running `objectcache serve` with one empty bucket. `data` is the folder of its store."""

    url: str
    pid: int
    access_key: str
    secret_key: str
    data: Path = Path()

    def client(self, transport: Transport, http_connections: int = 1) -> Client:
        """Our client."""
        return Client(
            self.url,
            BUCKET,
            access_key=self.access_key,
            secret_key=self.secret_key,
            transport=transport,
            http_connections=http_connections,
        )

    def s3(self) -> Any:
        """boto3's client."""
        return s3_client(self.url, self.access_key, self.secret_key)

    def make_bucket(self, name: str) -> None:
        """Raises LocalServerError."""
        with closing(self.s3()) as s3:
            try:
                s3.create_bucket(Bucket=name)
            except (BotoCoreError, ClientError) as error:
                raise LocalServerError(f"the server made no bucket: {error}") from error

    def data_files(self) -> list[Path]:
        """The files of the store that hold chunks; its index is not among them."""
        return sorted(self.data.glob("extents/*/*"))

    def peak_rss_bytes(self) -> int | None:
        """The most resident memory the process has had, shared pages included; None where /proc does not say."""
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            return None
        kibibytes = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        return int(kibibytes[0]) * 1024 if kibibytes else None


def s3_client(url: str, access_key: str, secret_key: str, *, region: str = REGION, connections: int = 10) -> Any:
    """boto3's client, as a user has it but for the address; a proxy would only falsify loopback figures."""
    addressing = {"addressing_style": "path"}
    config = Config(s3=addressing, signature_version="s3v4", proxies={}, max_pool_connections=connections)
    keys = {"aws_access_key_id": access_key, "aws_secret_access_key": secret_key}
    return boto3.client("s3", endpoint_url=url, region_name=region, **keys, config=config)


@contextmanager
def running_server(
    parent: Path | None, options: Sequence[str] = (), *, makes_bucket: bool = True, python_path: Sequence[Path] = ()
) -> Iterator[LocalServer]:
    """Serve from a new folder in `parent` (default: the system's temporary folder), removed afterwards.

    `options` are further ones of `objectcache serve`. Without `makes_bucket` the bucket is there already. Packages are
    also looked for in `python_path`.

    Raises LocalServerError when the server does not start, or does not end with status 0 on SIGTERM.
    """
    with tempfile.TemporaryDirectory(prefix="objectcache-local-", dir=parent) as folder:
        access_key, secret_key = "OC" + secrets.token_hex(9).upper(), secrets.token_urlsafe(30)
        data = Path(folder) / "data"
        process = _start(data, options, access_key, secret_key, python_path)
        try:
            server = LocalServer(_ready_url(process), process.pid, access_key, secret_key, data)
            if makes_bucket:
                server.make_bucket(BUCKET)
            yield server
        except BaseException:
            _stop(process)
            raise
        status = _stop(process)
        if status != 0:
            raise LocalServerError(f"the server ended with status {status}")


@dataclass
class ConfiguredServer:
    """A running server, and its configuration file, which can be rewritten while the server runs."""

    server: LocalServer
    config: Path
    client: Client

    def change(self, text: str, holds: Callable[[Mapping[str, Any]], bool], wanted: object) -> None:
        """Have the server read another configuration, and wait until its scheduler's status `holds`.

        Raises LocalServerError when it does not take the change.
        """
        new = self.config.with_suffix(".new")
        new.write_text(text)
        new.replace(self.config)
        os.kill(self.server.pid, signal.SIGHUP)
        deadline_s = time.monotonic() + CHANGE_TIMEOUT_S
        while not holds(status := self.status()):
            if time.monotonic() > deadline_s:
                raise LocalServerError(f"the scheduler still goes by {status}, not by {wanted}")
            time.sleep(POLL_S)

    def status(self) -> dict[str, Any]:
        """The scheduler's status."""
        found: dict[str, Any] = self.client.http.request("GET", STATUS_PATH).json()
        return found


@contextmanager
def configured_server(folder: Path | None, text: str) -> Iterator[ConfiguredServer]:
    """A server of our own with a configuration file of that text. Raises LocalServerError."""
    with tempfile.TemporaryDirectory(prefix="objectcache-config-", dir=folder) as name:
        config = Path(name) / "config.toml"
        config.write_text(text)
        with running_server(Path(name), ["--config", str(config)]) as server, server.client(Transport.HTTP) as client:
            yield ConfiguredServer(server, config, client)


@dataclass(frozen=True, slots=True)
class FixedConfig:
    """The part of a configuration that stays the same while links change. `gather_s` is how long the scheduler waits
    for company before it begins an epoch; None: its default.
    """

    dram_bytes: int
    gather_s: float | None = None


@dataclass
class PlayedLink(ConfiguredServer):
    """A link that is played: the budget of the server's scheduler is its rate, for one request at a time."""

    fixed: FixedConfig
    bytes_per_s: float | None = None

    def set(self, bytes_per_s: float | None) -> None:
        """Play a link of that rate from now on; None: do not limit it. Raises LocalServerError."""
        if bytes_per_s != self.bytes_per_s:
            self.change(
                config_text(self.fixed, bytes_per_s),
                lambda status: is_same_rate(status["link_bytes_per_s"], bytes_per_s),
                f"{bytes_per_s} bytes/s",
            )
            self.bytes_per_s = bytes_per_s


@contextmanager
def served_link(folder: Path | None, fixed: FixedConfig) -> Iterator[PlayedLink]:
    """A server of our own whose link is not limited yet. Raises LocalServerError."""
    with configured_server(folder, config_text(fixed, None)) as plain:
        yield PlayedLink(plain.server, plain.config, plain.client, fixed)


def config_text(fixed: FixedConfig, link_bytes_per_s: float | None) -> str:
    """The config file of a server whose link is played."""
    text = f"[storage]\ndram_bytes = {fixed.dram_bytes}\n"
    if link_bytes_per_s is None:
        return text
    text += f'[scheduler]\nlink_bytes_per_s = {link_bytes_per_s!r}\n[internals.scheduler]\npolicy = "equal"\n'
    gather = "" if fixed.gather_s is None else f"gather_s = {fixed.gather_s!r}\n"
    return f"{text}chunkwise_fraction = {CHUNKWISE_FRACTION!r}\n{gather}"


def is_same_rate(seen: float | None, wanted: float | None) -> bool:
    """Whether a server says the rate that was asked for; None is no limit."""
    if seen is None or wanted is None:
        return seen is wanted
    return math.isclose(seen, wanted, rel_tol=1e-6)


def _start(
    data: Path, options: Sequence[str], access_key: str, secret_key: str, further: Sequence[Path]
) -> subprocess.Popen[str]:
    keys = {"AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}
    serve = [sys.executable, "-P", "-m", "objectcache", "serve", "--data", str(data), "--port", "0"]
    if is_available():
        serve.append("--ucx")
    environment = {**os.environ, **keys, "PYTHONPATH": os.pathsep.join([python_path(), *map(str, further)])}
    return subprocess.Popen([*serve, *options], stdout=subprocess.PIPE, text=True, env=environment)


def _ready_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], START_TIMEOUT_S)[0]:
        raise LocalServerError(f"the server did not start within {START_TIMEOUT_S:.0f} s")
    line = process.stdout.readline()
    if not line.startswith(READY):
        raise LocalServerError(f"the server did not start: it said {line!r}")
    return line.removeprefix(READY).strip()


def _stop(process: subprocess.Popen[str]) -> int:
    """SIGTERM, and SIGKILL where that does not end it; the exit status."""
    process.send_signal(signal.SIGTERM)
    with process:
        try:
            return process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
