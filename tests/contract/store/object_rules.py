"""The rules of descriptors.storage_api.ObjectsApi for objects, for every implementation: subclass `ObjectRules` and
override `storage`. tests/contract/store/rules.py says which rules may be left out.
"""

from __future__ import annotations

import base64
import hashlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from awscrt import checksums

from descriptors.conditions import ANY, ReadCondition, WriteCondition
from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import (
    Attributes,
    BodyDigests,
    ByteRange,
    Checksum,
    ChecksumAlgorithm,
    CopyRequest,
    PutRequest,
    RangeSpec,
    ReadRequest,
)
from tests.contract.store.rules import (
    BUCKET,
    CALLER,
    LARGE_BYTES,
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


class BrokenBody(BytesBody):
    """A body whose sender goes away after some pieces."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in super().__aiter__():
            yield piece
            raise CallerError(ErrorCode.REQUEST_TIMEOUT, "the sender is gone", field="body")


NEEDS_OBJECT: dict[str, Call] = {
    "head_object": lambda storage: storage.objects.head_object(CALLER, ReadRequest(BUCKET, "unknown")),
    "open_object": lambda storage: storage.objects.open_object(CALLER, ReadRequest(BUCKET, "unknown")).__aenter__(),
    "object_parts": lambda storage: storage.objects.object_parts(CALLER, BUCKET, "unknown"),
    "copy_object": lambda storage: storage.objects.copy_object(
        CALLER, CopyRequest(ReadRequest(BUCKET, "unknown"), BUCKET, "key")
    ),
    "set_tags": lambda storage: storage.objects.set_tags(CALLER, BUCKET, "unknown", {}),
}


class ObjectRules(StoreRules):
    """Whole objects."""

    async def test_without_its_object_a_call_is_refused(self, filled: Any) -> None:
        found = {name: await refusal(call(filled)) for name, call in NEEDS_OBJECT.items()}
        assert found == dict.fromkeys(NEEDS_OBJECT, ErrorCode.NO_SUCH_KEY)

    # putting

    @pytest.mark.parametrize("nbytes", [0, 1, SMALL_BYTES, LARGE_BYTES])
    async def test_what_was_put_is_read_back(self, filled: Any, nbytes: int) -> None:
        data = content(nbytes, 1)
        info = await put(filled, "key", data)
        head = await filled.objects.head_object(CALLER, ReadRequest(BUCKET, "key"))
        assert head.info == info
        assert head.range == ByteRange(0, nbytes)
        assert (info.key, info.nbytes, info.etag) == ("key", nbytes, hashlib.md5(data).hexdigest())
        assert info.part_count is None
        assert await get(filled, "key") == data

    @optional(Feature.KEYS)
    async def test_a_key_may_be_any_text(self, filled: Any) -> None:
        keys = ["a/b//c", "ü ñ/漢字", "q?x=1&y#%2F+", "..."]
        for key in keys:
            await put(filled, key, key.encode())
        assert [await get(filled, key) for key in keys] == [key.encode() for key in keys]
        assert set(await keys_of(filled)) == {"stored", *keys}

    @optional(Feature.KEYS)
    @optional(Feature.DOT_KEYS)
    async def test_a_key_may_have_parts_of_dots(self, filled: Any) -> None:
        """No key is resolved as a path."""
        keys = [".", "..", "a/../b", "./a"]
        for key in keys:
            await put(filled, key, key.encode())
        assert [await get(filled, key) for key in keys] == [key.encode() for key in keys]
        assert set(await keys_of(filled)) == {"stored", *keys}

    async def test_attributes_are_kept_with_the_object(self, filled: Any) -> None:
        attributes = Attributes({"content-type": "text/plain", "x-amz-meta-a": "b"}, {"tag": "värde"})
        info = await put(filled, "key", b"data", attributes=attributes)
        assert info.attributes == attributes
        assert (await filled.objects.head_object(CALLER, ReadRequest(BUCKET, "key"))).info.attributes == attributes

    @pytest.mark.parametrize("nbytes", [SMALL_BYTES, LARGE_BYTES])
    async def test_after_a_refused_put_nothing_of_it_is_visible(self, filled: Any, nbytes: int) -> None:
        """Neither under a new key nor in place of an object that was there."""
        for options, code in (
            ({"digests": BodyDigests(sha256="0" * 64)}, ErrorCode.X_AMZ_CONTENT_SHA256_MISMATCH),
            ({"digests": BodyDigests(md5="0" * 32)}, ErrorCode.BAD_DIGEST),
            ({"nbytes": nbytes + 1}, ErrorCode.INCOMPLETE_BODY),
            ({"nbytes": nbytes - 1}, ErrorCode.INCOMPLETE_BODY),
            ({"nbytes": 6 << 30}, ErrorCode.ENTITY_TOO_LARGE),
        ):
            for key in ("stored", "new"):
                assert await refusal(put(filled, key, content(nbytes, 1), **options)) is code, options
        assert await keys_of(filled) == ["stored"]
        assert await get(filled, "stored") == content(SMALL_BYTES)

    @pytest.mark.parametrize("nbytes", [SMALL_BYTES, LARGE_BYTES])
    async def test_after_a_body_that_breaks_off_nothing_of_it_is_visible(self, filled: Any, nbytes: int) -> None:
        """The error of the body is the error of the call."""
        for key in ("stored", "new"):
            request = PutRequest(BUCKET, key, nbytes)
            broken = filled.objects.put_object(CALLER, request, BrokenBody(content(nbytes, 1)))
            assert await refusal(broken) is ErrorCode.REQUEST_TIMEOUT
        assert await keys_of(filled) == ["stored"]
        assert await get(filled, "stored") == content(SMALL_BYTES)

    @optional(Feature.CONDITIONS)
    async def test_a_write_whose_condition_fails_changes_nothing(self, filled: Any) -> None:
        for key, condition, code in (
            ("stored", WriteCondition(if_absent=True), ErrorCode.PRECONDITION_FAILED),
            ("stored", WriteCondition(if_match="0" * 32), ErrorCode.PRECONDITION_FAILED),
            ("new", WriteCondition(if_match="0" * 32), ErrorCode.NO_SUCH_KEY),
            ("new", WriteCondition(if_match=ANY), ErrorCode.NO_SUCH_KEY),
        ):
            assert await refusal(put(filled, key, b"other", condition=condition)) is code, condition
            changed = Attributes({"content-type": "a/b"})
            copy = CopyRequest(ReadRequest(BUCKET, "stored"), BUCKET, key, changed, condition=condition)
            assert await refusal(filled.objects.copy_object(CALLER, copy)) is code, condition
        assert await keys_of(filled) == ["stored"]
        assert await get(filled, "stored") == content(SMALL_BYTES)

    @optional(Feature.CONDITIONS)
    async def test_a_write_whose_condition_holds_is_carried_out(self, filled: Any) -> None:
        info = await put(filled, "new", b"one", condition=WriteCondition(if_absent=True))
        info = await put(filled, "new", b"two", condition=WriteCondition(if_match=info.etag))
        await put(filled, "new", b"three", condition=WriteCondition(if_match=ANY))
        assert await get(filled, "new") == b"three"

    @optional(Feature.CHECKSUMS)
    async def test_a_checksum_is_computed_compared_and_kept(self, filled: Any) -> None:
        data = content(LARGE_BYTES, 3)
        value = base64.b64encode(checksums.crc32c(data).to_bytes(4, "big")).decode()
        algorithm = ChecksumAlgorithm.CRC32C
        info = await put(filled, "key", data, checksum=algorithm, digests=BodyDigests(checksum=value))
        assert info.checksum == Checksum(algorithm, value)
        assert (await filled.objects.head_object(CALLER, ReadRequest(BUCKET, "key"))).info.checksum == info.checksum
        wrong = put(filled, "key", b"other", checksum=algorithm, digests=BodyDigests(checksum=value))
        assert await refusal(wrong) is ErrorCode.BAD_DIGEST
        assert await get(filled, "key") == data

    # reading

    async def test_a_range_brings_its_bytes(self, filled: Any) -> None:
        for spec, expected in (
            (RangeSpec(0, 0), slice(0, 1)),
            (RangeSpec(16_383, 16_384), slice(16_383, 16_385)),
            (RangeSpec(40_000, None), slice(40_000, None)),
            (RangeSpec(40_000, 10 * SMALL_BYTES), slice(40_000, None)),
            (RangeSpec(suffix=1), slice(-1, None)),
            (RangeSpec(suffix=10 * SMALL_BYTES), slice(0, None)),
        ):
            data = content(SMALL_BYTES)[expected]
            assert await get(filled, "stored", range=spec) == data, spec
            head = await filled.objects.head_object(CALLER, ReadRequest(BUCKET, "stored", spec))
            assert (head.range.length, head.info.nbytes) == (len(data), SMALL_BYTES), spec

    async def test_a_range_beyond_the_end_is_refused(self, filled: Any) -> None:
        await put(filled, "empty", b"")
        for key, spec in (
            ("stored", RangeSpec(SMALL_BYTES, None)),
            ("stored", RangeSpec(suffix=0)),
            ("empty", RangeSpec(0, 0)),
        ):
            assert await refusal(get(filled, key, range=spec)) is ErrorCode.INVALID_RANGE, spec
            head = filled.objects.head_object(CALLER, ReadRequest(BUCKET, key, spec))
            assert await refusal(head) is ErrorCode.INVALID_RANGE, spec

    async def test_a_range_and_a_part_exclude_each_other(self, filled: Any) -> None:
        both = get(filled, "stored", range=RangeSpec(0, 0), part_number=1)
        assert await refusal(both) is ErrorCode.INVALID_REQUEST

    @optional(Feature.MULTIPART_DETAILS)
    async def test_an_object_put_whole_is_its_only_part(self, filled: Any) -> None:
        assert await filled.objects.object_parts(CALLER, BUCKET, "stored") == []
        assert await get(filled, "stored", part_number=1) == content(SMALL_BYTES)
        assert await refusal(get(filled, "stored", part_number=2)) is ErrorCode.INVALID_PART_NUMBER

    @optional(Feature.CONDITIONS)
    async def test_a_read_is_made_only_under_its_condition(self, filled: Any) -> None:
        info = (await filled.objects.head_object(CALLER, ReadRequest(BUCKET, "stored"))).info
        other, before_s, after_s = "0" * 32, info.modified_at - 10, info.modified_at + 10
        for condition in (
            ReadCondition(if_match=(other, info.etag)),
            ReadCondition(if_match=(ANY,)),
            ReadCondition(if_none_match=(other,)),
            ReadCondition(if_modified_since=before_s),
            ReadCondition(if_unmodified_since=after_s),
        ):
            assert await get(filled, "stored", condition=condition) == content(SMALL_BYTES)
        for condition, code in (
            (ReadCondition(if_match=(other,)), ErrorCode.PRECONDITION_FAILED),
            (ReadCondition(if_unmodified_since=before_s), ErrorCode.PRECONDITION_FAILED),
            (ReadCondition(if_none_match=(other, info.etag)), ErrorCode.NOT_MODIFIED),
            (ReadCondition(if_modified_since=after_s), ErrorCode.NOT_MODIFIED),
        ):
            assert await refusal(get(filled, "stored", condition=condition)) is code
            head = filled.objects.head_object(CALLER, ReadRequest(BUCKET, "stored", condition=condition))
            assert await refusal(head) is code

    @pytest.mark.parametrize("change", ["overwrite", "delete"])
    async def test_a_read_that_has_begun_keeps_its_version(self, filled: Any, change: str) -> None:
        data = content(LARGE_BYTES, 1)
        await put(filled, "key", data)
        async with filled.objects.open_object(CALLER, ReadRequest(BUCKET, "key")) as read:
            if change == "overwrite":
                await put(filled, "key", content(LARGE_BYTES, 2))
            else:
                await filled.objects.delete_object(CALLER, BUCKET, "key")
            assert b"".join([bytes(piece) async for piece in read.body]) == data

    async def test_a_pump_sends_the_bytes_of_the_body(self, filled: Any) -> None:
        data = content(LARGE_BYTES, 1)
        await put(filled, "key", data)
        sent = bytearray()

        def send_some(view: memoryview) -> int:
            taken = view[:70_000]
            sent.extend(taken)
            return len(taken)

        ours, theirs = socket.socketpair()
        with ours, theirs:
            async with filled.objects.open_object(CALLER, ReadRequest(BUCKET, "key", RangeSpec(5, None))) as read:
                if read.pump is None:
                    sent.extend(b"".join([bytes(piece) async for piece in read.body]))
                else:
                    await read.pump.prime()
                    while not await read.pump.send(send_some, ours.fileno()):
                        pass
        assert bytes(sent) == data[5:]

    # copying

    async def test_a_copy_has_the_bytes_and_attributes_of_its_source_and_outlives_it(self, filled: Any) -> None:
        attributes = Attributes({"content-type": "text/plain"}, {"tag": "one"})
        source = await put(filled, "source", content(LARGE_BYTES), attributes=attributes)
        request = CopyRequest(ReadRequest(BUCKET, "source"), BUCKET, "copy")
        copied = await filled.objects.copy_object(CALLER, request)
        assert (copied.key, copied.nbytes, copied.etag) == ("copy", source.nbytes, source.etag)
        assert copied.attributes == attributes
        await filled.objects.delete_object(CALLER, BUCKET, "source")
        assert await get(filled, "copy") == content(LARGE_BYTES)

    async def test_a_copy_may_be_given_other_attributes_and_tags(self, filled: Any) -> None:
        request = CopyRequest(
            ReadRequest(BUCKET, "stored"), BUCKET, "stored", Attributes({"content-type": "a/b"}), {"tag": "new"}
        )
        await filled.objects.copy_object(CALLER, request)
        info = (await filled.objects.head_object(CALLER, ReadRequest(BUCKET, "stored"))).info
        assert (info.attributes.headers, info.attributes.tags) == ({"content-type": "a/b"}, {"tag": "new"})
        assert await get(filled, "stored") == content(SMALL_BYTES)

    @optional(Feature.CONDITIONS)
    async def test_a_copy_is_made_only_under_the_condition_on_its_source(self, filled: Any) -> None:
        """A copy has nothing to fall back on, so an unchanged source is a failed condition, too."""
        info = (await filled.objects.head_object(CALLER, ReadRequest(BUCKET, "stored"))).info
        for condition in (ReadCondition(if_match=("0" * 32,)), ReadCondition(if_none_match=(info.etag,))):
            request = CopyRequest(ReadRequest(BUCKET, "stored", condition=condition), BUCKET, "copy")
            assert await refusal(filled.objects.copy_object(CALLER, request)) is ErrorCode.PRECONDITION_FAILED
        assert await keys_of(filled) == ["stored"]

    @optional(Feature.CHECKSUMS)
    async def test_a_copy_may_be_given_a_checksum_that_its_source_has_not(self, filled: Any) -> None:
        request = CopyRequest(ReadRequest(BUCKET, "stored"), BUCKET, "copy", checksum=ChecksumAlgorithm.SHA256)
        copied = await filled.objects.copy_object(CALLER, request)
        value = base64.b64encode(hashlib.sha256(content(SMALL_BYTES)).digest()).decode()
        assert copied.checksum == Checksum(ChecksumAlgorithm.SHA256, value)

    # deleting and tagging

    async def test_a_deleted_object_is_gone_and_deleting_it_again_is_fine(self, filled: Any) -> None:
        for _ in range(2):
            await filled.objects.delete_object(CALLER, BUCKET, "stored")
            assert await keys_of(filled) == []
            assert await refusal(get(filled, "stored")) is ErrorCode.NO_SUCH_KEY

    @optional(Feature.CONDITIONAL_DELETE)
    async def test_an_object_is_deleted_only_under_the_condition(self, filled: Any) -> None:
        info = (await filled.objects.head_object(CALLER, ReadRequest(BUCKET, "stored"))).info
        other = WriteCondition(if_match="0" * 32)
        delete = filled.objects.delete_object
        assert await refusal(delete(CALLER, BUCKET, "stored", other)) is ErrorCode.PRECONDITION_FAILED
        assert await refusal(delete(CALLER, BUCKET, "unknown", other)) is ErrorCode.NO_SUCH_KEY
        assert await keys_of(filled) == ["stored"]
        await delete(CALLER, BUCKET, "stored", WriteCondition(if_match=info.etag))
        assert await keys_of(filled) == []

    async def test_many_objects_are_deleted_by_one_call_whether_they_are_there_or_not(self, filled: Any) -> None:
        for index in range(5):
            await put(filled, f"key-{index}", b"data")
        await filled.objects.delete_objects(CALLER, BUCKET, ["key-1", "unknown", "key-3", "key-4"])
        assert await keys_of(filled) == ["key-0", "key-2", "stored"]

    async def test_tags_are_replaced_and_nothing_else_changes(self, filled: Any) -> None:
        await put(filled, "key", b"data", attributes=Attributes({"content-type": "a/b"}, {"old": "1"}))
        # The first change sends a chunk home that was to be written back later, and home has a time of its own for it.
        await filled.objects.set_tags(CALLER, BUCKET, "key", {"older": "1"})
        before = (await filled.objects.head_object(CALLER, ReadRequest(BUCKET, "key"))).info
        await filled.objects.set_tags(CALLER, BUCKET, "key", {"new": "2"})
        after = (await filled.objects.head_object(CALLER, ReadRequest(BUCKET, "key"))).info
        assert after == replace(before, attributes=replace(before.attributes, tags={"new": "2"}))
        await filled.objects.set_tags(CALLER, BUCKET, "key", {})
        assert (await filled.objects.head_object(CALLER, ReadRequest(BUCKET, "key"))).info.attributes.tags == {}
