"""Addressing a bucket as bucket.localhost, on machines whose resolver knows such names and on those that do not."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from contract import Target


def bucket_address(target: Target) -> str:
    """BUCKET.localhost:PORT, reachable.

    RFC 6761 gives every name under localhost the loopback address, but glibc resolves them only with nss-myhostname.
    Where it does not, the endpoint itself serves as the client's HTTP proxy: the client then connects to it and names
    bucket.localhost in an absolute-form request target, which every HTTP server has to accept (RFC 9112, 3.2.2).
    """
    name = f"{target.bucket}.localhost"
    port = urlsplit(target.endpoint).port
    try:
        socket.getaddrinfo(name, port)
    except socket.gaierror:
        os.environ["HTTP_PROXY"] = target.endpoint
    return f"{name}:{port}"
