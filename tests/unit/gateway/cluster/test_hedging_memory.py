"""Portions that go into a client's memory: the first of two members counts, the other is stopped and given up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from descriptors.cluster import Member
from descriptors.descriptor import Delivery, Descriptor, RdmaTarget
from descriptors.errors import ErrorCode, ServerError
from descriptors.notices import Mode
from descriptors.storage_api import DeliveryOutcome, DeliveryStart, DeliveryTiming, Grant
from gateway.cluster.hedging import LEAST, LIMIT_S_MIN, HedgeStep, Hedging
from gateway.cluster.members import Members
from gateway.cluster.memory import MemoryDelivery
from tests.support.chunks import LAYOUT, make_chunks
from tests.unit.gateway.cluster.test_hedging import A, B, C, PlayedMembership, played_time  # noqa: F401
from tests.unit.played_time import PlayedTime

KEYS, _ = make_chunks(24, LAYOUT)


class PlayedMember:
    """Ends a portion when it may, or fails it. Its first attempts and its hedges are told apart by their number."""

    def __init__(self, hedged: asyncio.Event) -> None:
        self.prefixes = self.status = self
        self.hedged = hedged
        self.is_slow = self.is_slow_hedge = False
        self.failure: Exception | None = None
        self.hedge_failure: Exception | None = None
        self.wait_s = 0.0
        self.may_go_on = asyncio.Event()
        self.asked: list[tuple[int, int]] = []
        self.cancelled_count = 0

    async def start(self) -> None: ...

    async def transports(self, access_key: str) -> None: ...

    async def deliver(self, access_key: str, bucket: str, descriptor: Descriptor, sink: Any) -> DeliveryOutcome:
        portion = descriptor.portion
        assert portion is not None
        self.asked.append((portion.index, portion.attempt))
        try:
            if portion.attempt:
                self.hedged.set()
                if self.hedge_failure is not None:
                    raise self.hedge_failure
            if self.is_slow_hedge if portion.attempt else self.is_slow:
                await self.may_go_on.wait()
            if self.failure is not None and not portion.attempt:
                raise self.failure
        except asyncio.CancelledError:
            self.cancelled_count += 1
            raise
        nbytes = LAYOUT.delivery_bytes(len(portion.positions))
        start = DeliveryStart("id", Mode.LAYER_MAJOR, portion.chunk_count, nbytes, Grant())
        return DeliveryOutcome(start, nbytes, DeliveryTiming(0.0, 0.0, 0.0, self.wait_s))

    async def cancel(self, access_key: str, request_id: str, writers: tuple[str, ...] = ()) -> None: ...


class Bed:
    """Members, and a gateway that has seen many quick portions and delivered much."""

    def __init__(self, *members: Member) -> None:
        self.hedged = asyncio.Event()
        self.storages = {member.endpoint: PlayedMember(self.hedged) for member in members}
        self.members = Members(PlayedMembership(*members), self.storages.__getitem__)  # type: ignore[arg-type]
        self.hedging = self.members.hedging
        for _ in range(LEAST):
            self.hedging.waited(HedgeStep.PORTION, 0.001, 1_000_000)
        self.hedging.delivered(10**10)

    def slow(self) -> tuple[Member, PlayedMember]:
        """A member that keeps some of the chunks, and is slow."""
        member = self.members.placement.order("bucket", KEYS[0])[0]
        storage = self.storages[member.endpoint]
        storage.is_slow = True
        return member, storage

    async def delivered(self) -> DeliveryOutcome:
        target = RdmaTarget("agent", "region", 0, LAYOUT.delivery_bytes(len(KEYS)))
        descriptor = Descriptor(
            tuple(KEYS), LAYOUT.num_layers, LAYOUT.chunk_tokens, LAYOUT.per_layer_chunk_bytes,
            delivery=Delivery.LAYER_MAJOR, request_id="request-0123456789", rdma_target=target,
        )  # fmt: skip
        async with asyncio.timeout(60):
            return await MemoryDelivery(self.members, "key", "bucket", descriptor, ()).run()


async def test_a_slow_portion_is_brought_by_another_member_and_the_slow_one_is_given_up() -> None:
    bed = Bed(A, B, C)
    member, slow = bed.slow()
    outcome = await bed.delivered()
    assert outcome.given_up == (member.id,)
    assert outcome.transferred_bytes == LAYOUT.delivery_bytes(len(KEYS))
    assert (bed.hedging.hedge_count, bed.hedging.won_count) == (1, 1)
    assert slow.cancelled_count == 1
    attempts = sorted(each for storage in bed.storages.values() for each in storage.asked)
    assert [attempt for _, attempt in attempts] in ([0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1])


async def test_where_the_slow_one_is_first_the_other_is_given_up() -> None:
    bed = Bed(A, B, C)
    _, slow = bed.slow()
    for storage in bed.storages.values():
        storage.is_slow_hedge = True
    delivering = asyncio.ensure_future(bed.delivered())
    await bed.hedged.wait()
    slow.may_go_on.set()
    outcome = await delivering
    (hedger,) = [member for member in (A, B, C) if any(attempt for _, attempt in bed.storages[member.endpoint].asked)]
    assert outcome.given_up == (hedger.id,)
    assert (bed.hedging.hedge_count, bed.hedging.won_count) == (1, 0)


async def test_where_the_hedge_fails_the_slow_one_is_waited_for_and_nobody_is_given_up() -> None:
    bed = Bed(A, B, C)
    _, slow = bed.slow()
    for storage in bed.storages.values():
        storage.hedge_failure = ServerError(ErrorCode.INTERNAL_ERROR, "the disk is broken")
    delivering = asyncio.ensure_future(bed.delivered())
    await bed.hedged.wait()
    await PlayedTime.passes(2 * LIMIT_S_MIN)
    assert not delivering.done()
    slow.may_go_on.set()
    assert (await delivering).given_up == ()
    assert bed.hedging.won_count == 0


async def test_where_the_slow_one_fails_the_hedge_is_waited_for() -> None:
    bed = Bed(A, B, C)
    _, slow = bed.slow()
    slow.failure = ServerError(ErrorCode.INTERNAL_ERROR, "the disk is broken")
    for storage in bed.storages.values():
        storage.is_slow_hedge = True
    delivering = asyncio.ensure_future(bed.delivered())
    await bed.hedged.wait()
    slow.may_go_on.set()
    await PlayedTime.passes(2 * LIMIT_S_MIN)
    assert not delivering.done()
    for storage in bed.storages.values():
        storage.may_go_on.set()
    assert (await delivering).given_up == ()


async def test_without_another_member_or_without_credit_nobody_else_is_asked() -> None:
    alone, poor = Bed(A), Bed(A, B, C)
    poor.hedging.delivered_bytes = 0
    for bed in (alone, poor):
        _, slow = bed.slow()
        delivering = asyncio.ensure_future(bed.delivered())
        await PlayedTime.passes(5 * LIMIT_S_MIN)
        assert not delivering.done()
        slow.may_go_on.set()
        assert (await delivering).given_up == ()
        assert bed.hedging.hedge_count == 0


async def test_a_delivery_that_is_cancelled_stops_both() -> None:
    bed = Bed(A, B, C)
    _, slow = bed.slow()
    for storage in bed.storages.values():
        storage.is_slow_hedge = True
    delivering = asyncio.ensure_future(bed.delivered())
    await bed.hedged.wait()
    delivering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivering
    assert sum(storage.cancelled_count for storage in bed.storages.values()) == 2
    assert slow.cancelled_count >= 1


def test_large_portions_may_take_longer() -> None:
    hedging = Hedging()
    for _ in range(LEAST):
        hedging.waited(HedgeStep.PORTION, 0.1, 99 << 20)
    small, large = hedging.limit_s(HedgeStep.PORTION, 1 << 20), hedging.limit_s(HedgeStep.PORTION, 999 << 20)
    assert small == LIMIT_S_MIN
    assert large == pytest.approx(2.0)


async def test_a_slow_member_whose_connection_breaks_is_given_up_although_the_hedge_wins() -> None:
    """Nobody says that it has drained."""
    bed = Bed(A, B, C)
    member, slow = bed.slow()
    slow.failure = ConnectionResetError("lost")
    for storage in bed.storages.values():
        storage.is_slow_hedge = True
    delivering = asyncio.ensure_future(bed.delivered())
    await bed.hedged.wait()
    slow.may_go_on.set()
    await PlayedTime.passes(LIMIT_S_MIN)
    for storage in bed.storages.values():
        storage.may_go_on.set()
    assert (await delivering).given_up == (member.id,)


async def test_where_both_break_both_are_given_up_and_a_third_member_is_asked() -> None:
    bed = Bed(A, B, C)
    member, slow = bed.slow()
    slow.failure = ConnectionResetError("lost")
    second, third = bed.members.placement.order("bucket", KEYS[0])[1:]
    bed.storages[second.endpoint].hedge_failure = ConnectionResetError("lost, too")
    delivering = asyncio.ensure_future(bed.delivered())
    await bed.hedged.wait()
    slow.may_go_on.set()
    assert set((await delivering).given_up) == {member.id, second.id}
    assert any(attempt == 2 for _, attempt in bed.storages[third.endpoint].asked)


async def test_portions_that_links_make_wait_are_no_slow_ones() -> None:
    """Nothing is learned of them, and the client's next delivery is not hedged."""
    bed = Bed(A, B, C)
    for storage in bed.storages.values():
        storage.wait_s = 5.0
    before = bed.hedging.limit_s(HedgeStep.PORTION)
    assert (await bed.delivered()).given_up == ()
    _, slow = bed.slow()
    delivering = asyncio.ensure_future(bed.delivered())
    await PlayedTime.passes(5 * LIMIT_S_MIN)
    slow.may_go_on.set()
    await delivering
    assert bed.hedging.hedge_count == 0
    assert bed.hedging.limit_s(HedgeStep.PORTION) == before
