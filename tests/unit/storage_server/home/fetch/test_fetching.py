"""Groups of layers, turns, refusals, lifecycle rules and bodies on their way upstream."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.chunk_names import is_chunk_key
from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.layout import ChunkLayout
from descriptors.lifecycle import LifecycleRule
from descriptors.objects import BodyDigests, ChecksumAlgorithm, ReadRequest
from objectcache.adapters.caller import CALLER
from storage_server.delivery.gather.landing import Landing
from storage_server.home.embedded import EmbeddedStore
from storage_server.home.fetch.fetches import Fetches
from storage_server.home.key_locks import KeyLocks
from storage_server.home.rules.groups import GROUP_BYTES_MAX, LATER_BYTES_MIN, SPLIT_BYTES_MIN, group_ends
from storage_server.home.rules.lifecycle import lifecycle_document, lifecycle_rules
from storage_server.home.rules.refusals import refusal
from storage_server.home.s3.sent_body import HELD_BYTES_MAX, SentBody, checked_if_small
from storage_server.home.s3.turns import HOLD_S, Turns
from storage_server.planning.block_checksums import BLOCK_BYTES
from storage_server.settings import StorageSettings
from tests.support.chunks import BytesBody
from tests.support.waiting import settled, until
from tests.unit.played_time import PlayedTime


@given(st.integers(1, 128), st.integers(1, 3_000_000), st.integers(0, 1000))
def test_groups_cover_the_chunk_once_and_end_with_a_block(num_layers: int, slice_bytes: int, waves: int) -> None:
    layout = ChunkLayout(num_layers, 16, slice_bytes)
    ends = group_ends(layout, waves)
    starts = [0, *ends[:-1]]
    assert ends[-1] == layout.chunk_bytes
    assert all(start < end for start, end in zip(starts, ends, strict=True))
    assert all(end % BLOCK_BYTES == 0 for end in ends[:-1])
    if waves <= 1:
        assert len(ends) == 1 or (len(ends) == 2 and layout.chunk_bytes >= SPLIT_BYTES_MIN)
        return
    if len(ends) == 1:
        return
    assert ends[0] <= max(slice_bytes, BLOCK_BYTES) + BLOCK_BYTES
    assert all(end - start >= LATER_BYTES_MIN for start, end in zip(starts[1:-1], ends[1:-1], strict=True))
    largest = max(GROUP_BYTES_MAX, slice_bytes) + BLOCK_BYTES
    assert all(end - start <= largest for start, end in zip(starts, ends, strict=True))


def test_groups_of_a_usual_chunk_are_few() -> None:
    slice_bytes = 64 << 10
    layout = ChunkLayout(32, 16, slice_bytes)
    assert [end // slice_bytes for end in group_ends(layout, 1)] == [32]
    assert [end // slice_bytes for end in group_ends(layout, 2)] == [32]
    assert [end // slice_bytes for end in group_ends(layout, 8)] == [1, 32]
    large = ChunkLayout(32, 256, 1 << 20)
    assert [end >> 20 for end in group_ends(large, 1)] == [1, 32]
    assert [end >> 20 for end in group_ends(large, 2)] == [1, 5, 21, 32]


async def test_turns_go_to_earlier_groups_and_then_to_earlier_chunks() -> None:
    turns, order = Turns(1), list[tuple[int, int]]()

    async def ask(group: int, chunk: int) -> None:
        async with turns.turn(group, chunk):
            order.append((group, chunk))
            await asyncio.sleep(0)

    async with turns.turn(0, 0):
        asked = [asyncio.create_task(ask(*each)) for each in ((1, 0), (0, 2), (1, 1), (0, 1))]
        await asyncio.sleep(0)
        assert turns.waiting_count == 4
        asked[2].cancel()
    await asyncio.wait(asked)
    assert order == [(0, 1), (0, 2), (1, 0)]
    async with asyncio.timeout(60), turns.turn(0, 0):
        assert turns.waiting_count == 0


async def test_a_fetch_that_is_stopped_before_its_first_step_is_told_to_those_that_wait(tmp_path: Path) -> None:
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path))
    await store.start()
    nothing: Any = None
    fetches = Fetches(nothing, store, KeyLocks(), 4, Landing(0))
    beginning = asyncio.create_task(fetches.begin("bucket", ["key"], ChunkLayout(1, 1, 4096)))
    await asyncio.sleep(0)
    await fetches.stop("bucket", ["key"])
    done, _ = await asyncio.wait((beginning,), timeout=60)
    assert done
    with pytest.raises(ServerError, match="has changed"):
        beginning.result()
    await fetches.close()
    store.close()


async def test_no_request_waits_for_ever_behind_first_groups() -> None:
    played = PlayedTime()
    turns, served = Turns(2), list[int]()
    is_over = asyncio.Event()

    async def again_and_again() -> None:
        while not is_over.is_set():
            async with turns.turn(0, 0):
                await played.passes(0.001)

    async def once(group: int, chunk: int) -> None:
        async with turns.turn(group, chunk):
            served.append(chunk)

    busy = [asyncio.create_task(again_and_again()) for _ in range(6)]
    await settled()
    late = [asyncio.create_task(once(1, 1)), asyncio.create_task(once(0, 50))]
    await asyncio.wait(late, timeout=5)  # of played time
    is_over.set()
    await asyncio.wait([*busy, *late])
    assert sorted(served) == [1, 50]


async def test_one_bucket_leaves_some_turns_to_others() -> None:
    """All its objects may hang at the service."""
    turns, order = Turns(8), list[str]()
    may_end = asyncio.Event()

    async def ask(bucket: str, chunk: int) -> None:
        CALLER.set(f"owner of {bucket}")
        async with turns.turn(0, chunk, bucket):
            order.append(f"{bucket}{chunk}")
            await may_end.wait()

    hanging = [asyncio.create_task(ask("a", chunk)) for chunk in range(12)]
    await settled()
    assert order == [f"a{chunk}" for chunk in range(7)]
    other = asyncio.create_task(ask("b", 99))
    await settled()
    assert order[7:] == ["b99"]
    assert turns.waiting_count == 5
    for chunk in (7, 8, 0, 9):  # what waits may be given up, and what hangs
        hanging[chunk].cancel()
        await settled()
    assert order[8:] == ["a9", "a10"]
    may_end.set()
    await asyncio.wait([*hanging, other])
    assert order[10:] == ["a11"]
    assert turns.waiting_count == 0
    may_end.clear()
    again = [asyncio.create_task(ask("c", chunk)) for chunk in range(8)]
    await settled()
    assert order[11:] == [f"c{chunk}" for chunk in range(7)]
    may_end.set()
    await asyncio.wait(again)


async def test_one_caller_leaves_some_turns_to_others_however_many_buckets_it_has() -> None:
    turns, order = Turns(8), list[str]()
    events = {name: asyncio.Event() for name in ("a", "b", "c", "d")}

    async def ask(caller: str, bucket: str, chunk: int) -> None:
        CALLER.set(caller)
        async with turns.turn(0, chunk, bucket):
            order.append(f"{caller}:{bucket}{chunk}")
            await events[bucket].wait()

    greedy = [asyncio.create_task(ask("x", "ab"[at % 2], at)) for at in range(12)]
    await settled()
    assert order == [f"x:{'ab'[at % 2]}{at}" for at in range(7)]
    others = [asyncio.create_task(ask("y", bucket, 99)) for bucket in ("a", "c")]
    await settled()
    assert order[7:] == ["y:a99"]
    events["b"].set()  # three of x end, and what waits of b ends at once
    await settled()
    assert set(order[8:]) == {"x:b7", "x:a8", "x:b9", "x:a10", "x:b11", "y:c99"}
    for event in events.values():
        event.set()
    await asyncio.wait([*greedy, *others])
    assert len(order) == 14
    assert turns.waiting_count == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1), st.booleans()), max_size=80))
def test_every_request_that_is_not_given_up_gets_its_turn(asked: list[tuple[int, int, int, bool]]) -> None:
    """Its bucket and its caller do not matter, nor what others give up."""

    async def served() -> None:
        turns, got = Turns(8), set[int]()

        async def ask(number: int, caller: int, bucket: int, group: int) -> None:
            CALLER.set(str(caller))
            async with turns.turn(group, number % 5, str(bucket)):
                got.add(number)
                await asyncio.sleep(0)
                await asyncio.sleep(0)

        tasks = [
            asyncio.create_task(ask(at, caller, bucket, group)) for at, (caller, bucket, group, _) in enumerate(asked)
        ]
        await asyncio.sleep(0)
        for task, (_, _, _, is_given_up) in zip(tasks, asked, strict=True):
            if is_given_up:
                task.cancel()
        if tasks:
            assert not (await asyncio.wait(tasks, timeout=20))[1]
        assert got >= {at for at, each in enumerate(asked) if not each[3]}
        assert turns.waiting_count == 0

    asyncio.run(served())


async def test_one_caller_leaves_fetches_to_others_however_many_buckets_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetches go on when the one that has asked for them is gone."""
    monkeypatch.setattr("storage_server.home.fetch.fetches.FETCHES_MAX", 8)
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path))
    await store.start()
    hanging = asyncio.Event()

    class Hanging:
        counts_tags = True

        @asynccontextmanager
        async def open_range(self, request: ReadRequest) -> AsyncIterator[Any]:
            await hanging.wait()
            yield

    objects: Any = Hanging()
    fetches = Fetches(objects, store, KeyLocks(), 4, Landing(0))
    layout = ChunkLayout(1, 1, 4096)

    async def begin(caller: str, bucket: str, count: int) -> None:
        CALLER.set(caller)
        await fetches.begin(bucket, [f"key {at}" for at in range(count)], layout)

    begun = [asyncio.create_task(begin("greedy", bucket, 3)) for bucket in ("one", "two")]
    await settled()
    with pytest.raises(ServerError, match="too many"):
        begun[1].result()
    assert fetches.running_count == 4
    begun.append(asyncio.create_task(begin("other", "three", 2)))
    await settled()
    assert not begun[2].done()
    assert fetches.running_count == 6
    for each in begun:
        each.cancel()
    await fetches.close()
    store.close()


