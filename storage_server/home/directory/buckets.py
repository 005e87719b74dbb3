"""The buckets of a shared directory: each call is about what all servers have written down."""

from __future__ import annotations

from descriptors.errors import CallerError, ErrorCode
from descriptors.lifecycle import LifecycleRule
from descriptors.objects import BUCKETS_LISTED_MAX, BucketCache, BucketInfo
from descriptors.storage_api import SERVER_KEY
from storage_server.home.directory.following import Following
from storage_server.home.directory.rules.records import Record, fits
from storage_server.kernel.objects import Objects
from storage_server.kernel.rules.rows import RULES, Touched


class SharedBuckets:
    """The part of HomeObjects that is about buckets."""

    def __init__(self, objects: Objects, following: Following) -> None:
        self._objects = objects
        self._following = following

    async def create_bucket(self, access_key: str, bucket: str, cache: BucketCache | None = None) -> None:
        await self._following.read_journals()
        await self._objects.create_bucket_anew(access_key, bucket)

    async def head_bucket(self, access_key: str, bucket: str) -> BucketInfo:
        await self._following.read_journals()
        return await self._objects.head_bucket(access_key, bucket)

    async def list_buckets(self, access_key: str, after: str = "", most: int = BUCKETS_LISTED_MAX) -> list[BucketInfo]:
        await self._following.read_journals()
        return await self._objects.list_buckets(access_key, after, most)

    async def delete_bucket(self, access_key: str, bucket: str) -> None:
        """A journal that cannot be read may have objects of the bucket: raises ServerError(SlowDown) then."""
        await self._following.read_journals()
        self._following.require_whole()
        await self._objects.delete_bucket(access_key, bucket)

    async def get_lifecycle(self, access_key: str, bucket: str) -> list[LifecycleRule]:
        await self._following.read_journals()
        return await self._objects.get_lifecycle(access_key, bucket)

    async def own_lifecycle(self, access_key: str, bucket: str) -> list[LifecycleRule]:
        return await self._objects.own_lifecycle(access_key, bucket)

    async def set_lifecycle(self, access_key: str, bucket: str, rules: list[LifecycleRule]) -> None:
        if not fits(Record(Touched("bucket", bucket), 0, ("", 0.0, RULES.dump_json(rules).decode()))):
            problem = "a bucket in a shared directory cannot have lifecycle rules of more than about 200 KiB"
            raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field="rules")
        await self._following.read_journals()
        await self._objects.set_lifecycle(access_key, bucket, rules)

    async def require_bucket(self, bucket: str) -> None:
        """Raises CallerError(NoSuchBucket)."""
        try:
            await self._objects.head_bucket(SERVER_KEY, bucket)
        except CallerError:
            await self._following.read_journals()
            await self._objects.head_bucket(SERVER_KEY, bucket)
