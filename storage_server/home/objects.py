"""ObjectsApi over an upstream S3 service: every call is one or two requests there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import unquote_plus, urlencode

import aiohttp

from descriptors.conditions import NO_WRITE_CONDITION, ReadCondition, WriteCondition, check_read
from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.objects import (
    Attributes,
    Checksum,
    ChecksumAlgorithm,
    CopyRequest,
    ListPage,
    ListRequest,
    NotDeleted,
    ObjectInfo,
    ObjectPart,
    PutRequest,
    ReadHead,
    ReadRequest,
)
from descriptors.storage_api import Body, ObjectRead, Piece
from storage_server.home.buckets import UpstreamBuckets
from storage_server.home.fetch.bulk_reads import Into
from storage_server.home.rules.documents import entries_of, is_writable, size_of
from storage_server.home.rules.headers import (
    KEPT_BYTES_MAX,
    TAGGING_COUNT,
    attribute_headers,
    etag_of,
    has_digest,
    proof_header,
    put_time,
    read_head,
    read_headers,
    source_headers,
    write_headers,
)
from storage_server.home.rules.least_rate import LeastRate
from storage_server.home.rules.merged_list import AFTER_PREFIX
from storage_server.home.rules.proof import HEADER, Proof, parse_proof
from storage_server.home.rules.refusals import unreachable
from storage_server.home.s3.connection import ServiceAnswer, Upstream
from storage_server.home.service import HomeHead, Sent
from storage_server.kernel.objects import check_size
from storage_server.kernel.rules.body_hashes import BodyHashes
from storage_server.kernel.rules.reading import resolve_range

PART_PAGES_MAX = 100
TAGS_MAX = 50
"""S3 has 10 tags of an object."""
PARTS_MAX = 10_000
"""One object of S3 has no more parts."""


class UpstreamObjects(UpstreamBuckets):
    """Implements storage_server.home.service.HomeObjects."""

    def __init__(self, upstream: Upstream, object_bytes_max: int) -> None:
        super().__init__(upstream)
        self._object_bytes_max = object_bytes_max
        self.counts_tags = False
        """Whether the service has been seen to say how many tags an object has."""

    def require_takes(self, request: PutRequest) -> None:
        self._upstream.require_addressable(request.bucket, request.key)

    async def put_object(self, access_key: str, request: PutRequest, body: Body) -> ObjectInfo:
        """The object is stored under its key when upstream has all of it. Upstream's ETag is compared with the MD5 of
        what was sent, where it is one. Upstream is not asked what the key shows: that may be another's object by now.
        """
        sent, hashes = await self._sent(request, body, None)
        etag = sent.etag or hashes.etag
        return ObjectInfo(
            key=request.key,
            nbytes=request.nbytes,
            etag=etag,
            modified_at=sent.modified_at,
            attributes=request.attributes,
            checksum=hashes.checksum,
        )

    async def send(self, request: PutRequest, body: Body, proof: Proof | None = None) -> Sent:
        """Put an object, with its proof in a header."""
        return (await self._sent(request, body, proof))[0]

    async def _sent(self, request: PutRequest, body: Body, proof: Proof | None) -> tuple[Sent, BodyHashes]:
        check_size(request.nbytes, self._object_bytes_max)
        described = attribute_headers(request.attributes)
        headers = {**described, **write_headers(request.condition), **proof_header(proof, described)}
        sent = await self._upstream.prepared(body, request.nbytes, request.checksum)
        answer = await self._upstream.put(request.bucket, request.key, headers, "", sent)
        return Sent(answer.get("etag", "").strip('"'), put_time(answer)), sent.hashes

    async def head_object(self, access_key: str, request: ReadRequest) -> ReadHead:
        return await self._head(request)

    @asynccontextmanager
    async def open_object(self, access_key: str, request: ReadRequest) -> AsyncIterator[ObjectRead]:
        async with self._opened(request, with_tags=False) as (answer, head):
            yield ObjectRead(head, pieces_of(answer, self._upstream.settings.read_timeout_s))

    @asynccontextmanager
    async def open_range(
        self, request: ReadRequest
    ) -> AsyncIterator[tuple[ReadHead, Proof | None, AsyncIterator[Piece]]]:
        """A read that also gives the proof of the whole object, if its headers have one."""
        async with self._opened(request) as (answer, head):
            coming = pieces_of(answer, self._upstream.settings.read_timeout_s)
            yield _home_head(head, answer.headers), parse_proof(answer.headers.get(HEADER), head.info.nbytes), coming

    @asynccontextmanager
    async def open_into(
        self, request: ReadRequest, into: Into
    ) -> AsyncIterator[tuple[ReadHead, Proof | None, asyncio.Future[None]]]:
        """A read whose bytes, as many as `into` has room for, go there."""
        headers = read_headers(request)
        async with self._upstream.open_into(request.bucket, request.key, headers, into) as (answer, body):
            head = await self._checked(request, answer.status, answer.headers, is_sure=False)
            yield _home_head(head, answer.headers), parse_proof(answer.headers.get(HEADER), head.info.nbytes), body

    async def object_parts(self, access_key: str, bucket: str, key: str) -> list[ObjectPart]:
        parts, marker = list[ObjectPart](), None
        for _ in range(PART_PAGES_MAX):
            more: dict[str, Any] = {} if marker is None else {"PartNumberMarker": marker}
            named = {"Bucket": bucket, "Key": key, "ObjectAttributes": ["ObjectParts"], **more}
            page, marker = await self._upstream.ask(_object_part_page, "GetObjectAttributes", **named)
            parts += page
            if len(parts) > PARTS_MAX:
                break
            if marker is None:
                return parts
        raise unreachable(f"its list of an object's parts has no end, or more than {PARTS_MAX}")

    async def copy_object(self, access_key: str, request: CopyRequest) -> ObjectInfo:
        headers = {**source_headers(request.source), **write_headers(request.condition)}
        if request.attributes is not None:
            headers |= {"x-amz-metadata-directive": "REPLACE", **attribute_headers(request.attributes, with_tags=False)}
        if request.tags is not None:
            headers |= {"x-amz-tagging-directive": "REPLACE", "x-amz-tagging": urlencode(request.tags)}
        if request.storage_class != "STANDARD":
            headers["x-amz-storage-class"] = request.storage_class
        if request.checksum is not None:
            headers["x-amz-checksum-algorithm"] = request.checksum.value
        source = f"{request.source.bucket}/{request.source.key}"
        copied = await self._upstream.call(
            "CopyObject", headers, Bucket=request.bucket, Key=request.key, CopySource=source
        )
        made = made_by(request.key, copied.get("CopyObjectResult", {}))
        shown = await self.shown(request.bucket, made)
        if shown is None or request.tags is None or shown.attributes.tags == request.tags:
            return shown or made
        await self.set_tags(access_key, request.bucket, request.key, request.tags)  # some services copy without them
        return await self.shown(request.bucket, made) or made

    async def shown(self, bucket: str, made: ObjectInfo) -> ObjectInfo | None:
        """The description of an object that a call has made; None where its key shows another one by now, or none."""
        condition = ReadCondition(if_match=(made.etag,))
        try:
            return (await self._head(ReadRequest(bucket, made.key, condition=condition))).info
        except CallerError as error:
            if error.code in (ErrorCode.NO_SUCH_KEY, ErrorCode.PRECONDITION_FAILED, ErrorCode.NO_SUCH_BUCKET):
                return None
            raise

    async def delete_object(
        self, access_key: str, bucket: str, key: str, condition: WriteCondition = NO_WRITE_CONDITION
    ) -> None:
        await self._upstream.call("DeleteObject", write_headers(condition), Bucket=bucket, Key=key)

    async def delete_objects(self, access_key: str, bucket: str, keys: list[str]) -> list[NotDeleted]:
        failed = list[NotDeleted]()
        for key in keys:
            if not is_writable(key):  # no document can name it; an address can
                try:
                    await self.delete_object(access_key, bucket, key)
                except ObjectCacheError as error:
                    failed.append(NotDeleted(key, error.code.value, error.message))
        if named := [{"Key": key} for key in keys if is_writable(key)]:
            wanted = {"Objects": named, "Quiet": True}
            failed += await self._upstream.ask(_not_deleted, "DeleteObjects", Bucket=bucket, Delete=wanted)
        return failed

    async def set_tags(self, access_key: str, bucket: str, key: str, tags: dict[str, str]) -> None:
        if not tags:
            await self._head(ReadRequest(bucket, key))
            await self._upstream.call("DeleteObjectTagging", Bucket=bucket, Key=key)
            return
        wanted = {"TagSet": [{"Key": name, "Value": value} for name, value in tags.items()]}
        await self._upstream.call("PutObjectTagging", Bucket=bucket, Key=key, Tagging=wanted)

    async def list_objects(self, access_key: str, request: ListRequest) -> ListPage:
        if request.max_keys == 0:
            await self.require_bucket(request.bucket)
            return ListPage([], [], None)
        return await self._upstream.ask(
            list_page,
            "ListObjectsV2",
            Bucket=request.bucket,
            Prefix=request.prefix,
            Delimiter=request.delimiter,
            StartAfter=request.after,
            MaxKeys=request.max_keys,
            EncodingType="url",
        )

    async def _head(self, request: ReadRequest) -> ReadHead:
        try:
            async with _asked(self._upstream, "HEAD", request) as answer:
                status, headers = answer.status, answer.headers
            head = await self._checked(request, status, headers, is_sure=True)  # it may ask again: one at a time
            if request.range is None:
                return head
            # some services answer a HEAD with the whole: HTTP has ranges for GET alone
            return replace(head, range=resolve_range(request.range, head.info.nbytes))
        except CallerError as error:
            if error.code is ErrorCode.NO_SUCH_KEY:
                await self.require_bucket(request.bucket)
            raise _of_part(error, request) from None

    @asynccontextmanager
    async def _opened(
        self, request: ReadRequest, *, with_tags: bool = True
    ) -> AsyncIterator[tuple[ServiceAnswer, ReadHead]]:
        async with _asked(self._upstream, "GET", request) as answer:
            head = await self._checked(request, answer.status, answer.headers, is_sure=False, with_tags=with_tags)
            yield answer, head

    async def _checked(
        self, request: ReadRequest, status: int, headers: Mapping[str, str], *, is_sure: bool, with_tags: bool = True
    ) -> ReadHead:
        """The head of an answer. Raises what the request's conditions and range say."""
        self.counts_tags = self.counts_tags or TAGGING_COUNT in headers
        asks = is_sure and not self.counts_tags
        tags = await _tags_of(self._upstream, request, headers, asks=asks) if with_tags else {}
        head = read_head(request.key, status, headers, tags)
        check_read(request.condition, head.info.etag, head.info.modified_at)
        if request.range is not None:
            resolve_range(request.range, head.info.nbytes)  # some services answer a range of nothing with the whole
        return head

    async def has_object(self, bucket: str, key: str, since_s: float = 0.0) -> bool:
        """Whether there is such an object now. Raises ServerError, CallerError for other refusals."""
        try:
            async with self._upstream.open("HEAD", bucket, key, {}):
                return True
        except CallerError as error:
            if error.code is ErrorCode.NO_SUCH_KEY:
                return False
            raise


