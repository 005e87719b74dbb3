"""A further tier in one file: chunks that servers keep for each other in a folder, as on a shared fast disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from storage_server.delivery.gather.landing import Landed
from storage_server.home.further_tier import FurtherTier
from storage_server.home.rules.remote_entry import ENTRY_BYTES, RemoteEntry, decode_entry, encode_entry


class FolderTier(FurtherTier):
    """Each chunk is a file: its entry, and its bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._changed_at: dict[tuple[str, str], float] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        self.read_count = 0

    async def close(self) -> None:
        await asyncio.gather(*self._calls)

    def may_have(self, bucket: str, key: str) -> bool:
        return True

    async def read(self, bucket: str, key: str, landed: Landed) -> RemoteEntry | None:
        landed.hold()
        reading = self._call(asyncio.to_thread(self._read, bucket, key, landed.view))
        reading.add_done_callback(lambda _: landed.release())
        entry = await asyncio.shield(reading)
        if entry is None or entry.seen_at <= self._changed_at.get((bucket, key), 0.0):
            return None
        self.read_count += 1
        return entry

    def found_wrong(self, bucket: str, key: str) -> None:
        self.distrust(bucket, [key])

    def admit(self, entry: RemoteEntry, landed: Landed) -> None:
        header = encode_entry(entry)
        if header is not None:
            landed.hold()
            writing = self._call(asyncio.to_thread(self._write, entry, header, landed.view))
            writing.add_done_callback(lambda _: landed.release())

    def distrust(self, bucket: str, keys: Sequence[str]) -> None:
        self._changed_at |= dict.fromkeys(((bucket, key) for key in keys), time.time())

    async def remove(self, bucket: str, keys: Sequence[str]) -> None:
        self.distrust(bucket, keys)
        await asyncio.gather(*self._calls)  # what is being written must not come after this
        for key in keys:
            await asyncio.to_thread(partial(self._place(bucket, key).unlink, missing_ok=True))

    def _call(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    def _place(self, bucket: str, key: str) -> Path:
        return self._folder / sha256(f"{bucket}/{key}".encode()).hexdigest()

    def _read(self, bucket: str, key: str, view: memoryview) -> RemoteEntry | None:
        try:
            with self._place(bucket, key).open("rb") as file:
                entry = decode_entry(file.read(ENTRY_BYTES).ljust(ENTRY_BYTES, b"\0"), bucket, key)
                return entry if entry is not None and file.readinto(view) == len(view) else None
        except FileNotFoundError:
            return None

    def _write(self, entry: RemoteEntry, header: bytes, view: memoryview) -> None:
        place = self._place(entry.bucket, entry.info.key)
        new = place.with_suffix(".new")
        new.write_bytes(header + view)
        new.rename(place)
