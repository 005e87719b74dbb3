"""Which portions count as slow, what hedges may cost, and that the first of two has its bytes delivered."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from descriptors.cluster import Member, View
from descriptors.descriptor import Delivery, Descriptor
from descriptors.errors import ErrorCode, ServerError
from descriptors.notices import Mode
from descriptors.storage_api import DeliveryStart, Grant
from gateway.cluster import body_delivery, memory
from gateway.cluster import members as members_module
from gateway.cluster.hedging import EXTRA_FRACTION, IN_FLIGHT_BYTES, KEPT, LEAST, LIMIT_S_MIN, HedgeStep, Hedging
from gateway.cluster.members import Members
from gateway.cluster.prefixes import ClusterPrefixes
from tests.support.chunks import LAYOUT, make_chunks
from tests.unit.played_time import PlayedTime

N = 24
KEYS, CHUNKS = make_chunks(N, LAYOUT)
LAYERS = CHUNKS.reshape(N, LAYOUT.num_layers, -1).transpose(1, 0, 2)
A, B, C = (Member(name, f"http://{name}:1") for name in "abc")


@pytest.fixture(autouse=True)
async def played_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members take no time unless they wait, however loaded the machine is."""
    played = PlayedTime()
    for asking in (body_delivery, memory, members_module):
        monkeypatch.setattr(asking, "time", played)


def test_nothing_is_slow_before_enough_waits_are_known() -> None:
    hedging = Hedging()
    for _ in range(LEAST - 1):
        hedging.waited(HedgeStep.WINDOW, 0.5)
    assert hedging.limit_s(HedgeStep.WINDOW) is None
    hedging.waited(HedgeStep.WINDOW, 0.5)
    assert hedging.limit_s(HedgeStep.WINDOW) == 1.0
    assert hedging.limit_s(HedgeStep.BEGIN) is None


def test_the_limit_follows_the_waits_of_late() -> None:
    hedging = Hedging()
    for wait_s in [0.2] * KEPT + [0.001] * (2 * KEPT):
        hedging.waited(HedgeStep.WINDOW, wait_s)
    assert hedging.limit_s(HedgeStep.WINDOW) == LIMIT_S_MIN