async def _tags_of(
    upstream: Upstream, request: ReadRequest, headers: Mapping[str, str], *, asks: bool
) -> dict[str, str]:
    """The object's tags. Where the headers do not say how many there are, the service is asked, or there are none."""
    tag_count = headers.get(TAGGING_COUNT)
    if tag_count == "0" or (tag_count is None and not asks):
        return {}
    return await upstream.ask(_tags_in, "GetObjectTagging", Bucket=request.bucket, Key=request.key)


def _asked(upstream: Upstream, method: str, request: ReadRequest) -> Any:
    """The answer to a GET or HEAD, as a context."""
    if request.range is not None and request.part_number is not None:
        problem = "a range and a part number exclude each other"
        raise CallerError(ErrorCode.INVALID_REQUEST, problem, field="range")
    query = "" if request.part_number is None else f"partNumber={request.part_number}"
    return upstream.open(method, request.bucket, request.key, read_headers(request), query)


def _home_head(head: ReadHead, headers: Mapping[str, str]) -> HomeHead:
    return HomeHead(head.info, head.range, head.expiry, has_digest(headers))


def made_by(key: str, answer: Mapping[str, Any], nbytes: int = 0) -> ObjectInfo:
    """The object that a call has made, as its answer describes it: of its size the answer says nothing. Raises
    ServerError(InternalError) for an answer without an ETag: nothing would tell the object from the one before it.
    """
    modified_at = answer["LastModified"].timestamp() if "LastModified" in answer else time.time()
    etag = etag_of(answer.get("ETag"))
    return ObjectInfo(
        key=key,
        nbytes=nbytes,
        etag=etag,
        modified_at=float(int(modified_at)),
        attributes=Attributes(),
        checksum=checksum_of(answer),
    )


