"""Replacing a stored chunk by an encoded one, in buckets whose owner asked for it (`lossy = "replace"`).

The chunk is read and proved, encoded in a thread of its own that works half of the time, decoded again, and compared.
If its error is within the bucket's bound, one transaction puts a new object in its place, provided that the key still
shows what was read: with its own length, ETag, checksum and date, and with its form in its headers. A crash leaves the
one object or the other. A reader of the exact chunk keeps it to the end.

Only a chunk is replaced whose PUT declared its layout, so that whoever wrote it decides, and not whoever reads it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial

from descriptors.errors import ObjectCacheError
from descriptors.headers import CLASS_HEADER, CODEC_HEADER, LAYOUT_HEADER
from descriptors.kv_forms import KvLayout
from descriptors.layer_forms import LossBasis
from descriptors.objects import Attributes, BodyDigests, ObjectInfo
from descriptors.storage_api import Piece
from objectcache.adapters.threads import to_end
from storage_server.cache.policies.replacement import replacements
from storage_server.cache.policies.utility_policy import UtilitySettings
from storage_server.cache.recoding import Recoder
from storage_server.kernel.data.bodies import BodyWriter
from storage_server.kernel.data.extents import ExtentFiles
from storage_server.kernel.index import transaction
from storage_server.kernel.index.committer import Committer
from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.reads import Reads
from storage_server.kernel.rules.rows import StoredObject
from storage_server.planning.extent import CorruptExtentError, Extent, read_object
from storage_server.planning.forms import Encoded, LossView, Reading, shape_of
from storage_server.planning.losses import LossTable
from storage_server.settings import CacheSettings

REPLACED_BYTES_MAX = 64 << 20
"""Larger chunks are evicted: encoding one must not keep others waiting for seconds."""
MayLeave = Callable[[], AbstractAsyncContextManager[bool]]
"""Says whether an object may leave. While its block runs nobody is promised the object."""
_log = logging.getLogger(__name__)


class Replacer:
    """Encodes chunks of one store."""

    def __init__(
        self,
        settings: UtilitySettings,
        losses: LossTable,
        reads: Reads,
        files: ExtentFiles,
        writer: BodyWriter,
        committer: Committer,
    ) -> None:
        self._settings = settings
        self._losses = losses
        self._reads = reads
        self._files = files
        self._writer = writer
        self._committer = committer
        self._recoder = Recoder()
        self.replaced_count = 0
        """Chunks that were replaced since the start."""
        self.freed_bytes = 0
        """The bytes by which they are smaller."""

    @property
    def encoding_s(self) -> float:
        """The time that encoding has taken."""
        return self._recoder.busy_s

    def close(self) -> None:
        """Wait for the chunk that is being encoded."""
        self._recoder.close()

    async def encoded(self, bucket: str, key: str, version: int, cache: CacheSettings) -> Made | None:
        """The chunk encoded, within the bounds of its bucket; None where the key shows another version, or what it
        shows cannot be replaced.
        """
        async with self._reads.open_stored(bucket, key) as (stored, extents):
            if stored is None or stored.version != version:
                return None
            layout = layout_of(stored.info.attributes.headers)
            if layout is None or layout.nbytes != stored.info.nbytes or layout.nbytes > REPLACED_BYTES_MAX:
                return None
            content_class = stored.info.attributes.headers.get(CLASS_HEADER, "")
            loop = asyncio.get_running_loop()
            view = LossView(self._losses, self._losses.model_of(bucket, [key]), cache.max_loss)
            work = partial(self._encode, layout, content_class, list(extents), cache.max_error, view)
            try:
                made = await to_end(loop.run_in_executor(self._recoder.threads, work))
            except CorruptExtentError as error:
                _log.warning("%s/%s was not encoded: %s", bucket, key, error)
                self._reads.damaged.note(bucket, key, list(extents))
                return None
            except (OSError, MemoryError) as error:
                _log.warning("%s/%s was not encoded: %r", bucket, key, error)
                return None
        if made is None:
            return None
        encoded, data = made
        told = view.told(encoded)
        return Made(stored, replace(encoded, least_loss=told.kl if told.basis is LossBasis.CALIBRATED else 0.0), data)

    def _encode(
        self,
        layout: KvLayout,
        content_class: str,
        extents: list[Extent],
        max_error: float | None,
        losses: LossView,
    ) -> tuple[Encoded, bytes] | None:
        """Runs in the thread."""
        shape = shape_of(layout)
        reading = Reading(shape, layout.num_layers, tuple(self._settings.codecs), losses=losses)
        codecs = [
            codec
            for codec in replacements(shape, layout.num_layers, content_class, self._settings)
            if reading.bears(reading.loss_of((codec,)))
        ]
        if not codecs:
            return None
        exact = memoryview(bytearray(layout.nbytes))
        read_object(self._files.open.read_into, extents, 0, exact)
        for codec in codecs:
            made = self._recoder.encode(exact, reading, codec)
            if made is None or max_error is None or made[0].worst_error <= max_error:
                return made
        return None

    async def put(self, bucket: str, made: Made, may_leave: MayLeave) -> bool:
        """Put the encoded chunk in the place of the exact one, unless `may_leave` forbids it, or the key shows
        something else by now. False where there is no room.
        """
        before = made.before.info
        algorithm = None if before.checksum is None else before.checksum.algorithm
        try:
            async with self._writer.received(len(made.data), algorithm, made) as (part, pending), may_leave() as may:
                if not may:
                    return True
                info = ObjectInfo(
                    key=before.key,
                    nbytes=part.nbytes,
                    etag=part.etag,
                    modified_at=time.time(),
                    attributes=made.attributes,
                    checksum=part.checksum,
                )

                def publish(tx: Transaction) -> bool:
                    return transaction.replace_version(tx, bucket, made.before, info, part)

                is_put = await to_end(asyncio.ensure_future(self._committer.commit(publish, pending, frees=True)))
        except ObjectCacheError as error:
            _log.warning("%s/%s was not replaced: %s", bucket, before.key, error)
            return False
        if is_put:
            self.replaced_count += 1
            self.freed_bytes += before.nbytes - len(made.data)
        return True


class Made:
    """An encoded chunk, and the object that it takes the place of. Implements descriptors.storage_api.Body."""

    has_sha256 = False
    is_held_back = False

    def __init__(self, before: StoredObject, encoded: Encoded, data: bytes) -> None:
        self.before = before
        self.encoded = encoded
        self.data = data

    @property
    def attributes(self) -> Attributes:
        """Those of the object before, with the form in place of the layout."""
        before = self.before.info.attributes
        headers = {name: value for name, value in before.headers.items() if name != LAYOUT_HEADER}
        return replace(before, headers=headers | {CODEC_HEADER: self.encoded.kept.text})

    async def __aiter__(self) -> AsyncIterator[Piece]:
        yield self.data

    def digests(self) -> BodyDigests:
        """None: the bytes were made here."""
        return BodyDigests()


def layout_of(headers: Mapping[str, str]) -> KvLayout | None:
    """The layout that an object's PUT declared; None where it is no exact chunk of a known layout."""
    text = headers.get(LAYOUT_HEADER)
    if text is None or CODEC_HEADER in headers:
        return None
    try:
        return KvLayout.parse(text)
    except ValueError:
        return None
