"""An embedded store to try things on, and what lies beneath it."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from descriptors.objects import (
    BodyDigests,
    ObjectInfo,
    PutRequest,
    RangeSpec,
    ReadRequest,
)
from storage_server.home.embedded import EmbeddedStore
from storage_server.settings import StorageSettings
from tests.support.chunks import BytesBody
from tests.support.faulty_disk import FaultyDisk
from tests.support.waiting import LIMIT_S

PACKED_BYTES_MAX = 64 * 1024
SMALL, LARGE = 50_000, 200_000


async def opened(directory: Path, disk: FaultyDisk | None = None, **options: object) -> EmbeddedStore:
    chosen = {"packed_bytes_max": PACKED_BYTES_MAX, **options}
    store = EmbeddedStore(StorageSettings(data_dir=directory, **chosen), disk)  # type: ignore[arg-type]
    await store.start()
    return store


def disk_of(store: EmbeddedStore) -> FaultyDisk:
    disk = store.files.disk
    assert isinstance(disk, FaultyDisk)
    return disk


async def put(store: EmbeddedStore, key: str, data: bytes, digests: BodyDigests | None = None) -> ObjectInfo:
    return await store.objects.put_object("k", PutRequest("bbb", key, len(data)), BytesBody(data, digests=digests))


async def get(store: EmbeddedStore, key: str, span: RangeSpec | None = None, part: int | None = None) -> bytes:
    async with store.objects.open_object("k", ReadRequest("bbb", key, span, part)) as read:
        return b"".join([bytes(piece) async for piece in read.body])


def content(nbytes: int, seed: int = 0) -> bytes:
    return hashlib.shake_128(seed.to_bytes(4, "little")).digest(nbytes)


def files_in(store: EmbeddedStore) -> set[str]:
    return {path.name for path in (store.settings.data_dir / "extents").glob("*/*") if path.is_file()}


async def named_files(store: EmbeddedStore) -> set[str]:
    return {row[0] for row in store.reader.here(lambda db: db.execute("SELECT file_id FROM extents").fetchall())}


async def settled(store: EmbeddedStore) -> None:
    """Until only named files, and the segment being written, are left; relaxed durability lets go once a second."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            spare = files_in(store) - await named_files(store)
            if all(store.segments.is_written(name) for name in spare):
                return
            await asyncio.sleep(0.02)  # nobody tells when the store lets a file go


def flip(store: EmbeddedStore, offset: int) -> None:
    """One bit of the only file."""
    (name,) = files_in(store)
    path = store.settings.data_dir / "extents" / name[:2] / name
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def remove_index(directory: Path) -> None:
    """The index of a store that is closed."""
    for path in directory.glob("index.sqlite3*"):
        path.unlink()
