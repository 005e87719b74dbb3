"""Tiers between the cache of this server and home: memory or disks that others have filled, asked before home."""

from __future__ import annotations

from collections.abc import Sequence

from storage_server.delivery.gather.landing import Landed, Landing
from storage_server.home.rules.remote_entry import RemoteEntry


class FurtherTier:
    """A tier that has nothing and keeps nothing. Those that do replace methods. Used on one event loop.

    The server does not believe a tier: it checks every byte against the entry's proof before anybody gets it. A tier
    ends each read by itself, soon: home waits meanwhile.
    """

    async def start(self) -> None:
        """Begin to reach what the tier is made of. Raises ServerError where it can never be reached."""

    async def close(self) -> None:
        """End what is under way."""

    def landing(self, nbytes: int) -> Landing | None:
        """Landing memory which the tier can reach; None where any memory will do."""
        return None

    def may_have(self, bucket: str, key: str) -> bool:
        """Whether asking for a chunk makes sense now."""
        return False

    async def read(self, bucket: str, key: str, landed: Landed) -> RemoteEntry | None:
        """Bring a chunk into its memory; None where it is not there, or not soon enough. Its bytes are not proved. The
        memory is held until nothing writes there any more.
        """
        return None

    def found_wrong(self, bucket: str, key: str) -> None:
        """The bytes that `read` brought were not those of the chunk."""

    def admit(self, entry: RemoteEntry, landed: Landed) -> None:
        """Keep a chunk that came from home, behind all else, or do not. The memory may be held until it is copied."""

    def distrust(self, bucket: str, keys: Sequence[str]) -> None:
        """These chunks have changed: copies that home had shown before now are not given out any more."""

    async def remove(self, bucket: str, keys: Sequence[str]) -> None:
        """Distrust these chunks, and remove them, as far as that can be done soon."""
