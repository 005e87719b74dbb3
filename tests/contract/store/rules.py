"""What the rules of the object store contract share, and which rules an implementation may leave out and why.

A rule is required unless it is marked `@optional(Feature.X)`. An implementation names the features that it lacks in its
class attribute `lacks`, and the rules that need them are skipped with the reason given here. The embedded store, and
every way to it, lacks none.
"""

from __future__ import annotations

from collections.abc import Awaitable
from enum import Enum
from typing import Any

import pytest

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import ListPage, ListRequest, ObjectInfo, PutRequest, ReadRequest
from tests.support.chunks import BytesBody
from tests.support.store_bed import content

CALLER, OTHER_CALLER = "OWNERKEY", "OTHERKEY"
BUCKET, OTHER_BUCKET = "objectcache-test-rules", "objectcache-test-other"
"""The rules may run on a service that others use: they touch buckets of these names only."""
SMALL_BYTES, LARGE_BYTES = 50_000, 300_000
"""A small object may be read at once; the read of a large one has a pump, where the implementation has pumps."""


async def put(storage: Any, key: str, data: bytes, **options: Any) -> ObjectInfo:
    digests = options.pop("digests", None)
    request = PutRequest(BUCKET, key, options.pop("nbytes", len(data)), **options)
    info: ObjectInfo = await storage.objects.put_object(CALLER, request, BytesBody(data, digests=digests))
    return info


async def get(storage: Any, key: str, **options: Any) -> bytes:
    async with storage.objects.open_object(CALLER, ReadRequest(BUCKET, key, **options)) as read:
        data = b"".join([bytes(piece) async for piece in read.body])
        assert len(data) == read.head.range.length
        return data


async def keys_of(storage: Any, **options: Any) -> list[str]:
    page: ListPage = await storage.objects.list_objects(CALLER, ListRequest(BUCKET, **options))
    return [entry.key for entry in page.objects]


async def refusal(call: Awaitable[object]) -> ErrorCode:
    """The code of the error of a call that must be refused as the caller's fault."""
    with pytest.raises(CallerError) as refused:
        await call
    return refused.value.code


class Feature(Enum):
    """What a store over another S3 service may lack; the value is the reason."""

    BUCKET_OWNERS = "a store over one account of another service cannot tell the owners of buckets apart"
    CHECKSUMS = "some S3 services keep no checksum besides the ETag"
    CONDITIONAL_DELETE = "few S3 services have If-Match for DeleteObject"
    CONDITIONS = "some S3 services ignore conditions, or know only some of them"
    DOT_KEYS = "a service might resolve a key with a part '.' or '..', so that such keys are not passed on to it"
    EXPIRY = "a service that carries lifecycle rules out by itself may not say when an object expires"
    KEYS = "a service whose keys are paths refuses some keys, and lists keys in an order of its own"
    LIFECYCLE = "a service may have lifecycle rules of its own, or none"
    MISSING_BUCKETS = "some S3 services do not say that a bucket is missing"
    MULTIPART_DETAILS = "some S3 services refuse and page uploads and parts in ways of their own"
    PART_BOUNDARIES = "some S3 services forget where the parts of a complete object began"
    REPEATED_PARTS = "a service may list a part twice that was sent again"
    REPEATED_COMPLETION = "S3 itself answers NoSuchUpload when a completed upload is completed again"


def optional(feature: Feature) -> pytest.MarkDecorator:
    """A rule that needs the feature."""
    return pytest.mark.optional(feature)


class StoreRules:
    """Base of the classes of rules. `storage` is the implementation under test: a subclass overrides the fixture with
    one that yields something with the roles `objects` and `uploads`, without any bucket.
    """

    lacks: frozenset[Feature] = frozenset()

    @pytest.fixture(autouse=True)
    def _skip_what_is_lacking(self, request: pytest.FixtureRequest) -> None:
        for marker in request.node.iter_markers("optional"):
            if marker.args[0] in self.lacks:
                pytest.skip(marker.args[0].value)

    @pytest.fixture
    async def storage(self) -> Any:
        """The implementation under test."""
        raise NotImplementedError

    @pytest.fixture
    async def filled(self, storage: Any) -> Any:
        """The storage with the bucket BUCKET, which has the object `stored`."""
        await storage.objects.create_bucket(CALLER, BUCKET)
        await put(storage, "stored", content(SMALL_BYTES))
        return storage