async def test_requests_that_are_given_up_leave_their_turns_to_others_of_their_bucket() -> None:
    turns, order = Turns(8), list[int]()

    async def ask(chunk: int, may_end: asyncio.Event) -> None:
        async with turns.turn(0, chunk, "a"):
            order.append(chunk)
            await may_end.wait()

    events = [asyncio.Event() for _ in range(20)]
    tasks = [asyncio.create_task(ask(chunk, events[chunk])) for chunk in range(20)]
    await settled()
    for chunk in range(7):
        tasks[chunk + 7].cancel()
        events[chunk].set()
    await settled()
    assert order == [*range(7), *range(14, 20)]
    for event in events:
        event.set()
    await asyncio.wait(tasks)


async def test_later_groups_wait_for_first_ones_but_not_for_ever() -> None:
    played = PlayedTime()
    turns, order = Turns(8), list[str]()

    async def ask(group: int, name: str, may_end: asyncio.Event) -> None:
        async with turns.turn(group, 0):
            order.append(name)
            await may_end.wait()

    one, other = asyncio.Event(), asyncio.Event()
    asked = [asyncio.create_task(ask(0, "first", one)), asyncio.create_task(ask(1, "later", other))]
    await played.passes(HOLD_S / 2)
    assert order == ["first"]
    one.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["first", "later"]
    one.clear()
    asked += [asyncio.create_task(ask(0, "hangs", one)), asyncio.create_task(ask(1, "held", other))]
    await played.passes(HOLD_S / 2)
    assert order == ["first", "later", "hangs"]
    await played.passes(HOLD_S)
    assert order == ["first", "later", "hangs", "held"]
    one.set()
    other.set()
    await asyncio.wait(asked)