def test_hedges_cost_a_small_fraction_of_what_was_delivered() -> None:
    hedging = Hedging()
    assert not hedging.begin(1)
    hedging.delivered(10**9)
    while hedging.begin(5_000_000):
        pass
    assert hedging.extra_bytes <= EXTRA_FRACTION * 10**9
    assert hedging.hedge_count == int(EXTRA_FRACTION * 10**9 // (5_000_000 + IN_FLIGHT_BYTES))


HEDGES_FROM = 3
"""Portions from this number on are those that stand in for slow ones: three members bring the first three."""


class PlayedMember:
    """Delivers the chunks that it is asked for. `stops_at` is the layer before which it waits for `may_go_on`, -1 for
    before its beginning; `hedge_stops_at` the same where it stands in for another member, and `hedge_fails` that it
    fails there instead.
    """

    def __init__(self, hedged: asyncio.Event) -> None:
        self.prefixes = self.status = self
        self.hedged = hedged
        self.stops_at: int | None = None
        self.ends_at: int | None = None
        """The layer before which its body ends, as a whole one does, where it stands in for nobody."""
        self.hedge_stops_at: int | None = None
        self.hedge_fails = False
        self.may_go_on = asyncio.Event()
        self.asked: list[Descriptor] = []
        self.cancelled_count = 0

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def transports(self, access_key: str) -> None: ...

    async def claim(self, access_key: str, request_id: str) -> None: ...

    async def deliver(self, access_key: str, bucket: str, descriptor: Descriptor, sink: Any) -> None:
        self.asked.append(descriptor)
        portion = descriptor.portion
        assert portion is not None
        is_hedge = portion.index >= HEDGES_FROM
        if is_hedge:
            self.hedged.set()
        stops_at = self.hedge_stops_at if is_hedge else self.stops_at

        async def pass_by(layer: int) -> None:
            if layer == stops_at:
                if is_hedge and self.hedge_fails:
                    raise ServerError(ErrorCode.INTERNAL_ERROR, "the disk is broken")
                await self.may_go_on.wait()

        try:
            await pass_by(-1)
            nbytes = LAYOUT.delivery_bytes(len(portion.positions))
            await sink.begin(DeliveryStart("id", Mode.LAYER_MAJOR, len(portion.positions), nbytes, Grant()))
            for layer in range(portion.first_layer, LAYOUT.num_layers):
                if layer == self.ends_at and not is_hedge:
                    return
                await pass_by(layer)
                await sink.write(memoryview(np.ascontiguousarray(LAYERS[layer][list(portion.positions)]).data))
        except asyncio.CancelledError:
            self.cancelled_count += 1
            raise


class PlayedMembership:
    def __init__(self, *members: Member) -> None:
        self.view = View("kv", 1, members)

    def on_view(self, told: Any) -> None: ...


class Received:
    """A client's connection."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_cut = False

    async def begin(self, start: DeliveryStart) -> None: ...

    async def write(self, view: memoryview) -> None:
        self.data += view.cast("B")

    def abort(self) -> None:
        self.is_cut = True


class Bed:
    """Three members, and a gateway that has seen many quick portions and delivered much."""

    def __init__(self, *members: Member) -> None:
        self.hedged = asyncio.Event()
        self.storages = {member.endpoint: PlayedMember(self.hedged) for member in members}
        self.members = Members(PlayedMembership(*members), self.storages.__getitem__)  # type: ignore[arg-type]
        self.hedging = self.members.hedging
        for _ in range(LEAST):
            for step in HedgeStep:
                self.hedging.waited(step, 0.001)
        self.hedging.delivered(10**9)

    def keeper(self) -> PlayedMember:
        """A member that keeps some of the chunks."""
        return self.storages[self.members.placement.order("bucket", KEYS[0])[0].endpoint]

    async def fetched(self) -> bytes:
        sink = Received()
        descriptor = Descriptor(
            tuple(KEYS), LAYOUT.num_layers, LAYOUT.chunk_tokens, LAYOUT.per_layer_chunk_bytes,
            delivery=Delivery.LAYER_MAJOR,
        )  # fmt: skip
        await ClusterPrefixes(self.members).deliver("key", "bucket", descriptor, sink)  # type: ignore[arg-type]
        assert not sink.is_cut
        return bytes(sink.data)


@pytest.mark.parametrize("stops_at", [-1, 0, 3, LAYOUT.num_layers - 1])
async def test_a_slow_portion_is_brought_by_others_and_the_slow_one_is_stopped(stops_at: int) -> None:
    """Wherever it is slow."""
    bed = Bed(A, B, C)
    slow = bed.keeper()
    slow.stops_at = stops_at
    assert await bed.fetched() == LAYERS.tobytes()
    assert (bed.hedging.hedge_count, bed.hedging.won_count) == (1, 1)
    assert slow.cancelled_count == 1
    asked = [each.portion for storage in bed.storages.values() for each in storage.asked]
    assert {each.first_layer for each in asked if each is not None and each.index >= HEDGES_FROM} == {max(0, stops_at)}


async def test_a_slow_portion_that_comes_before_the_hedge_is_taken_and_the_hedge_is_stopped() -> None:
    bed = Bed(A, B, C)
    slow = bed.keeper()
    slow.stops_at = 2
    others = [storage for storage in bed.storages.values() if storage is not slow]
    for other in others:
        other.hedge_stops_at = -1
    fetching = asyncio.ensure_future(bed.fetched())
    await bed.hedged.wait()
    slow.may_go_on.set()
    assert await fetching == LAYERS.tobytes()
    assert (bed.hedging.hedge_count, bed.hedging.won_count) == (1, 0)
    assert slow.cancelled_count == 0
    await asyncio.sleep(0)
    assert sum(other.cancelled_count for other in others)


async def test_where_the_hedge_fails_the_slow_portion_is_waited_for() -> None:
    bed = Bed(A, B, C)
    slow = bed.keeper()
    slow.stops_at = 2
    for storage in bed.storages.values():
        storage.hedge_stops_at, storage.hedge_fails = 2, True
    fetching = asyncio.ensure_future(bed.fetched())
    await bed.hedged.wait()
    await PlayedTime.passes(0.05)
    slow.may_go_on.set()
    assert await fetching == LAYERS.tobytes()
    assert (bed.hedging.hedge_count, bed.hedging.won_count) == (1, 0)


async def test_without_another_member_or_without_credit_nobody_else_is_asked() -> None:
    alone, poor = Bed(A), Bed(A, B, C)
    poor.hedging.delivered_bytes = 0
    for bed in (alone, poor):
        slow = bed.keeper()
        slow.stops_at = 1
        fetching = asyncio.ensure_future(bed.fetched())
        await PlayedTime.passes(5 * LIMIT_S_MIN)
        assert not fetching.done()
        slow.may_go_on.set()
        assert await fetching == LAYERS.tobytes()
        assert bed.hedging.hedge_count == 0


@pytest.mark.parametrize("ends_at", [0, 3])
async def test_a_portion_that_ends_early_and_cleanly_is_asked_for_again(ends_at: int) -> None:
    """Nothing more would come of it, and its server is there, so the client would wait for ever."""
    bed = Bed(A, B, C)
    bed.hedging = bed.members.hedging = Hedging()  # nobody knows what is slow yet
    bed.keeper().ends_at = ends_at
    async with asyncio.timeout(600):
        assert await bed.fetched() == LAYERS.tobytes()
