"""Marks a data directory as a home of objects or as a cache of one upstream service. A directory is one or the other
for ever: copies must not be taken for the only objects, and the only objects must not be evicted like copies.
"""

from __future__ import annotations

import json
from pathlib import Path

from objectcache.adapters.beneath import Beneath
from storage_server.settings import UpstreamSettings

NAME = "upstream.json"
MARK_BYTES_MAX = 64 * 1024


class WrongDirectoryError(Exception):
    """The directory holds other objects than it is to hold; the message says what to do."""


def claim(directory: Path, upstream: UpstreamSettings | None) -> None:
    """Check that the directory may be used so, and mark a new one as a cache. Raises WrongDirectoryError, OSError."""
    mark = Beneath(directory, NAME)
    is_cache, is_used = mark.exists(), (directory / "index.sqlite3").exists()
    if upstream is None:
        if is_cache:
            raise WrongDirectoryError(
                f"{directory} is a cache of {_marked(mark)}: start with --upstream, or use another directory"
            )
        return
    if is_used and not is_cache:
        raise WrongDirectoryError(f"{directory} is the home of objects: a cache needs a directory of its own")
    if is_cache and _marked(mark) != upstream.endpoint:
        raise WrongDirectoryError(
            f"{directory} is a cache of {_marked(mark)}, not of {upstream.endpoint}: use another directory, or empty it"
        )
    if not is_cache:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        mark.write(json.dumps({"endpoint": upstream.endpoint}).encode() + b"\n")


def _marked(mark: Beneath) -> str:
    try:
        return str(json.loads(mark.read(MARK_BYTES_MAX))["endpoint"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise WrongDirectoryError(f"{mark} cannot be read: use another directory, or empty this one") from None
