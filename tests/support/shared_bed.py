"""Servers on one shared directory, in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import PutRequest, ReadRequest
from storage_server.home.directory.store import SharedDirectory
from storage_server.settings import StorageSettings, UpstreamSettings
from tests.support.chunks import BytesBody
from tests.support.faulty_disk import FaultyDisk

KEY = "OWNERKEY"
BUCKET = "bucket"


class Disk(FaultyDisk):
    """`write` knows the names of files that it did not make, too."""

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        self._names.setdefault(fd, Path(f"/proc/self/fd/{fd}").readlink().name)
        return super().write(fd, view, offset)


def made(tmp_path: Path, name: str, **chosen: Any) -> SharedDirectory:
    root, local = tmp_path / "shared", tmp_path / name / "shared"
    root.mkdir(exist_ok=True)
    local.parent.mkdir(exist_ok=True)
    disk = chosen.pop("disk", None)
    upstream = UpstreamSettings(f"file://{root}", poll_s=3600.0, **chosen)
    return SharedDirectory(upstream, StorageSettings(data_dir=local.parent), local, disk)


@asynccontextmanager
async def opened(tmp_path: Path, name: str, **chosen: Any) -> AsyncIterator[SharedDirectory]:
    shared = made(tmp_path, name, **chosen)
    await shared.start()
    try:
        yield shared
    finally:
        await shared.close()


async def put(shared: SharedDirectory, key: str, data: bytes, **options: Any) -> None:
    await shared.objects.put_object(KEY, PutRequest(BUCKET, key, len(data), **options), BytesBody(data))


async def get(shared: SharedDirectory, key: str) -> bytes | None:
    try:
        async with shared.objects.open_object(KEY, ReadRequest(BUCKET, key)) as read:
            return b"".join([bytes(piece) async for piece in read.body])
    except CallerError as error:
        if error.code is not ErrorCode.NO_SUCH_KEY:
            raise
        return None


def data_files(tmp_path: Path) -> set[Path]:
    return set((tmp_path / "shared" / "writers").glob("*/extents/*/*"))


def journal_of(tmp_path: Path, shared: SharedDirectory) -> Path:
    (path,) = (tmp_path / "shared" / "writers" / shared.writer).glob("journal-*")
    return path
