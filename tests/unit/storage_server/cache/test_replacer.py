"""Replacing a chunk while others change it. What readers see of it is tried in tests/integration/test_replacing.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from descriptors.chunk_flags import CODEC_HEADER, LAYOUT_HEADER
from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.headers import CLASS_HEADER
from descriptors.kv_forms import EncodedForm, KvLayout
from descriptors.objects import Attributes, ChecksumAlgorithm, PutRequest, ReadRequest
from objectcache.kv_codecs.chains import Chain
from objectcache.kv_codecs.encoding import decode
from objectcache.kv_codecs.layer import Codec
from objectcache.kv_codecs.loss import loss
from storage_server.cache.policies.ladder import ChunkForm
from storage_server.cache.policies.utility import CodecFigures, UtilitySettings
from storage_server.cache.replacer import Made, Replacer
from storage_server.cache.rules.entry import Entry
from storage_server.cache.rules.replacing import Replacement
from storage_server.home.embedded import EmbeddedStore
from storage_server.planning.forms import kept_form
from storage_server.settings import CacheSettings, StorageSettings
from tests.support.chunks import BytesBody

LAYOUT = KvLayout(4, 16, 128, "float32")
CACHE = CacheSettings("cached", 1 << 20, replaces=True)
DATA = np.random.default_rng(1).standard_normal(LAYOUT.nbytes // 4).astype("<f4").tobytes()
HEADERS = {LAYOUT_HEADER: LAYOUT.text, CLASS_HEADER: "code", "x-amz-meta-a": "b", "content-type": "text/plain"}


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[tuple[EmbeddedStore, Replacer]]:
    settings = StorageSettings(
        data_dir=folder,
        caches=(CACHE,),
        compression=UtilitySettings({Codec.KIVI4: CodecFigures(0.99, 2e9)}),
    )
    store = EmbeddedStore(settings)
    await store.start()
    assert store.replacer is not None
    try:
        await store.objects.create_bucket("k", "cached")
        yield store, store.replacer
    finally:
        store.close()


async def put(store: EmbeddedStore, data: bytes = DATA) -> int:
    """Put the chunk; returns its version."""
    request = PutRequest(
        "cached", "key", len(data), attributes=Attributes(HEADERS, {"a": "1"}), checksum=ChecksumAlgorithm.CRC32C
    )
    await store.objects.put_object("k", request, BytesBody(data))
    return version(store)


def version(store: EmbeddedStore) -> int:
    stored = store.objects.stored("cached", "key")
    assert stored is not None
    return stored.version


@asynccontextmanager
async def may() -> AsyncIterator[bool]:
    yield True


@asynccontextmanager
async def may_not() -> AsyncIterator[bool]:
    yield False


def replacement(version: int, codec: Codec = Codec.KIVI4, chain: Chain = ()) -> Replacement:
    return Replacement("cached", "key", Entry(version, 0, 0.0, 0.0, form=ChunkForm(LAYOUT, chain)), codec, 0)


async def made(store: EmbeddedStore, replacer: Replacer) -> Made:
    found = await replacer.encoded(replacement(version(store)), CACHE)
    assert found is not None
    return found


async def test_the_new_object_keeps_what_was_said_of_the_old_one(tmp_path: Path) -> None:
    async with opened(tmp_path) as (store, replacer):
        before = await put(store)
        assert await replacer.put("cached", await made(store, replacer), may)
        assert version(store) != before
        head = await store.objects.head_object("k", ReadRequest("cached", "key"))
        headers = dict(head.info.attributes.headers)
        assert EncodedForm.parse(headers.pop(CODEC_HEADER)).layout == LAYOUT
        assert headers == {name: value for name, value in HEADERS.items() if name != LAYOUT_HEADER}
        assert head.info.attributes.tags == {"a": "1"}
        assert head.info.checksum is not None
        assert head.info.checksum.algorithm is ChecksumAlgorithm.CRC32C
        assert head.info.nbytes < LAYOUT.nbytes / 3
        assert (replacer.replaced_count, replacer.freed_bytes) == (1, LAYOUT.nbytes - head.info.nbytes)
        assert await replacer.encoded(replacement(before), CACHE) is None  # what it shows is another object


@pytest.mark.parametrize("change", ["put", "delete", "tags", "bucket"])
async def test_what_changed_meanwhile_stays_changed(tmp_path: Path, change: str) -> None:
    async with opened(tmp_path) as (store, replacer):
        await put(store)
        encoded = await made(store, replacer)
        if change == "put":
            await put(store)
        elif change == "tags":
            await store.objects.set_tags("k", "cached", "key", {"objectcache-pin": "true"})
        else:
            await store.objects.delete_object("k", "cached", "key")
        if change == "bucket":
            await store.objects.delete_bucket("k", "cached")
        assert not await replacer.put("cached", encoded, may)
        assert replacer.replaced_count == 0
        if change in ("delete", "bucket"):
            with pytest.raises(CallerError):
                await store.objects.head_object("k", ReadRequest("cached", "key"))
        else:
            async with store.objects.open_object("k", ReadRequest("cached", "key")) as read:
                assert b"".join([bytes(piece) async for piece in read.body]) == DATA


async def test_what_may_not_leave_stays(tmp_path: Path) -> None:
    async with opened(tmp_path) as (store, replacer):
        before = await put(store)
        assert not await replacer.put("cached", await made(store, replacer), may_not)
        assert version(store) == before


async def test_damaged_bytes_are_not_encoded_and_are_known_to_be_damaged(tmp_path: Path) -> None:
    async with opened(tmp_path) as (store, replacer):
        before = await put(store)
        (extent,) = store.objects.locations("cached", "key")
        with (tmp_path / "extents" / extent.file_id[:2] / extent.file_id).open("r+b") as file:
            file.seek(extent.offset + 5000)
            file.write(b"\xff\x00\xff")
        assert await replacer.encoded(replacement(before), CACHE) is None
        assert store.objects.is_damaged("cached", "key")


async def test_without_room_the_chunk_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as (store, replacer):
        before = await put(store)
        encoded = await made(store, replacer)

        async def full(*_: object, **__: object) -> None:
            raise ServerError(ErrorCode.INSUFFICIENT_STORAGE, "played")

        monkeypatch.setattr(store.committer, "commit", full)
        assert not await replacer.put("cached", encoded, may)
        assert version(store) == before


async def test_readers_keep_the_exact_bytes_that_they_have_begun(tmp_path: Path) -> None:
    async with opened(tmp_path) as (store, replacer):
        await put(store)
        async with store.objects.open_object("k", ReadRequest("cached", "key")) as read:
            assert await replacer.put("cached", await made(store, replacer), may)
            assert b"".join([bytes(piece) async for piece in read.body]) == DATA


async def test_a_cancelled_replacement_is_whole_or_has_not_happened(tmp_path: Path) -> None:
    async with opened(tmp_path) as (store, replacer):
        for turns in range(12):
            before = await put(store)
            encoded = await made(store, replacer)
            running = asyncio.create_task(replacer.put("cached", encoded, may))
            for _ in range(turns):
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait((running,))
            await store.committer.commit(lambda _: None)  # by then all that came before it has been carried out
            async with store.objects.open_object("k", ReadRequest("cached", "key")) as read:
                data = b"".join([bytes(piece) async for piece in read.body])
                is_encoded = CODEC_HEADER in read.head.info.attributes.headers
            assert data == (encoded.data if is_encoded else DATA)
            assert is_encoded == (version(store) != before)


async def test_an_encoded_chunk_is_encoded_further_and_its_label_says_so(tmp_path: Path) -> None:
    async with opened(tmp_path) as (store, replacer):
        await put(store)
        first = await replacer.encoded(replacement(version(store), Codec.KIVI8), CACHE)
        assert first is not None
        assert await replacer.put("cached", first, may)
        second = await replacer.encoded(replacement(version(store), Codec.KIVI4, (Codec.KIVI8,)), CACHE)
        assert second is not None
        assert await replacer.put("cached", second, may)
        head = await store.objects.head_object("k", ReadRequest("cached", "key"))
        text = head.info.attributes.headers[CODEC_HEADER]
        found = kept_form(text)
        assert found is not None
        assert found.chain == (Codec.KIVI8, Codec.KIVI4)
        assert text.endswith(";before=kivi8-1")
        assert head.info.nbytes == found.nbytes < len(first.data)
        assert second.encoded.worst_error > first.encoded.worst_error
        exact, out = np.frombuffer(DATA, np.uint8).reshape(4, -1), np.empty(len(DATA) // 4, np.uint8)
        for layer, before in enumerate(exact):
            size = found.layer_bytes
            decode(second.data[layer * size : (layer + 1) * size], found.shape, out)
            assert loss(before, out, found.shape).worst <= found.worst_error


async def test_an_error_above_the_bound_of_the_bucket_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as (store, replacer):
        before = await put(store)
        bounded = CacheSettings("cached", 1 << 20, replaces=True, max_error=0.001)
        assert await replacer.encoded(replacement(before), bounded) is None
