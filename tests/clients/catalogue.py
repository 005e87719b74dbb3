"""Which clients there are, and what each is run with."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.environments import FSSPEC, HERE, LIBRARIES, PROGRAMS, TORCH, Environment

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Client:
    """One client: the script that drives it, and the environment it is installed in (None: the project's own)."""

    name: str
    driver: str
    environment: Environment | None
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        """The interpreter the driver runs in."""
        return self.environment.python if self.environment else Path(sys.executable)

    @property
    def script(self) -> Path:
        return HERE / "drivers" / f"drive_{self.driver}.py"

    @property
    def bucket(self) -> str:
        """A bucket of the client's own."""
        return "client-" + "".join(c if c.isalnum() else "-" for c in self.name.lower()).strip("-")


CLIENTS = (
    Client("boto3", "boto3", LIBRARIES),
    Client("awscli", "awscli", PROGRAMS),
    Client("awscrt", "awscrt", LIBRARIES),
    Client("s3transfer CRT", "s3transfer_crt", LIBRARIES),
    Client("obstore", "obstore", LIBRARIES),
    Client("s3fs", "s3fs", FSSPEC),
    Client("minio", "minio", LIBRARIES),
    Client("pyarrow", "pyarrow", LIBRARIES),
    Client("s3torchconnector", "s3torchconnector", TORCH),
    Client("s3cmd", "s3cmd", PROGRAMS),
    Client("s5cmd", "s5cmd", PROGRAMS),
    Client("rclone", "rclone", PROGRAMS),
    Client("@aws-sdk/client-s3", "node", PROGRAMS),
    Client("NIXL OBJ", "nixl", None),
    Client("NIXL OBJ, crtMinLimit", "nixl", None, {"CRT_MIN_LIMIT": str(8 * _MIB)}),
    Client("LMCache S3Connector", "lmcache_connector", TORCH),
    Client("LMCache S3L2Adapter", "lmcache_l2", TORCH),
)
_TRUSTING = ("boto3", "awscli", "awscrt", "s3transfer CRT", "s3fs", "minio", "s3cmd", "s5cmd", "rclone")
OVER_TLS = tuple(client for client in CLIENTS if client.name in (*_TRUSTING, "@aws-sdk/client-s3", "NIXL OBJ"))
"""Clients that can be given an authority to trust: they are also run against an https endpoint."""
