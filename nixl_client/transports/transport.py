"""The transports by name."""

from __future__ import annotations

from enum import Enum

HTTP_CONNECTIONS_MAX = 32


class Transport(Enum):
    """AUTO is SHM for buffers of `allocate_buffer` where the server is on this host; else UCX where this host has an
    RDMA device, or the buffer is a GPU's, and the server offers it; else HTTP.
    """

    AUTO = "auto"
    SHM = "shm"
    UCX = "ucx"
    HTTP = "http"
