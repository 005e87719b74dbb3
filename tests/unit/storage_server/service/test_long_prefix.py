"""A prefix of thousands of chunks: what is done for each chunk leaves the event loop to others."""

from __future__ import annotations

import asyncio
import sqlite3
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from awscrt import checksums

from descriptors.descriptor import Delivery, Descriptor
from descriptors.messages import LookupRequest
from descriptors.storage_api import DeliveryStart, Patience, Spans
from objectcache.adapters import threads
from storage_server.cache.rules import residency
from storage_server.delivery import pipeline
from storage_server.kernel import prefix_reads
from storage_server.kernel.data import extents
from storage_server.kernel.data.extents import extent_place
from storage_server.kernel.index import reader, resolved
from storage_server.service.storage import EmbeddedStorage
from storage_server.settings import StorageSettings
from tests.support.waiting import settled, until

CHUNKS = 3 * threads.HERE_ITEMS_MAX + 1
CHUNK_BYTES = 64
KEYS = tuple(f"{index:064x}" for index in range(CHUNKS))
FILE_ID = "ab" * 16
DATA = np.random.default_rng(1).bytes(CHUNKS * CHUNK_BYTES)
"""No two chunks are equal: deduplication would free the pages of one, which here holds other chunks, too."""


class Sink:
    """Counts what is sent."""

    def __init__(self) -> None:
        self.nbytes = 0

    async def begin(self, start: DeliveryStart) -> None:
        self.nbytes = 0

    async def write(self, view: memoryview) -> None:
        self.nbytes += len(view)

    async def send(self, spans: Spans, patience: Patience) -> None:
        self.nbytes += int(spans[:, 1].sum())

    def abort(self) -> None:
        raise AssertionError("the delivery was cut short")


async def filled(folder: Path) -> EmbeddedStorage:
    """A started storage server whose index has all KEYS, written past the server: putting them takes long."""
    settings = StorageSettings(data_dir=folder, dram_bytes=64 << 20, shm=False)
    storage = EmbeddedStorage(settings)
    await storage.start()
    await storage.objects.create_bucket("A", "bbb")
    await storage.close()
    extent_place(folder, FILE_ID).path.parent.mkdir()
    extent_place(folder, FILE_ID).path.write_bytes(DATA)
    index = sqlite3.connect(folder / "index.sqlite3")
    with index:
        for number, key in enumerate(KEYS):
            start = number * CHUNK_BYTES
            blocks = struct.pack("<I", checksums.crc32c(DATA[start : start + CHUNK_BYTES]))
            index.execute(
                "INSERT INTO objects VALUES ('bbb', ?, ?, ?, 'e', 1.7e9, '{}')", (key, number + 1, CHUNK_BYTES)
            )
            index.execute(
                "INSERT INTO extents VALUES (?, 1, 0, ?, ?, ?, 'e', 1.7e9, NULL, 1, ?, NULL)",
                (number + 1, CHUNK_BYTES, FILE_ID, start, blocks),
            )
    index.close()
    storage = EmbeddedStorage(settings)
    await storage.start()
    return storage


class Watched:
    """How many items the longest call had on the thread of the event loop, by function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop_thread = threading.get_ident()
        self.longest: dict[str, int] = {}
        self._watch(monkeypatch, prefix_reads, "usable_prefix", lambda found, *_, **__: len(found))
        self._watch(monkeypatch, pipeline, "make_table", lambda chunks, _: len(chunks))
        self._watch(monkeypatch, reader, "_kept", lambda pins, files, found, _: len(found))
        self._watch(monkeypatch, extents.PinSet, "release", lambda pins: pins.count)
        self._watch(monkeypatch, resolved.ResolvedKeys, "find", lambda _, bucket, keys: len(keys))
        self._watch(monkeypatch, residency.Residency, "pin", lambda _, found, *reading: len(found))
        self._watch(monkeypatch, residency.Residency, "unpin", lambda _, found, offsets: len(found))
        self._watch(monkeypatch, residency.Residency, "admit", lambda _, found, *known: len(found))

    def _watch(self, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, count: Callable[..., int]) -> None:
        watched = getattr(place, name)
        self.longest[name] = -1

        def call(*arguments: Any, **options: Any) -> Any:
            here = threading.get_ident() == self._loop_thread
            self.longest[name] = max(self.longest[name], count(*arguments, **options) if here else 0)
            return watched(*arguments, **options)

        monkeypatch.setattr(place, name, call)


@pytest.mark.slow
async def test_no_step_over_all_chunks_holds_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = await filled(tmp_path)
    try:
        watched = Watched(monkeypatch)
        descriptor = Descriptor(KEYS, 1, 16, CHUNK_BYTES, delivery=Delivery.LAYER_MAJOR)
        for _ in range(3):  # from disk and into memory, from memory
            sink = Sink()
            await storage.prefixes.deliver("A", "bbb", descriptor, sink)
            assert sink.nbytes == CHUNKS * CHUNK_BYTES
            await until(lambda: not storage.dram._working)
        assert (await storage.prefixes.lookup("A", "bbb", LookupRequest(KEYS))).matched == CHUNKS
        assert all(0 <= count <= threads.HERE_ITEMS_MAX for count in watched.longest.values()), watched.longest
    finally:
        await storage.close()


async def test_a_descriptor_given_up_while_it_is_resolved_leaves_no_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = await filled(tmp_path)
    try:
        resolving, going_on = threading.Event(), threading.Event()
        kept = reader._kept

        def slowly(*arguments: Any) -> bool:
            resolving.set()
            going_on.wait(60)
            return kept(*arguments)

        monkeypatch.setattr(reader, "_kept", slowly)
        descriptor = Descriptor(KEYS, 1, 16, CHUNK_BYTES, delivery=Delivery.LAYER_MAJOR)
        task = asyncio.create_task(storage.prefixes.deliver("A", "bbb", descriptor, Sink()))
        await until(resolving.is_set)
        task.cancel()
        await settled()
        going_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not storage.store.files.pinned_count)
    finally:
        await storage.close()
