"""Replacing a stored chunk by an encoded one, in buckets whose owner asked for it (`lossy = "replace"`).

The chunk is read and proved, encoded in a thread of its own that works half of the time, decoded again, and compared.
If its error is within the bucket's bound, one transaction puts a new object in its place, provided that the key still
shows what was read: with its own length, ETag, checksum and date, and with its form in its headers. A crash leaves the
one object or the other. A reader of the chunk as it was keeps it to the end. An encoded chunk is encoded further from
its present bytes, and its label tells which codecs it has passed.

Only a chunk is replaced whose PUT declared its layout, so that whoever wrote it decides, and not whoever reads it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial

from descriptors.errors import ObjectCacheError
from descriptors.headers import CODEC_HEADER, LAYOUT_HEADER
from descriptors.layer_forms import LossBasis
from descriptors.objects import Attributes, BodyDigests, ObjectInfo
from descriptors.storage_api import Piece
from objectcache.adapters.threads import to_end
from objectcache.kv_codecs.layer import Codec
from storage_server.cache.policies.ladder import ChunkForm, Ladder, Ladders
from storage_server.cache.policies.utility import UtilitySettings
from storage_server.cache.recoding import Recoder
from storage_server.cache.rules.entry import Name
from storage_server.cache.rules.replacing import MakeLadder, Replacement
from storage_server.delivery.scheduler.profiles import ComputeProfile, computed_rates
from storage_server.kernel.data.bodies import BodyWriter
from storage_server.kernel.data.extents import ExtentFiles
from storage_server.kernel.index import transaction
from storage_server.kernel.index.committer import Committer
from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.reads import Reads
from storage_server.kernel.rules.rows import StoredObject
from storage_server.planning.extent import CorruptExtentError, Extent, read_object
from storage_server.planning.forms import Encoded, LossView, Reading, kept_form, shape_of
from storage_server.planning.losses import LossTable
from storage_server.settings import CacheSettings

REPLACED_BYTES_MAX = 64 << 20
"""Larger chunks are evicted: encoding one must not keep others waiting for seconds."""
MayReplace = Callable[[], AbstractAsyncContextManager[bool]]
"""Says whether an object may be replaced. While its block runs nobody is promised the object."""
_log = logging.getLogger(__name__)


def ladders_of(
    settings: UtilitySettings, losses: LossTable, profiles: Sequence[ComputeProfile] = ()
) -> Callable[[CacheSettings], MakeLadder]:
    """The ladders of the chunks of a bucket, within its bound of the loss; `profiles` say how fast KV is computed."""
    ladders = Ladders(settings, computed_rates(profiles))

    def ladder_of(cache: CacheSettings) -> MakeLadder:
        def made(name: Name, form: ChunkForm, refused: Collection[Codec]) -> Ladder:
            if form.layout.nbytes > REPLACED_BYTES_MAX:
                return ()
            bucket, key = name
            view = None if cache.max_loss is None else LossView(losses, losses.model_of(bucket, [key]), cache.max_loss)
            return ladders.of(form, view, refused)

        return made

    return ladder_of


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

    async def encoded(self, wanted: Replacement, cache: CacheSettings) -> Made | None:
        """The chunk encoded, within the bounds of its bucket; None where the key shows another version, or what it
        shows cannot be encoded so.
        """
        bucket, key, form = wanted.bucket, wanted.key, wanted.entry.form
        async with self._reads.open_stored(bucket, key) as (stored, extents):
            if stored is None or stored.version != wanted.entry.version or form is None:
                return None
            loop = asyncio.get_running_loop()
            view = LossView(self._losses, self._losses.model_of(bucket, [key]), cache.max_loss)
            before = kept_form(stored.info.attributes.headers.get(CODEC_HEADER, ""))
            nbytes = form.layout.nbytes if before is None else before.nbytes
            if nbytes != stored.info.nbytes:
                return None
            data = memoryview(bytearray(nbytes))
            work = partial(self._encode, form, before, wanted.codec, list(extents), data, cache, view)
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
        encoded, packed = made
        told = view.told(encoded)
        return Made(stored, replace(encoded, least_loss=told.kl if told.basis is LossBasis.CALIBRATED else 0.0), packed)

    def _encode(
        self,
        form: ChunkForm,
        before: Encoded | None,
        codec: Codec,
        extents: Sequence[Extent],
        data: memoryview,
        cache: CacheSettings,
        view: LossView,
    ) -> tuple[Encoded, bytes] | None:
        """Runs in the thread."""
        reading = Reading(shape_of(form.layout), form.layout.num_layers, (codec,), cache.max_error, losses=view)
        read_object(self._files.open.read_into, list(extents), 0, data)
        if before is None:
            made = self._recoder.encode(data, reading, codec)
        else:
            made = self._recoder.encode_further(data, before, reading, codec)
        return made if made is not None and reading.takes(made[0]) else None

    async def put(self, bucket: str, made: Made, may_replace: MayReplace) -> bool:
        """Put the encoded chunk in the place of the one before, unless `may_replace` forbids it, or the key shows
        something else by now. Whether it is there; it is not where there is no room, either.
        """
        before = made.before.info
        algorithm = None if before.checksum is None else before.checksum.algorithm
        try:
            async with self._writer.received(len(made.data), algorithm, made) as (part, pending), may_replace() as may:
                if not may:
                    return False
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
        return is_put


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