@pytest.mark.parametrize(
    ("status", "document", "code", "is_callers"),
    [
        (404, b"<Error><Code>NoSuchBucket</Code><Message>gone</Message></Error>", ErrorCode.NO_SUCH_BUCKET, True),
        (412, b"", ErrorCode.PRECONDITION_FAILED, True),
        (400, b"<Error><Code>XMinioOdd</Code><Message>odd</Message></Error>", ErrorCode.INVALID_REQUEST, True),
        (503, b"", ErrorCode.SLOW_DOWN, False),
        (429, b"<html>", ErrorCode.SLOW_DOWN, False),
        (500, b"", ErrorCode.INTERNAL_ERROR, False),
        (302, b"", ErrorCode.INTERNAL_ERROR, False),
        (403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>", ErrorCode.INTERNAL_ERROR, False),
        (403, b"<Error><Code>InvalidAccessKeyId</Code></Error>", ErrorCode.INTERNAL_ERROR, False),
    ],
)
def test_a_refusal_keeps_its_code_and_words(status: int, document: bytes, code: ErrorCode, is_callers: bool) -> None:
    error = refusal(status, document, "7")
    assert (error.code, isinstance(error, CallerError)) == (code, is_callers)
    if code is ErrorCode.SLOW_DOWN:
        assert error.retry_after_s == 7
    if b"odd" in document:
        assert error.message == "XMinioOdd: odd"


@pytest.mark.parametrize(
    "rule",
    [
        LifecycleRule("a", prefix="p/", expire_days=3),
        LifecycleRule("b", enabled=False, tags={"a": "b"}, expire_at=86_400.0),
        LifecycleRule("c", prefix="p", tags={"a": "b", "c": "d"}, larger_than=5, smaller_than=9, expire_days=1),
        LifecycleRule("d", abort_days=2),
        LifecycleRule("e", prefix="old", abort_days=2, legacy_prefix=True),
        LifecycleRule("f", larger_than=5, expire_days=1),
    ],
)
def test_lifecycle_rules_come_back_as_they_went(rule: LifecycleRule) -> None:
    assert lifecycle_rules(lifecycle_document([rule])) == [rule]


def test_a_lifecycle_rule_that_cannot_be_shown_is_an_error() -> None:
    with pytest.raises(ServerError, match="Transitions"):
        lifecycle_rules({"Rules": [{"ID": "x", "Status": "Enabled", "Transitions": []}]})


@pytest.mark.parametrize(
    ("key", "is_chunk"),
    [
        ("0" * 64, True),
        ("a/b/" + "f" * 64, True),
        ("F" * 64, False),
        ("0" * 63, False),
        ("0" * 65, False),
        ("x", False),
    ],
)
def test_keys_of_chunks_are_told(key: str, is_chunk: bool) -> None:
    assert is_chunk_key(key) is is_chunk


async def wire(sent: SentBody) -> bytes:
    return b"".join([piece async for piece in sent])


@pytest.mark.parametrize("nbytes", [0, 1, 65_536, 65_537, 200_000])
@pytest.mark.parametrize("algorithm", [None, *ChecksumAlgorithm])
async def test_a_body_has_the_length_that_its_head_says(nbytes: int, algorithm: ChecksumAlgorithm | None) -> None:
    data = bytes(nbytes)
    sent = SentBody(BytesBody(data), nbytes, algorithm)
    on_wire = await wire(sent)
    assert len(on_wire) == int(sent.headers["Content-Length"])
    assert (on_wire == data) is (algorithm is None)


@pytest.mark.parametrize("algorithm", ChecksumAlgorithm)
async def test_the_checksum_of_a_small_body_goes_before_it(algorithm: ChecksumAlgorithm) -> None:
    """Services that know no trailers keep it, or ignore it."""
    data = b"x" * HELD_BYTES_MAX
    sent = SentBody(await checked_if_small(BytesBody(data), len(data), algorithm), len(data), algorithm)
    assert (await wire(sent), sent.payload_hash) == (data, "UNSIGNED-PAYLOAD")
    assert sent.hashes.checksum is not None
    assert sent.headers == {"Content-Length": str(len(data)), algorithm.header: sent.hashes.checksum.value}


async def test_a_small_body_that_is_not_what_it_should_be_is_not_sent_at_all() -> None:
    body = BytesBody(b"data", digests=BodyDigests(checksum="AAAAAA=="))
    with pytest.raises(CallerError) as refused:
        await checked_if_small(body, 4, ChecksumAlgorithm.CRC32)
    assert refused.value.code is ErrorCode.BAD_DIGEST


async def test_a_large_body_is_sent_without_a_trailer_where_none_is_known() -> None:
    """Its checksum is compared here all the same."""
    data = bytes(200_000)
    body = await checked_if_small(BytesBody(data), len(data), ChecksumAlgorithm.CRC32)
    sent = SentBody(body, len(data), ChecksumAlgorithm.CRC32, with_trailer=False)
    assert (await wire(sent), sent.headers) == (data, {"Content-Length": "200000"})
    wrong = BytesBody(data, digests=BodyDigests(checksum="AAAAAA=="))
    with pytest.raises(CallerError):
        await wire(SentBody(wrong, len(data), ChecksumAlgorithm.CRC32, with_trailer=False))


@pytest.mark.parametrize(
    ("announced", "digests", "code"),
    [
        (99_999, None, ErrorCode.INCOMPLETE_BODY),
        (100_001, None, ErrorCode.INCOMPLETE_BODY),
        (100_000, BodyDigests(md5="0" * 32), ErrorCode.BAD_DIGEST),
        (100_000, BodyDigests(sha256="0" * 64), ErrorCode.X_AMZ_CONTENT_SHA256_MISMATCH),
    ],
)
async def test_of_a_body_that_is_not_what_it_should_be_less_is_sent_than_announced(
    announced: int, digests: BodyDigests | None, code: ErrorCode
) -> None:
    """Upstream then keeps nothing of it."""
    sent = SentBody(BytesBody(bytes(100_000), digests=digests), announced, None)
    on_wire = 0

    async def send(pieces: AsyncIterator[bytes]) -> None:
        nonlocal on_wire
        async for piece in pieces:
            on_wire += len(piece)

    with pytest.raises(CallerError) as refused:
        await send(aiter(sent))
    assert refused.value.code is code
    assert sent.failure is refused.value
    assert on_wire < announced


class _Piece(bytearray):
    """Bytes that can be referred to weakly."""


class _FailingObjects:
    """A home whose answers fail when their first bytes have come. `pieces` are those bytes, weakly."""

    def __init__(self) -> None:
        self.pieces = list[weakref.ref[_Piece]]()

    @asynccontextmanager
    async def open_range(self, request: ReadRequest) -> AsyncIterator[Any]:
        piece = _Piece(4096)
        self.pieces.append(weakref.ref(piece))
        await asyncio.sleep(0)
        try:
            raise ValueError("a head that makes no sense")
        except ValueError as error:
            raise ServerError(ErrorCode.INTERNAL_ERROR, "the answer makes no sense", retryable=True) from error
        yield


async def test_what_is_read_ahead_in_vain_keeps_no_bytes(tmp_path: Path) -> None:
    """The timer that gives reads up knew each read to its end, and the error of a read has the frames of its answer."""
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path))
    await store.start()
    objects: Any = _FailingObjects()
    fetches = Fetches(objects, store, KeyLocks(), 4, Landing(0))
    gc.collect()
    gc.disable()
    try:
        fetches.prefetch("bucket", [f"key{number}" for number in range(20)], wait_s=3600)
        await until(lambda: not fetches.running_count and len(objects.pieces) == 20)
        assert [piece() for piece in objects.pieces] == [None] * 20
    finally:
        gc.enable()
    await fetches.close()
    store.close()
