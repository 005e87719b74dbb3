"""ObjectCache itself: gateway and storage server in a process of their own, and chunks put there by boto3."""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3
import numpy as np
from botocore.config import Config
from tqdm import tqdm

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
PUT_THREADS = 4
LISTENING = "objectcache is listening on "


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the gateway listens and a key pair it accepts."""

    url: str
    access_key: str
    secret_key: str


@contextmanager
def serving(data_dir: Path) -> Iterator[Endpoint]:
    """`objectcache serve` on a free loopback port, ended by SIGTERM. Raises RuntimeError unless it starts and ends
    well.
    """
    access_key, secret_key = f"DEMO{secrets.token_hex(8).upper()}", secrets.token_hex(20)
    environment = os.environ | {"AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}
    command = [sys.executable, "-P", "-m", "objectcache", "serve", "--data", str(data_dir), "--port", "0", "--ucx"]
    command += ["--log-level", "error"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield Endpoint(_read_url(process), access_key, secret_key)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if status != 0:
        raise RuntimeError(f"the server ended with status {status}")


def put_objects(endpoint: Endpoint, bucket: str, keys: Sequence[str], objects: np.ndarray) -> None:
    """Make the bucket and put row i of `objects` (chunk_count, L*S) under key i, with boto3 and a progress bar."""
    s3 = boto3.client(
        "s3",
        endpoint_url=endpoint.url,
        aws_access_key_id=endpoint.access_key,
        aws_secret_access_key=endpoint.secret_key,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, max_pool_connections=PUT_THREADS),
    )
    s3.create_bucket(Bucket=bucket)

    def put(index: int) -> int:
        s3.put_object(Bucket=bucket, Key=keys[index], Body=objects[index].tobytes())
        return int(objects[index].nbytes)

    with (
        tqdm(total=objects.nbytes, desc="PUT chunks (boto3)", unit="B", unit_scale=True, unit_divisor=1024) as bar,
        ThreadPoolExecutor(PUT_THREADS) as pool,
    ):
        for nbytes in pool.map(put, range(len(keys))):
            bar.update(nbytes)
    s3.close()


def _read_url(process: subprocess.Popen[str]) -> str:
    if process.stdout is None:
        raise RuntimeError("the server's output is not piped")
    is_readable, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
    line = process.stdout.readline() if is_readable else ""
    if not line.startswith(LISTENING):
        raise RuntimeError(f"the server did not start: {line.strip() or 'it said nothing'}")
    return line.removeprefix(LISTENING).strip()
