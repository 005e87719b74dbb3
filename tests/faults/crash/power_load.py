"""Concurrent writes to a store in this process, written down like the harness's: small objects, packed and not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from random import Random

from descriptors.errors import ObjectCacheError
from descriptors.objects import (
    Attributes,
    ClaimedPart,
    CompleteRequest,
    CopyRequest,
    PartRequest,
    PutRequest,
    ReadRequest,
    UploadRef,
    UploadRequest,
)
from storage_server.service.storage import EmbeddedStorage
from tests.faults.crash.journal import Journal
from tests.faults.crash.model import Shown
from tests.faults.crash.versions import Piece, Version, md5, multipart_etag, pairs
from tests.support.chunks import BytesBody

BUCKET = "power"
PACKED_BYTES_MAX = 16 * 1024
TASKS = 6
KEYS_PER_TASK = 4
SIZES = (0, 1, 100, 5000, 12_000, PACKED_BYTES_MAX, PACKED_BYTES_MAX + 1, 60_000)


@dataclass(slots=True)
class PowerLoad:
    """One task per group of keys."""

    journal: Journal
    rng: Random
    seeds: list[int] = field(default_factory=lambda: [0])

    async def run(self, storage: EmbeddedStorage, steps: int) -> None:
        """Every task takes `steps`, or fewer when the store fails (after a cut it is of no interest any more)."""
        await asyncio.gather(*(self._task(storage, index, steps) for index in range(TASKS)))

    async def _task(self, storage: EmbeddedStorage, index: int, steps: int) -> None:
        keys = [f"{index}/{number}" for number in range(KEYS_PER_TASK)]
        rng = Random(self.rng.random())
        for _ in range(steps):
            kind = rng.random()
            key = rng.choice(keys)
            version = self._last(key)
            if kind < 0.55:
                await self._put(storage, key, rng.choice(SIZES))
            elif kind < 0.65:
                await self._write("delete", {key: None}, storage.objects.delete_object("OWNERKEY", BUCKET, key))
            elif kind < 0.7:
                await self._write(
                    "multi-delete",
                    dict.fromkeys(keys[:2]),
                    storage.objects.delete_objects("OWNERKEY", BUCKET, keys[:2]),
                )
            elif kind < 0.8 and version is not None:
                target = rng.choice(keys)
                request = CopyRequest(ReadRequest(BUCKET, key), BUCKET, target)
                await self._write("copy", {target: version.copied()}, storage.objects.copy_object("OWNERKEY", request))
            elif kind < 0.88 and version is not None:
                tags = {"t": str(rng.random())}
                result = replace(version, tags=pairs(tags))
                await self._write("tag", {key: result}, storage.objects.set_tags("OWNERKEY", BUCKET, key, tags))
            else:
                await self._multipart(storage, key, rng)

    def _last(self, key: str) -> Shown:
        return self.journal.histories[key].last if key in self.journal.histories else None

    def _piece(self, nbytes: int) -> tuple[Piece, bytes]:
        """Every third time bytes that others of this length have, too."""
        self.seeds[0] += 1
        piece = Piece(self.seeds[0] if self.seeds[0] % 3 else 0, nbytes)
        return piece, piece.body()

    async def _write(self, kind: str, results: dict[str, Shown], action: object) -> None:
        operation = self.journal.begin("store", kind, results)
        try:
            await action  # type: ignore[misc]
        except ObjectCacheError as error:
            self.journal.fail("store", f"{kind} {operation.number}: {error}")
            raise
        self.journal.acknowledge("store", operation)

    async def _put(self, storage: EmbeddedStorage, key: str, nbytes: int) -> None:
        piece, body = self._piece(nbytes)
        version = Version((piece,), md5(body))
        await self._write(
            "put",
            {key: version},
            storage.objects.put_object("OWNERKEY", PutRequest(BUCKET, key, nbytes), BytesBody(body)),
        )

    async def _multipart(self, storage: EmbeddedStorage, key: str, rng: Random) -> None:
        upload = UploadRef(
            BUCKET, key, await storage.uploads.create_upload("OWNERKEY", UploadRequest("k", BUCKET, key, Attributes()))
        )
        piece, body = self._piece(rng.choice(SIZES[1:]))
        for number, data in ((2, self._piece(5000)[1]), (1, body[:1]), (1, body)):
            sent = await storage.uploads.put_part("OWNERKEY", PartRequest(upload, number, len(data)), BytesBody(data))
        if rng.random() < 0.3:
            await storage.uploads.abort_upload("OWNERKEY", upload)
            return
        version = Version((piece,), multipart_etag([md5(body)]))
        request = CompleteRequest(upload, [ClaimedPart(1, sent.etag)])
        await self._write("complete", {key: version}, storage.uploads.complete_upload("OWNERKEY", request))
