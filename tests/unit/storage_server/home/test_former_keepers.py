"""Copies of former keepers: whose are asked, and which are believed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from descriptors.cluster import MEMBERS_MAX, Member
from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.objects import ByteRange, ObjectInfo, ReadHead, ReadRequest
from descriptors.storage_api import ObjectRead
from storage_server.home import former_keepers
from storage_server.home.former_keepers import FormerKeepers
from storage_server.home.rules.proof import make_proof

KEY, CONTENT = "ab" * 32, b"0123456789" * 100
FORMER = Member("a", "http://a:1")


class PlayedLanded:
    """Memory that a chunk comes into."""

    def __init__(self, nbytes: int = len(CONTENT)) -> None:
        self.view = memoryview(bytearray(nbytes))


class PlayedHome:
    """Shows one object, with a proof or without."""

    def __init__(self, *, has_proof: bool = True) -> None:
        self.proof = make_proof(len(CONTENT), bytes(4)) if has_proof else None
        self.ask_count = 0

    @asynccontextmanager
    async def open_range(self, request: ReadRequest) -> AsyncIterator[Any]:
        self.ask_count += 1
        info = ObjectInfo(request.key, len(CONTENT), "etag", 1.0)
        yield ReadHead(info, ByteRange(0, 1)), self.proof, pieces(CONTENT[:1])


class PlayedCopies:
    """The former keeper's cache."""

    def __init__(self, content: bytes = CONTENT, error: Exception | None = None) -> None:
        self.content, self.error = content, error
        self.asked: list[ReadRequest] = []
        self.stalls = False

    @asynccontextmanager
    async def open_copy(self, member: Member, request: ReadRequest) -> AsyncIterator[ObjectRead]:
        self.asked.append(request)
        if self.stalls:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        info = ObjectInfo(request.key, len(self.content), "etag", 1.0)
        yield ObjectRead(ReadHead(info, ByteRange(0, len(self.content))), pieces(self.content))

    async def close(self) -> None: ...


async def pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), 300):
        yield content[start : start + 300]


def made(home: PlayedHome, copies: PlayedCopies) -> FormerKeepers:
    return FormerKeepers(home, lambda bucket, key: FORMER, copies)  # type: ignore[arg-type]


async def test_the_copy_of_what_home_shows_is_brought() -> None:
    copies, landed = PlayedCopies(), PlayedLanded()
    former = made(PlayedHome(), copies)
    entry = await former.read("bucket", KEY, landed)  # type: ignore[arg-type]
    assert entry is not None
    assert entry.info.etag == "etag"
    assert bytes(landed.view) == CONTENT
    assert copies.asked[0].only_if_cached
    assert copies.asked[0].condition.if_match == ("etag",)
    assert (former.hit_count, former.read_bytes) == (1, len(CONTENT))


@pytest.mark.parametrize("nbytes", [0, 999, 1001, 5000])
async def test_a_copy_of_another_size_is_refused_and_its_member_left_alone(nbytes: int) -> None:
    former = made(PlayedHome(), PlayedCopies(bytes(nbytes)))
    assert await former.read("bucket", KEY, PlayedLanded()) is None  # type: ignore[arg-type]
    assert not former.may_have("bucket", KEY)


async def test_without_a_proof_of_home_nobody_elses_bytes_are_asked_for() -> None:
    copies = PlayedCopies()
    former = made(PlayedHome(has_proof=False), copies)
    assert await former.read("bucket", KEY, PlayedLanded()) is None  # type: ignore[arg-type]
    assert copies.asked == []
    assert former.may_have("bucket", KEY)


@pytest.mark.parametrize(
    "error", [ServerError(ErrorCode.SLOW_DOWN, "busy"), CallerError(ErrorCode.NO_SUCH_KEY, "none"), TimeoutError()]
)
async def test_what_home_says_is_no_fault_of_the_former_keeper(error: Exception) -> None:
    """Home may be too busy for one bucket, whose reads would have the member left alone for all."""

    class Refusing(PlayedHome):
        @asynccontextmanager
        async def open_range(self, request: ReadRequest) -> AsyncIterator[Any]:
            raise error
            yield

    copies = PlayedCopies()
    former = made(Refusing(), copies)
    for _ in range(former_keepers.MISSES_MAX):
        assert await former.read("bucket", KEY, PlayedLanded()) is None  # type: ignore[arg-type]
    assert former.may_have("bucket", KEY)
    assert (copies.asked, former.miss_count) == ([], 0)


async def test_a_member_that_cannot_be_reached_is_left_alone_and_misses_are_counted() -> None:
    gone = made(PlayedHome(), PlayedCopies(error=ServerError(ErrorCode.SLOW_DOWN, "gone")))
    assert await gone.read("bucket", KEY, PlayedLanded()) is None  # type: ignore[arg-type]
    assert not gone.may_have("bucket", KEY)
    empty = made(PlayedHome(), PlayedCopies(error=CallerError(ErrorCode.NO_SUCH_KEY, "none")))
    for _ in range(former_keepers.MISSES_MAX):
        assert empty.may_have("bucket", KEY)
        assert await empty.read("bucket", KEY, PlayedLanded()) is None  # type: ignore[arg-type]
    assert not empty.may_have("bucket", KEY)
    assert empty.miss_count == former_keepers.MISSES_MAX


async def test_a_member_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(former_keepers, "READ_WAIT_S", 0.01)
    copies = PlayedCopies()
    copies.stalls = True
    former = made(PlayedHome(), copies)
    assert await former.read("bucket", KEY, PlayedLanded()) is None  # type: ignore[arg-type]
    assert not former.may_have("bucket", KEY)


async def test_where_there_is_no_former_keeper_nobody_is_asked() -> None:
    home = PlayedHome()
    former = FormerKeepers(home, lambda bucket, key: None, PlayedCopies())  # type: ignore[arg-type]
    assert not former.may_have("bucket", KEY)
    assert await former.read("bucket", KEY, PlayedLanded()) is None  # type: ignore[arg-type]
    assert home.ask_count == 0


async def test_members_that_come_and_go_are_forgotten() -> None:
    """Anybody who may write to etcd names members, each with an id of its own."""
    numbers = itertools.count()

    def keeper(bucket: str, key: str) -> Member:
        return Member("a", f"http://a:{next(numbers)}")

    former = FormerKeepers(PlayedHome(), keeper, PlayedCopies())  # type: ignore[arg-type]
    for _ in range(3 * MEMBERS_MAX):
        assert former.may_have("bucket", KEY)
    assert len(former._breakers) <= MEMBERS_MAX + 1
