"""S3 services that others have written, for tests in front of them.

`python -m tests.support.foreign_services ceph -- COMMAND` runs a command with Ceph's RGW as the service that
OBJECTCACHE_TEST_S3_ENDPOINT names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.beds.processes import BaselineError
from bench.beds.s3_servers import Peer, running_moto, running_rgw
from storage_server.settings import UpstreamSettings
from tests.clients.environments import SERVICES
from tests.clients.install import install

NAMED = "OBJECTCACHE_TEST_S3_ENDPOINT"
ACCESS_KEY, SECRET_KEY = "OBJECTCACHE_TEST_S3_ACCESS_KEY_ID", "OBJECTCACHE_TEST_S3_SECRET_ACCESS_KEY"
MINIO_ACCOUNT = ("minioadmin", "minioadmin")
"""What MinIO has when nobody says otherwise."""
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


def _settings(peer: Peer) -> UpstreamSettings:
    return UpstreamSettings(peer.target.url, peer.target.access_key, peer.target.secret_key)


def main(arguments: list[str]) -> int:
    """The command's exit status; 2 where Ceph cannot run here."""
    if arguments[:2] != ["ceph", "--"] or len(arguments) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        with ceph_service() as service:
            named = {NAMED: service.endpoint, ACCESS_KEY: service.access_key, SECRET_KEY: service.secret_key}
            return subprocess.run(arguments[2:], env={**os.environ, **named}).returncode
    except BaselineError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
