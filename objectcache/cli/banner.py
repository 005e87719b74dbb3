"""The lines of a server that has started, for the person who started it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from descriptors.headers import SERVICE_PREFIX
from descriptors.units import format_bytes
from descriptors.version import __version__


@dataclass(frozen=True, slots=True)
class Started:
    """A server that listens at `url`. `caches` are the buckets that are caches, with the bytes that each may take;
    `bound_bytes` is what the directory may take, None without a bound, and `free_bytes` what its file system has free.
    """

    url: str
    data: str
    used_bytes: int
    bound_bytes: int | None
    free_bytes: int
    upstream: str | None
    caches: Sequence[tuple[str, int | None]]
    dram_bytes: int
    transports: Sequence[str]
    access_keys: Sequence[str]
    keys_from: str
    credentials: str | None = None
    """The directory whose credentials.json has the keys; None where they come from elsewhere."""
    link_bytes_per_s: float | None = None
    compression: str = ""


def banner(started: Started) -> str:
    """Its lines, the command to type next at the end."""
    what = f"in front of {started.upstream}, " if started.upstream is not None else ""
    room = (
        f"{format_bytes(started.used_bytes)} of {format_bytes(started.bound_bytes)}"
        if started.bound_bytes
        else (f"{format_bytes(started.used_bytes)}, no bound; {format_bytes(started.free_bytes)} free")
    )
    keys = ", ".join(started.access_keys[:3]) + (" …" if len(started.access_keys) > 3 else "")
    key_option = "" if started.credentials is None else f" --credentials {shlex.quote(started.credentials)}"
    link = "not paced" if started.link_bytes_per_s is None else f"{started.link_bytes_per_s * 1e-9:.3g} GB/s"
    rows = [
        ("version", __version__),
        ("data", f"{started.data} ({what}{room})"),
        ("caches", _caches(started)),
        ("memory", f"{format_bytes(started.dram_bytes)} for chunks" if started.dram_bytes else "none for chunks"),
        *([("compression", started.compression)] if started.compression else []),
        ("transports", ", ".join(started.transports)),
        ("link", link),
        ("access key", f"{keys} ({started.keys_from})"),
        ("page", f"{started.url}/{SERVICE_PREFIX}/"),
        ("next", f"objectcache status {started.url}{key_option}"),
    ]
    return "\n".join(f"  {name:<12}{text}" for name, text in rows)


def _caches(started: Started) -> str:
    if started.upstream is not None:
        return "all buckets: chunks leave ahead of others, and the service upstream keeps them"
    if not started.caches:
        return "none: nothing is ever evicted (--cache BUCKET makes one)"
    return ", ".join(f"{name} ({_size_told(nbytes, started)})" for name, nbytes in started.caches)


def _size_told(nbytes: int | None, started: Started) -> str:
    if nbytes is None:
        return "as the directory"
    there_bytes = started.used_bytes + started.free_bytes
    few = f", of which the file system has {format_bytes(there_bytes)}" if nbytes > there_bytes else ""
    return format_bytes(nbytes) + few
