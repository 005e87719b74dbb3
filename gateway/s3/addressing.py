"""The bucket that a Host header names (virtual-hosted addressing). Pure."""

from __future__ import annotations

import re
from functools import lru_cache

from descriptors.errors import CallerError, ErrorCode

LOCALHOST = "localhost"
HOST_CHARACTERS_MAX = 512
HOSTS_KEPT_MAX = 1024
_HOST = re.compile(r"(?:\[[0-9a-f:.%]+\]|[a-z0-9._~-]*)(?::\d{0,5})?\Z")
_ADDRESS = re.compile(r"\d+(?:\.\d+){0,3}\Z")


@lru_cache(maxsize=HOSTS_KEPT_MAX)
def bucket_from_host(host: str | None, domains: tuple[str, ...]) -> str | None:
    """The bucket before the longest of `domains` that `host` ends in; localhost is always one of the domains.

    None where the path names the bucket: no such domain, the bare domain, an IP address, no host at all.
    Raises CallerError(InvalidRequest) for a text that is not a host.
    """
    if not host:
        return None
    lowered = host.strip().lower()
    if len(lowered) > HOST_CHARACTERS_MAX or not _HOST.match(lowered):
        raise CallerError(ErrorCode.INVALID_REQUEST, "the Host header is not a host name", field="host")
    if lowered.startswith("["):
        return None
    name = lowered.partition(":")[0].removesuffix(".")
    if _ADDRESS.match(name):
        return None
    known = {domain.lower().strip(".") for domain in domains} | {LOCALHOST}
    if name in known:
        return None
    for domain in sorted(known, key=len, reverse=True):
        bucket = name.removesuffix(f".{domain}")
        if bucket and bucket != name:
            return bucket
    return None
