"""The buckets of an upstream S3 service: every call is one or two requests there."""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_right
from typing import Any

from descriptors.errors import CallerError, ErrorCode
from descriptors.lifecycle import LifecycleRule
from descriptors.objects import BUCKETS_LISTED_MAX, BucketCache, BucketInfo
from storage_server.home.rules.documents import entries_of
from storage_server.home.rules.lifecycle import lifecycle_document, lifecycle_rules
from storage_server.home.rules.refusals import unreachable
from storage_server.home.s3.connection import Upstream

BUCKET_PAGES_MAX = 100
BUCKETS_MAX = 20_000
"""One account has no more buckets; S3's own bound is 10,000 where nobody has asked for more."""
BUCKETS_PER_PAGE_MAX = 10_000


class UpstreamBuckets:
    """The part of HomeObjects that is about buckets."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def create_bucket(self, access_key: str, bucket: str, cache: BucketCache | None = None) -> None:
        """Most services take the creation of a bucket that is one's own for no error, and say nothing of it."""
        if await self._has_bucket(bucket):
            raise CallerError(ErrorCode.BUCKET_ALREADY_OWNED, "the bucket exists already", field="bucket")
        region = self._upstream.settings.region
        where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        await self._upstream.call("CreateBucket", Bucket=bucket, **where)

    async def head_bucket(self, access_key: str, bucket: str) -> BucketInfo:
        await self.require_bucket(bucket)
        found = await self._buckets() or ()
        return next((each for each in found if each.name == bucket), BucketInfo(bucket, 0.0, ""))

    async def list_buckets(self, access_key: str, after: str = "", most: int = BUCKETS_LISTED_MAX) -> list[BucketInfo]:
        """The service can only be asked for all of them."""
        found = await self._buckets()
        if found is None:
            raise unreachable(f"its list of buckets has no end, or more than {BUCKETS_MAX}")
        first = bisect_right(found, after, key=lambda bucket: bucket.name)
        return found[first : first + most]

    async def _buckets(self) -> list[BucketInfo] | None:
        """The account's buckets, by name; None where there are too many."""
        pages, token = list[list[BucketInfo]](), None
        for _ in range(BUCKET_PAGES_MAX):
            more: dict[str, Any] = {} if token is None else {"ContinuationToken": token}
            page, token = await self._upstream.ask(_bucket_page, "ListBuckets", **more)
            pages.append(page)
            if sum(map(len, pages)) > BUCKETS_MAX:
                return None
            if token is None:
                return page if len(pages) == 1 else await asyncio.to_thread(_in_order, pages)
        return None

    async def delete_bucket(self, access_key: str, bucket: str) -> None:
        await self._upstream.call("DeleteBucket", Bucket=bucket)

    async def get_lifecycle(self, access_key: str, bucket: str) -> list[LifecycleRule]:
        try:
            return await self._upstream.ask(lifecycle_rules, "GetBucketLifecycleConfiguration", Bucket=bucket)
        except CallerError as error:
            if error.code is ErrorCode.NO_SUCH_LIFECYCLE:
                return []
            raise

    async def own_lifecycle(self, access_key: str, bucket: str) -> list[LifecycleRule]:
        """The service carries its rules out by itself."""
        return []

    async def set_lifecycle(self, access_key: str, bucket: str, rules: list[LifecycleRule]) -> None:
        if not rules:
            await self._upstream.call("DeleteBucketLifecycle", Bucket=bucket)
            return
        await self._upstream.call(
            "PutBucketLifecycleConfiguration", Bucket=bucket, LifecycleConfiguration=lifecycle_document(rules)
        )

    async def _has_bucket(self, bucket: str) -> bool:
        try:
            await self.require_bucket(bucket)
        except CallerError as error:
            if error.code in (ErrorCode.NO_SUCH_BUCKET, ErrorCode.ACCESS_DENIED):
                return False
            raise
        return True

    async def require_bucket(self, bucket: str) -> None:
        """Raises CallerError(NoSuchBucket)."""
        try:
            await self._upstream.call("HeadBucket", Bucket=bucket)
        except CallerError as error:
            if error.code is ErrorCode.NO_SUCH_KEY:  # an answer to HEAD has no code
                raise CallerError(ErrorCode.NO_SUCH_BUCKET, "the bucket does not exist", field="bucket") from None
            raise


def _bucket_page(found: dict[str, Any]) -> tuple[list[BucketInfo], str | None]:
    """The buckets of a page by name, and the token of the next one."""
    owner = found.get("Owner", {}).get("ID", "")
    buckets = [
        BucketInfo(each["Name"], each["CreationDate"].timestamp() if "CreationDate" in each else 0.0, owner)
        for each in entries_of(found, "Buckets", BUCKETS_PER_PAGE_MAX)
    ]
    return sorted(buckets, key=lambda bucket: bucket.name), found.get("ContinuationToken") or None


def _in_order(pages: list[list[BucketInfo]]) -> list[BucketInfo]:
    """The buckets of pages that are in order each. To sort them all would be one step that nothing interrupts."""
    return list(heapq.merge(*pages, key=lambda bucket: bucket.name))
