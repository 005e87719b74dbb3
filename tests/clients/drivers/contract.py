"""What a driver is given and what it answers. Standard library only, as everything a driver shares."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

OPERATIONS = ("put", "get", "range", "list", "multipart", "delete")


@dataclass(frozen=True, slots=True)
class Target:
    """Where a client is pointed."""

    endpoint: str
    access_key: str
    secret_key: str
    bucket: str
    region: str = "us-east-1"
    ca_file: str | None = None

    @property
    def address(self) -> str:
        """host:port."""
        return urlsplit(self.endpoint).netloc

    @property
    def is_tls(self) -> bool:
        return self.endpoint.startswith("https:")


@dataclass(frozen=True, slots=True)
class Result:
    """One operation of one client: `ok` is None where the client has no such verb, and `detail` says why."""

    client: str
    version: str
    operation: str
    ok: bool | None
    detail: str