def decoding(found: Mapping[str, Any]) -> Callable[[str], str]:
    """The function that makes a key of a name in a page. A service that knows no `encoding-type` writes keys as they
    are.
    """
    return unquote_plus if found.get("EncodingType") == "url" else str


def list_page(found: dict[str, Any]) -> ListPage:
    """A page of ListObjectsV2."""
    name_of = decoding(found)
    objects = [
        ObjectInfo(
            name_of(each["Key"]),
            size_of(each),
            each["ETag"].strip('"'),
            float(int(each["LastModified"].timestamp())),
        )
        for each in entries_of(found, "Contents")
    ]
    prefixes = [name_of(each["Prefix"]) for each in entries_of(found, "CommonPrefixes")]
    if not found.get("IsTruncated"):
        return ListPage(objects, prefixes, None)
    if not (objects or prefixes):
        raise ValueError("a page without an entry that is not the last one")
    last_key = objects[-1].key if objects else ""
    last_prefix = prefixes[-1] + AFTER_PREFIX if prefixes else ""
    return ListPage(objects, prefixes, max(last_key, last_prefix, key=str.encode))


def _object_part_page(found: dict[str, Any]) -> tuple[list[ObjectPart], int | None]:
    """The parts of a page, and the number behind which the next one begins; None for the last page."""
    page = found.get("ObjectParts", {})
    parts = [
        ObjectPart(each["PartNumber"], size_of(each), checksum_of(each))
        for each in entries_of(page, "Parts", PARTS_MAX)
    ]
    return parts, int(page["NextPartNumberMarker"]) if page.get("IsTruncated") else None


