"""The tags of chunks that were fetched from a service that does not say how many tags an object has. One of them may be
a pin, so they are read once, behind the fetch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from contextlib import suppress
from functools import partial

from descriptors.errors import ObjectCacheError
from descriptors.objects import ReadRequest
from descriptors.storage_api import SERVER_KEY
from objectcache.adapters.caller import CALLER
from storage_server.home.embedded import EmbeddedStore
from storage_server.home.key_locks import KeyLocks, Name
from storage_server.home.service import HomeObjects
from storage_server.kernel.index import transaction
from storage_server.kernel.index.transaction import Transaction

WAITING_MAX = 16_384
READERS = 4
READ_S_MAX = 30.0
_log = logging.getLogger(__name__)


class CopiedTags:
    """Reads tags in the order in which chunks came, READERS at once. Where more than WAITING_MAX wait, those that have
    waited longest are left out. Used on one event loop.
    """

    def __init__(self, objects: HomeObjects, cache: EmbeddedStore, locks: KeyLocks) -> None:
        self._objects = objects
        self._cache = cache
        self._locks = locks
        self._waiting: OrderedDict[Name, str] = OrderedDict()
        self._readers: set[asyncio.Task[None]] = set()

    def note(self, bucket: str, key: str, etag: str) -> None:
        """A chunk of this ETag has come, and its tags are not known."""
        if self._objects.counts_tags:
            return
        self._waiting[bucket, key] = etag
        if len(self._waiting) > WAITING_MAX:
            self._waiting.popitem(last=False)
        if len(self._readers) < READERS:
            reader = asyncio.create_task(self._read_all())
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)

    async def close(self) -> None:
        """Stop reading. Chunks whose tags were not read are not known to be pinned."""
        for reader in self._readers:
            reader.cancel()
        if self._readers:
            await asyncio.wait(self._readers)

    async def _read_all(self) -> None:
        """Work for the server itself: the chunks are of several callers, and the one whose fetch began this may have
        requests upstream that are slow.
        """
        CALLER.set(SERVER_KEY)
        while self._waiting:
            (bucket, key), etag = self._waiting.popitem(last=False)
            try:
                await self._read(bucket, key, etag)
            except (ObjectCacheError, TimeoutError) as error:
                _log.info("the tags of %s/%s could not be read: %s", bucket, key, error)
            except Exception:
                _log.exception("reading the tags of %s/%s", bucket, key)

    async def _read(self, bucket: str, key: str, etag: str) -> None:
        async with self._locks.held(bucket, [key]):  # nobody changes them here meanwhile
            async with asyncio.timeout(READ_S_MAX):
                found = (await self._objects.head_object(SERVER_KEY, ReadRequest(bucket, key))).info
            if found.etag == etag and found.attributes.tags:
                with suppress(ObjectCacheError):
                    change = partial(_take_over, bucket=bucket, key=key, etag=etag, tags=found.attributes.tags)
                    await self._cache.change(change, frees=True)


def _take_over(tx: Transaction, bucket: str, key: str, etag: str, tags: dict[str, str]) -> None:
    stored = transaction.find_object(tx.db, bucket, key)
    if stored is not None and stored.info.etag == etag and not transaction.is_dirty(tx.db, bucket, key):
        transaction.set_tags(tx, bucket, key, tags)
