"""The rules of descriptors.storage_api.ObjectsApi for buckets, their lifecycle rules and their listings, for every
implementation: subclass `BucketRules` and override `storage`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from descriptors.errors import ErrorCode
from descriptors.lifecycle import LifecycleRule
from descriptors.objects import BucketInfo, CopyRequest, ListPage, ListRequest, PutRequest, ReadRequest
from tests.contract.store.rules import (
    BUCKET,
    CALLER,
    OTHER_BUCKET,
    OTHER_CALLER,
    SMALL_BYTES,
    Feature,
    StoreRules,
    get,
    keys_of,
    optional,
    put,
    refusal,
)
from tests.support.chunks import BytesBody
from tests.support.store_bed import content

Call = Callable[[Any], Awaitable[object]]
NEEDS_BUCKET: dict[str, Call] = {
    "head_bucket": lambda storage: storage.objects.head_bucket(CALLER, "unknown"),
    "delete_bucket": lambda storage: storage.objects.delete_bucket(CALLER, "unknown"),
    "get_lifecycle": lambda storage: storage.objects.get_lifecycle(CALLER, "unknown"),
    "set_lifecycle": lambda storage: storage.objects.set_lifecycle(CALLER, "unknown", []),
    "put_object": lambda storage: storage.objects.put_object(CALLER, PutRequest("unknown", "key", 1), BytesBody(b"x")),
    "head_object": lambda storage: storage.objects.head_object(CALLER, ReadRequest("unknown", "key")),
    "open_object": lambda storage: storage.objects.open_object(CALLER, ReadRequest("unknown", "key")).__aenter__(),
    "object_parts": lambda storage: storage.objects.object_parts(CALLER, "unknown", "key"),
    "copy_object": lambda storage: storage.objects.copy_object(
        CALLER, CopyRequest(ReadRequest("unknown", "key"), BUCKET, "key")
    ),
    "copy_object to": lambda storage: storage.objects.copy_object(
        CALLER, CopyRequest(ReadRequest(BUCKET, "stored"), "unknown", "key")
    ),
    "delete_object": lambda storage: storage.objects.delete_object(CALLER, "unknown", "key"),
    "delete_objects": lambda storage: storage.objects.delete_objects(CALLER, "unknown", ["key"]),
    "set_tags": lambda storage: storage.objects.set_tags(CALLER, "unknown", "key", {}),
    "list_objects": lambda storage: storage.objects.list_objects(CALLER, ListRequest("unknown")),
}


class BucketRules(StoreRules):
    """Buckets."""

    # buckets

    async def test_a_bucket_is_there_from_its_creation_to_its_deletion(self, storage: Any) -> None:
        def ours(buckets: list[BucketInfo]) -> list[str]:
            return [bucket.name for bucket in buckets if bucket.name in (BUCKET, OTHER_BUCKET)]

        assert ours(await storage.objects.list_buckets(CALLER)) == []
        for name in (BUCKET, OTHER_BUCKET):
            await storage.objects.create_bucket(CALLER, name)
        assert ours(await storage.objects.list_buckets(CALLER)) == [OTHER_BUCKET, BUCKET]
        assert (await storage.objects.head_bucket(CALLER, OTHER_BUCKET)).name == OTHER_BUCKET
        await storage.objects.delete_bucket(CALLER, OTHER_BUCKET)
        assert ours(await storage.objects.list_buckets(CALLER)) == [BUCKET]
        assert await refusal(storage.objects.head_bucket(CALLER, OTHER_BUCKET)) is ErrorCode.NO_SUCH_BUCKET

    async def test_buckets_are_listed_some_at_a_time(self, storage: Any) -> None:
        for name in (BUCKET, OTHER_BUCKET):
            await storage.objects.create_bucket(CALLER, name)
        found: list[str] = []
        while page := await storage.objects.list_buckets(CALLER, found[-1] if found else "", 1):
            assert len(page) == 1
            found.append(page[0].name)
        assert found == [bucket.name for bucket in await storage.objects.list_buckets(CALLER)]
        assert {BUCKET, OTHER_BUCKET} <= set(found)

    async def test_a_bucket_is_created_once(self, filled: Any) -> None:
        again = filled.objects.create_bucket(CALLER, BUCKET)
        assert await refusal(again) is ErrorCode.BUCKET_ALREADY_OWNED
        assert await get(filled, "stored") == content(SMALL_BYTES)

    @optional(Feature.BUCKET_OWNERS)
    async def test_a_bucket_belongs_to_the_access_key_that_created_it(self, filled: Any) -> None:
        assert (await filled.objects.head_bucket(OTHER_CALLER, BUCKET)).owner == CALLER
        taken = filled.objects.create_bucket(OTHER_CALLER, BUCKET)
        assert await refusal(taken) is ErrorCode.BUCKET_ALREADY_EXISTS

    async def test_a_bucket_with_objects_is_not_deleted(self, filled: Any) -> None:
        assert await refusal(filled.objects.delete_bucket(CALLER, BUCKET)) is ErrorCode.BUCKET_NOT_EMPTY
        await filled.objects.delete_object(CALLER, BUCKET, "stored")
        await filled.objects.delete_bucket(CALLER, BUCKET)

    @optional(Feature.MISSING_BUCKETS)
    async def test_without_its_bucket_a_call_is_refused(self, filled: Any) -> None:
        found = {name: await refusal(call(filled)) for name, call in NEEDS_BUCKET.items()}
        assert found == dict.fromkeys(NEEDS_BUCKET, ErrorCode.NO_SUCH_BUCKET)

    # lifecycle

    @optional(Feature.LIFECYCLE)
    async def test_lifecycle_rules_are_replaced_as_a_whole(self, filled: Any) -> None:
        assert await filled.objects.get_lifecycle(CALLER, BUCKET) == []
        rules = [
            LifecycleRule("one", prefix="a/", expire_days=3),
            LifecycleRule("two", expire_days=1, tags={"a": "b"}),
            LifecycleRule("three", abort_days=1),
        ]
        await filled.objects.set_lifecycle(CALLER, BUCKET, rules)
        assert await filled.objects.get_lifecycle(CALLER, BUCKET) == rules
        await filled.objects.set_lifecycle(CALLER, BUCKET, [])
        assert await filled.objects.get_lifecycle(CALLER, BUCKET) == []

    @optional(Feature.EXPIRY)
    async def test_a_head_says_when_its_object_expires_and_by_which_rule(self, filled: Any) -> None:
        await filled.objects.set_lifecycle(CALLER, BUCKET, [LifecycleRule("soon", prefix="st", expire_days=3)])
        head = await filled.objects.head_object(CALLER, ReadRequest(BUCKET, "stored"))
        assert head.expiry is not None
        assert head.expiry[1] == "soon"
        assert head.expiry[0] > head.info.modified_at
        await put(filled, "other", b"data")
        assert (await filled.objects.head_object(CALLER, ReadRequest(BUCKET, "other"))).expiry is None

    # listing

    @optional(Feature.KEYS)
    async def test_keys_are_listed_in_the_order_of_their_utf8_bytes(self, filled: Any) -> None:
        keys = ["stored", "a", "Z", "a/b", "ü", "a b", "\U0001f600", "\uffee", "~"]
        for key in keys[1:]:
            await put(filled, key, b"data")
        assert await keys_of(filled) == sorted(keys, key=str.encode)
        assert await keys_of(filled, prefix="a") == ["a", "a b", "a/b"]
        assert await keys_of(filled, after="a b", prefix="a") == ["a/b"]

    async def test_a_listing_tells_what_a_head_tells(self, filled: Any) -> None:
        info = await put(filled, "key", b"data")
        page = await filled.objects.list_objects(CALLER, ListRequest(BUCKET, prefix="key"))
        (entry,) = page.objects
        listed = (entry.key, entry.nbytes, entry.etag, entry.modified_at)
        assert listed == (info.key, info.nbytes, info.etag, info.modified_at)

    async def test_a_delimiter_rolls_keys_up(self, filled: Any) -> None:
        for key in ("a/1", "a/2", "b/c/1", "b/2", "top"):
            await put(filled, key, b"data")
        page = await filled.objects.list_objects(CALLER, ListRequest(BUCKET, delimiter="/"))
        assert ([entry.key for entry in page.objects], page.common_prefixes) == (["stored", "top"], ["a/", "b/"])
        page = await filled.objects.list_objects(CALLER, ListRequest(BUCKET, "b/", "/"))
        assert ([entry.key for entry in page.objects], page.common_prefixes) == (["b/2"], ["b/c/"])

    @pytest.mark.parametrize("max_keys", [1, 2, 3, 100])
    async def test_pages_together_are_the_listing(self, filled: Any, max_keys: int) -> None:
        """Objects and common prefixes count alike, and no entry comes twice."""
        for key in ("a", "b/1", "b/2", "c", "d/1", "e"):
            await put(filled, key, b"data")
        found, after = [], ""
        while True:
            request = ListRequest(BUCKET, delimiter="/", after=after, max_keys=max_keys)
            page = await filled.objects.list_objects(CALLER, request)
            entries = sorted([*(entry.key for entry in page.objects), *page.common_prefixes])
            assert len(entries) <= max_keys
            found += entries
            if page.next_after is None:
                break
            after = page.next_after
        assert found == ["a", "b/", "c", "d/", "e", "stored"]

    async def test_a_page_of_no_entries_is_empty(self, filled: Any) -> None:
        assert await filled.objects.list_objects(CALLER, ListRequest(BUCKET, max_keys=0)) == ListPage([], [], None)
