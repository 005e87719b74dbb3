"""The rules of descriptors.storage_api.UploadsApi, for every implementation: subclass `UploadRules` and override
`storage`. tests/contract/store/rules.py says which rules may be left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from descriptors.conditions import WriteCondition
from descriptors.errors import ErrorCode
from descriptors.objects import (
    Attributes,
    BodyDigests,
    ClaimedPart,
    CompleteRequest,
    ObjectInfo,
    PartCopyRequest,
    PartInfo,
    PartRequest,
    RangeSpec,
    ReadRequest,
    UploadListRequest,
    UploadRef,
    UploadRequest,
)
from descriptors.units import MIB
from tests.contract.store.rules import (
    BUCKET,
    CALLER,
    LARGE_BYTES,
    OTHER_BUCKET,
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

UploadCall = Callable[[Any, UploadRef], Awaitable[object]]
PART_BYTES_MIN = 5 * MIB


async def begun(storage: Any, key: str = "key", attributes: Attributes | None = None) -> UploadRef:
    request = UploadRequest(CALLER, BUCKET, key, attributes or Attributes())
    return UploadRef(BUCKET, key, await storage.uploads.create_upload(CALLER, request))


async def sent(storage: Any, upload: UploadRef, number: int, data: bytes, **options: Any) -> PartInfo:
    request = PartRequest(upload, number, options.pop("nbytes", len(data)))
    part: PartInfo = await storage.uploads.put_part(CALLER, request, BytesBody(data, **options))
    return part


async def completed(storage: Any, upload: UploadRef, *parts: PartInfo, **options: Any) -> ObjectInfo:
    claimed = [ClaimedPart(part.part_number, part.etag) for part in parts]
    info: ObjectInfo = await storage.uploads.complete_upload(CALLER, CompleteRequest(upload, claimed, **options))
    return info


async def part_numbers(storage: Any, upload: UploadRef) -> list[int]:
    page = await storage.uploads.list_parts(CALLER, upload, 0, 1000)
    assert page.next_marker is None
    return [part.part_number for part in page.parts]


NEEDS_UPLOAD: dict[str, UploadCall] = {
    "put_part": lambda storage, upload: sent(storage, upload, 1, b"data"),
    "copy_part": lambda storage, upload: storage.uploads.copy_part(
        CALLER, PartCopyRequest(upload, 1, ReadRequest(BUCKET, "stored"))
    ),
    "complete_upload": lambda storage, upload: storage.uploads.complete_upload(
        CALLER, CompleteRequest(upload, [ClaimedPart(1, "0" * 32)])
    ),
    "abort_upload": lambda storage, upload: storage.uploads.abort_upload(CALLER, upload),
    "list_parts": lambda storage, upload: storage.uploads.list_parts(CALLER, upload, 0, 1000),
}


class UploadRules(StoreRules):
    """Multipart uploads."""

    @optional(Feature.MULTIPART_DETAILS)
    async def test_an_upload_becomes_visible_when_it_is_completed(self, filled: Any) -> None:
        """Parts may come in any order; the object is made of those claimed, in the order of their numbers."""
        first, last = content(PART_BYTES_MIN, 1), content(100, 2)
        upload = await begun(filled, attributes=Attributes({"content-type": "a/b"}, {"tag": "one"}))
        parts = [await sent(filled, upload, 7, last), await sent(filled, upload, 9, b"unclaimed")]
        parts.append(await sent(filled, upload, 2, first))
        assert await keys_of(filled) == ["stored"]
        info = await completed(filled, upload, parts[2], parts[0])
        digest = hashlib.md5(hashlib.md5(first).digest() + hashlib.md5(last).digest()).hexdigest()
        assert (info.key, info.nbytes, info.etag, info.part_count) == ("key", PART_BYTES_MIN + 100, f"{digest}-2", 2)
        assert info.attributes == Attributes({"content-type": "a/b"}, {"tag": "one"})
        assert (await filled.objects.head_object(CALLER, ReadRequest(BUCKET, "key"))).info == info
        assert await get(filled, "key") == first + last
        around = RangeSpec(PART_BYTES_MIN - 7, PART_BYTES_MIN + 6)
        assert await get(filled, "key", range=around) == first[-7:] + last[:7]

    @optional(Feature.PART_BOUNDARIES)
    async def test_the_parts_of_a_complete_object_are_known(self, filled: Any) -> None:
        """They are numbered from 1, whatever their numbers were."""
        first, last = content(PART_BYTES_MIN, 1), content(100, 2)
        upload = await begun(filled)
        parts = [await sent(filled, upload, 3, first), await sent(filled, upload, 8, last)]
        await completed(filled, upload, *parts)
        found = await filled.objects.object_parts(CALLER, BUCKET, "key")
        assert [(part.part_number, part.nbytes) for part in found] == [(1, PART_BYTES_MIN), (2, 100)]
        assert await get(filled, "key", part_number=2) == last
        assert await refusal(get(filled, "key", part_number=3)) is ErrorCode.INVALID_PART_NUMBER

    @optional(Feature.MULTIPART_DETAILS)
    async def test_without_its_upload_a_call_is_refused(self, filled: Any) -> None:
        """Bucket, key and id must belong together."""
        await filled.objects.create_bucket(CALLER, OTHER_BUCKET)
        upload, aborted = await begun(filled), await begun(filled)
        await filled.uploads.abort_upload(CALLER, aborted)
        for named in (
            UploadRef(BUCKET, "key", "unknown"),
            UploadRef(BUCKET, "other", upload.upload_id),
            UploadRef(OTHER_BUCKET, "key", upload.upload_id),
            aborted,
        ):
            found = {name: await refusal(call(filled, named)) for name, call in NEEDS_UPLOAD.items()}
            assert found == dict.fromkeys(NEEDS_UPLOAD, ErrorCode.NO_SUCH_UPLOAD), named
        assert await keys_of(filled) == ["stored"]
        assert await part_numbers(filled, upload) == []

    @optional(Feature.MISSING_BUCKETS)
    async def test_without_its_bucket_an_upload_is_refused(self, filled: Any) -> None:
        create = filled.uploads.create_upload(CALLER, UploadRequest(CALLER, "unknown", "key"))
        assert await refusal(create) is ErrorCode.NO_SUCH_BUCKET
        listing = filled.uploads.list_uploads(CALLER, UploadListRequest("unknown"))
        assert await refusal(listing) is ErrorCode.NO_SUCH_BUCKET
        upload = UploadRef("unknown", "key", "unknown")
        for call in NEEDS_UPLOAD.values():
            assert await refusal(call(filled, upload)) is ErrorCode.NO_SUCH_BUCKET

    # parts

    @optional(Feature.REPEATED_PARTS)
    async def test_a_part_sent_again_replaces_the_one_before(self, filled: Any) -> None:
        upload = await begun(filled)
        await sent(filled, upload, 1, content(LARGE_BYTES, 1))
        part = await sent(filled, upload, 1, content(SMALL_BYTES, 2))
        assert (part.nbytes, part.etag) == (SMALL_BYTES, hashlib.md5(content(SMALL_BYTES, 2)).hexdigest())
        assert await part_numbers(filled, upload) == [1]
        await completed(filled, upload, part)
        assert await get(filled, "key") == content(SMALL_BYTES, 2)

    async def test_after_a_refused_part_the_upload_is_as_before(self, filled: Any) -> None:
        upload = await begun(filled)
        kept = await sent(filled, upload, 1, b"kept")
        for options, code in (
            ({"digests": BodyDigests(sha256="0" * 64)}, ErrorCode.X_AMZ_CONTENT_SHA256_MISMATCH),
            ({"digests": BodyDigests(md5="0" * 32)}, ErrorCode.BAD_DIGEST),
            ({"nbytes": LARGE_BYTES + 1}, ErrorCode.INCOMPLETE_BODY),
            ({"nbytes": LARGE_BYTES - 1}, ErrorCode.INCOMPLETE_BODY),
            ({"nbytes": 6 << 30}, ErrorCode.ENTITY_TOO_LARGE),
        ):
            for number in (1, 2):
                part = sent(filled, upload, number, content(LARGE_BYTES), **options)
                assert await refusal(part) is code, options
        assert await part_numbers(filled, upload) == [1]
        await completed(filled, upload, kept)
        assert await get(filled, "key") == b"kept"

    async def test_a_part_number_out_of_bounds_is_refused(self, filled: Any) -> None:
        upload = await begun(filled)
        for number in (0, 10_001):
            assert await refusal(sent(filled, upload, number, b"data")) is ErrorCode.INVALID_ARGUMENT

    async def test_a_part_may_be_copied_from_a_range_of_an_object(self, filled: Any) -> None:
        upload = await begun(filled)
        source = ReadRequest(BUCKET, "stored", RangeSpec(100, 40_000))
        part = await filled.uploads.copy_part(CALLER, PartCopyRequest(upload, 1, source))
        await completed(filled, upload, part)
        assert await get(filled, "key") == content(SMALL_BYTES)[100:40_001]

    async def test_a_part_is_not_copied_from_an_object_or_range_that_is_not_there(self, filled: Any) -> None:
        upload = await begun(filled)
        for source, code in (
            (ReadRequest(BUCKET, "unknown"), ErrorCode.NO_SUCH_KEY),
            (ReadRequest("unknown", "stored"), ErrorCode.NO_SUCH_BUCKET),
            (ReadRequest(BUCKET, "stored", RangeSpec(SMALL_BYTES, None)), ErrorCode.INVALID_RANGE),
        ):
            copy = filled.uploads.copy_part(CALLER, PartCopyRequest(upload, 1, source))
            assert await refusal(copy) is code
        assert await part_numbers(filled, upload) == []

    # completing and aborting

    @optional(Feature.MULTIPART_DETAILS)
    async def test_a_refused_completion_changes_nothing_and_the_upload_stays(self, filled: Any) -> None:
        upload = await begun(filled, "stored")
        one, two = [await sent(filled, upload, number, b"small") for number in (1, 2)]
        other = PartInfo(1, 5, "0" * 32, 0.0)
        absent = PartInfo(3, 5, one.etag, 0.0)
        exists = WriteCondition(if_absent=True)
        for parts, options, code in (
            ((other,), {}, ErrorCode.INVALID_PART),
            ((one, absent), {}, ErrorCode.INVALID_PART),
            ((two, one), {}, ErrorCode.INVALID_PART_ORDER),
            ((one, one), {}, ErrorCode.INVALID_PART_ORDER),
            ((one, two), {}, ErrorCode.ENTITY_TOO_SMALL),
            ((one,), {"nbytes": 6}, ErrorCode.INVALID_REQUEST),
            ((one,), {"condition": exists}, ErrorCode.PRECONDITION_FAILED),
        ):
            assert await refusal(completed(filled, upload, *parts, **options)) is code
        assert await get(filled, "stored") == content(SMALL_BYTES)
        assert await part_numbers(filled, upload) == [1, 2]
        await completed(filled, upload, one)
        assert await get(filled, "stored") == b"small"

    @optional(Feature.MULTIPART_DETAILS)
    async def test_a_completed_upload_is_over(self, filled: Any) -> None:
        upload = await begun(filled)
        await completed(filled, upload, await sent(filled, upload, 1, b"data"))
        assert await refusal(sent(filled, upload, 1, b"more")) is ErrorCode.NO_SUCH_UPLOAD
        assert await refusal(filled.uploads.abort_upload(CALLER, upload)) is ErrorCode.NO_SUCH_UPLOAD
        assert (await filled.uploads.list_uploads(CALLER, UploadListRequest(BUCKET))).uploads == []
        assert await get(filled, "key") == b"data"

    @optional(Feature.REPEATED_COMPLETION)
    async def test_a_completion_that_is_repeated_is_answered_as_before(self, filled: Any) -> None:
        """A client whose answer was lost asks again."""
        upload = await begun(filled)
        part = await sent(filled, upload, 1, b"data")
        assert await completed(filled, upload, part) == await completed(filled, upload, part)

    async def test_a_read_that_has_begun_keeps_its_version_when_an_upload_replaces_it(self, filled: Any) -> None:
        await put(filled, "key", content(LARGE_BYTES, 1))
        upload = await begun(filled)
        part = await sent(filled, upload, 1, content(LARGE_BYTES, 2))
        async with filled.objects.open_object(CALLER, ReadRequest(BUCKET, "key")) as read:
            await completed(filled, upload, part)
            assert b"".join([bytes(piece) async for piece in read.body]) == content(LARGE_BYTES, 1)
        assert await get(filled, "key") == content(LARGE_BYTES, 2)

    @optional(Feature.MULTIPART_DETAILS)
    async def test_a_bucket_is_deleted_with_its_unfinished_uploads(self, filled: Any) -> None:
        upload = await begun(filled)
        await sent(filled, upload, 1, b"data")
        await filled.objects.delete_object(CALLER, BUCKET, "stored")
        await filled.objects.delete_bucket(CALLER, BUCKET)
        await filled.objects.create_bucket(CALLER, BUCKET)
        assert await refusal(filled.uploads.list_parts(CALLER, upload, 0, 1000)) is ErrorCode.NO_SUCH_UPLOAD

    # listing

    @optional(Feature.MULTIPART_DETAILS)
    @pytest.mark.parametrize("max_parts", [1, 2, 100])
    async def test_pages_of_parts_together_are_the_parts(self, filled: Any, max_parts: int) -> None:
        upload = await begun(filled)
        parts = [await sent(filled, upload, number, content(number, number)) for number in (2, 3, 9)]
        found, marker = [], 0
        while marker is not None:
            page = await filled.uploads.list_parts(CALLER, upload, marker, max_parts)
            assert len(page.parts) <= max_parts
            assert (page.upload.upload_id, page.upload.key) == (upload.upload_id, "key")
            found += page.parts
            marker = page.next_marker
        assert [(part.part_number, part.nbytes, part.etag) for part in found] == [
            (part.part_number, part.nbytes, part.etag) for part in parts
        ]

    @optional(Feature.MULTIPART_DETAILS)
    @pytest.mark.parametrize("max_uploads", [1, 2, 100])
    async def test_pages_of_uploads_together_are_the_uploads(self, filled: Any, max_uploads: int) -> None:
        """By key, and for one key by age."""
        keys = ["b", "a", "c/1", "b", "c/2", "d"]
        uploads = [(await begun(filled, key)).upload_id for key in keys]
        found: list[str] = []
        key_marker = upload_id_marker = ""
        while True:
            request = UploadListRequest(
                BUCKET, "", "/", key_marker=key_marker, upload_id_marker=upload_id_marker, max_uploads=max_uploads
            )
            page = await filled.uploads.list_uploads(CALLER, request)
            assert len(page.uploads) + len(page.common_prefixes) <= max_uploads
            found += [entry.upload_id for entry in page.uploads] + page.common_prefixes
            if page.next_key_marker is None:
                break
            key_marker, upload_id_marker = page.next_key_marker, page.next_upload_id_marker or ""
        wanted = [uploads[1], uploads[0], uploads[3], "c/", uploads[5]]
        assert sorted(found) == sorted(wanted)
        assert [entry for entry in found if entry != "c/"] == [entry for entry in wanted if entry != "c/"]

    async def test_uploads_are_listed_by_prefix(self, filled: Any) -> None:
        await begun(filled, "a")
        wanted = await begun(filled, "b")
        page = await filled.uploads.list_uploads(CALLER, UploadListRequest(BUCKET, prefix="b"))
        assert [(entry.key, entry.upload_id) for entry in page.uploads] == [("b", wanted.upload_id)]
        await filled.uploads.abort_upload(CALLER, wanted)
        assert (await filled.uploads.list_uploads(CALLER, UploadListRequest(BUCKET, prefix="b"))).uploads == []
