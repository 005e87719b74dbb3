"""Bodies for a store in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator

from descriptors.objects import BodyDigests
from descriptors.storage_api import Piece


class BytesBody:
    """A body of bytes, without digests. Implements descriptors.storage_api.Body."""

    has_sha256 = False
    is_held_back = False

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aiter__(self) -> AsyncIterator[Piece]:
        yield self._data

    def digests(self) -> BodyDigests:
        """None."""
        return BodyDigests()
