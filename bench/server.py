"""A server of our own for one measurement: fresh store, fresh credentials, a process that must end well."""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from bench.jobs import BUCKET, REGION
from nixl_client.client import ObjectCacheClient, Transport

ROOT = Path(__file__).resolve().parent.parent
READY = "objectcache is listening on "
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0


class BenchServerError(Exception):
    """The server did not start, or did not end with status 0."""


@dataclass(frozen=True, slots=True)
class BenchServer:
    """A running `objectcache serve` with one empty bucket."""

    url: str
    pid: int
    access_key: str
    secret_key: str

    def client(self, transport: Transport, http_connections: int = 1) -> ObjectCacheClient:
        """Our client."""
        return ObjectCacheClient(
            self.url,
            BUCKET,
            access_key=self.access_key,
            secret_key=self.secret_key,
            transport=transport,
            http_connections=http_connections,
        )

    def s3(self) -> Any:
        """boto3's client, as a user has it but for the address; a proxy would only falsify loopback figures."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(s3={"addressing_style": "path"}, signature_version="s3v4", proxies={}),
        )

    def peak_rss_bytes(self) -> int | None:
        """The most resident memory the process has had, shared pages included; None where /proc does not say."""
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            return None
        kibibytes = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        return int(kibibytes[0]) * 1024 if kibibytes else None


@contextmanager
def running_server(parent: Path | None, options: Sequence[str] = ()) -> Iterator[BenchServer]:
    """Serve from a new folder in `parent` (default: the system's temporary folder), removed afterwards.

    `options` are further ones of `objectcache serve`.

    Raises BenchServerError when the server does not start, or does not end with status 0 on SIGTERM.
    """
    with tempfile.TemporaryDirectory(prefix="objectcache-bench-", dir=parent) as folder:
        access_key, secret_key = "OC" + secrets.token_hex(9).upper(), secrets.token_urlsafe(30)
        process = _start(Path(folder), options, access_key, secret_key)
        try:
            server = BenchServer(_ready_url(process), process.pid, access_key, secret_key)
            _make_bucket(server)
            yield server
        except BaseException:
            _stop(process)
            raise
        status = _stop(process)
        if status != 0:
            raise BenchServerError(f"the server ended with status {status}")


def _make_bucket(server: BenchServer) -> None:
    s3 = server.s3()
    try:
        s3.create_bucket(Bucket=BUCKET)
    except (BotoCoreError, ClientError) as error:
        raise BenchServerError(f"the server made no bucket: {error}") from error
    finally:
        s3.close()


def _start(folder: Path, options: Sequence[str], access_key: str, secret_key: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    serve = [sys.executable, "-m", "objectcache.cli", "serve", "--data", str(folder / "data"), "--port", "0", "--ucx"]
    return subprocess.Popen([*serve, *options], stdout=subprocess.PIPE, text=True, env=environment)


def _ready_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], START_TIMEOUT_S)[0]:
        raise BenchServerError(f"the server did not start within {START_TIMEOUT_S:.0f} s")
    line = process.stdout.readline()
    if not line.startswith(READY):
        raise BenchServerError(f"the server did not start: it said {line!r}")
    return line.removeprefix(READY).strip()


def _stop(process: subprocess.Popen[str]) -> int:
    """SIGTERM, and SIGKILL where that does not end it; the exit status."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
    finally:
        if process.stdout is not None:
            process.stdout.close()