def _not_deleted(found: dict[str, Any]) -> list[NotDeleted]:
    return [
        NotDeleted(error.get("Key", ""), error.get("Code", ErrorCode.INTERNAL_ERROR.value), error.get("Message", ""))
        for error in entries_of(found, "Errors")
    ]


def _tags_in(found: dict[str, Any]) -> dict[str, str]:
    """The tags of an object. Raises ServerError(InternalError) for more than any service lets an object have: the row
    of each copy has them.
    """
    tags = {tag["Key"]: tag["Value"] for tag in entries_of(found, "TagSet", TAGS_MAX)}
    if sum(len(name) + len(value) for name, value in tags.items()) > KEPT_BYTES_MAX:
        raise ServerError(ErrorCode.INTERNAL_ERROR, f"an object came with tags of over {KEPT_BYTES_MAX} bytes")
    return tags


async def pieces_of(answer: ServiceAnswer, window_s: float) -> AsyncIterator[Piece]:
    """The bytes of an answer. Raises ServerError(SlowDown) where upstream breaks off, or sends fewer bytes than
    `LeastRate` wants while somebody waits for them.
    """
    rate = LeastRate(window_s)
    pieces = answer.content.iter_any()
    try:
        asked_s = time.monotonic()
        async for piece in pieces:
            if rate.is_too_slow(time.monotonic() - asked_s, len(piece)):
                raise unreachable("the answer comes too slowly")
            yield piece
            asked_s = time.monotonic()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise unreachable(str(error) or type(error).__name__) from error


def _of_part(error: CallerError, request: ReadRequest) -> CallerError:
    """The error of a refused HEAD, whose answer has a status and nothing else."""
    if error.code is ErrorCode.INVALID_RANGE and request.part_number is not None:
        return CallerError(ErrorCode.INVALID_PART_NUMBER, "the object has no such part", field="partNumber")
    return error


def checksum_of(entry: Mapping[str, Any]) -> Checksum | None:
    """The checksum in an entry of a document, by the names of botocore's model."""
    for algorithm in ChecksumAlgorithm:
        value = entry.get(f"Checksum{algorithm.value}")
        if value:
            return Checksum(algorithm, value)
    return None
