"""The link on an event loop: turns come when the schedule says so, and whatever ends gives its place back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from descriptors.errors import ErrorCode, ServerError
from descriptors.layout import ChunkLayout
from descriptors.notices import Mode
from storage_server.delivery import link as module
from storage_server.delivery.link import Link, LinkPlace
from storage_server.delivery.scheduler.admission import RETRY_AFTER_S_MAX, refuse_backlog
from storage_server.delivery.scheduler.flow import AHEAD_MAX, LinkTenant
from storage_server.delivery.scheduler.policies import Policy
from storage_server.delivery.scheduler.pool import PoolSettings
from storage_server.delivery.scheduler.settings import SchedulerSettings
from storage_server.planning.plan import plan_delivery
from tests.unit.played_time import PlayedTime

RATE = 1e8
PAYLOAD = 100_000
LAYERS = 4


@pytest.fixture(autouse=True)
async def played(monkeypatch: pytest.MonkeyPatch) -> PlayedTime:
    played = PlayedTime()
    monkeypatch.setattr(module, "time", played)
    return played


def link_of(policy: Policy | None = None, **changes: object) -> Link:
    pool = PoolSettings(policy, gather_s=0.0)
    return Link(SchedulerSettings(link_bytes_per_s=RATE, pool=pool, **changes), early_max=2)  # type: ignore[arg-type]


@asynccontextmanager
async def placed(link: Link, mode: Mode = Mode.LAYER_MAJOR, key: str = "KEY") -> AsyncIterator[LinkPlace]:
    layers = LAYERS if mode is Mode.LAYER_MAJOR else 1
    plan = plan_delivery(mode, ChunkLayout(layers, 16, PAYLOAD), 1, PAYLOAD)
    async with link.place(key, plan, 0.001) as place:
        yield place


async def carry(place: LinkPlace, count: int = LAYERS) -> None:
    for index in range(count):
        await place.wait_to_gather(index, is_staged=True)
        await place.wait_to_send(index)
        place.note_sent()


def is_blocked(task: asyncio.Task[None]) -> bool:
    return not task.done()


@pytest.mark.parametrize("policy", [None, *Policy])
@pytest.mark.parametrize("mode", list(Mode))
async def test_every_payload_gets_its_turn(policy: Policy | None, mode: Mode) -> None:
    """By whatever rules the link goes."""
    link = link_of(policy)
    async with placed(link, mode) as one, placed(link, mode, "OTHER") as two:
        await asyncio.gather(*(carry(place, LAYERS if mode is Mode.LAYER_MAJOR else 1) for place in (one, two)))
        assert link.status().queued_bytes == 0
    status = link.status()
    assert status.layerwise_active == status.layerwise_waiting == status.chunkwise_active == 0


async def test_without_a_link_rate_nothing_waits_and_nothing_is_told() -> None:
    link = Link(SchedulerSettings(), early_max=1)
    async with placed(link) as place:
        grant = await place.admitted()
        assert (grant.rate_bytes_per_s, grant.epoch) == (0, 0)
        await carry(place)
        assert link.offered_rate_bytes_per_s("KEY") == 0.0


async def test_a_delivery_takes_no_less_time_than_its_rate_says(played: PlayedTime) -> None:
    """The last payload goes when the link has carried all of them."""
    link = link_of(Policy.EQUAL, chunkwise_fraction=0.5)
    began_s = played.monotonic()
    async with placed(link) as place:
        grant = await place.admitted()
        assert grant.rate_bytes_per_s == RATE / 2
        await carry(place)
    assert played.monotonic() - began_s >= LAYERS * PAYLOAD / grant.rate_bytes_per_s - 0.002


async def test_the_rate_and_the_epoch_are_known_before_the_first_turn() -> None:
    link = link_of()
    async with placed(link) as place:
        grant = await place.admitted()
        assert 0 < grant.rate_bytes_per_s <= RATE
        assert grant.epoch == 1


async def test_a_client_that_stops_reading_stops_using_the_link(played: PlayedTime) -> None:
    """No more than a bound goes to it, and the others get their turns."""
    link = link_of()
    async with placed(link, key="STOPPED") as stopped, placed(link) as place:
        await carry(place)
        for index in range(AHEAD_MAX):
            await stopped.wait_to_send(index)
        late = asyncio.create_task(stopped.wait_to_send(AHEAD_MAX))
        await played.passes(0.02)
        assert is_blocked(late)
        stopped.note_sent()
        await asyncio.wait_for(late, 60)


async def test_a_delivery_that_is_given_up_frees_its_place_at_once() -> None:
    link = link_of()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(placed(link))
        assert link.status().layerwise_active == 1
    assert link.status().layerwise_active == 0
    assert link.status().queued_bytes == 0


async def test_few_deliveries_gather_before_their_first_turn(played: PlayedTime) -> None:
    """The memory that payloads are gathered into is kept for those that may send."""
    link = Link(SchedulerSettings(link_bytes_per_s=1000.0, pool=PoolSettings(gather_s=0.0)), early_max=1)
    async with placed(link) as one:
        await asyncio.wait_for(one.wait_to_gather(0, is_staged=True), 60)
        async with placed(link) as two, placed(link) as three:
            waiting = [asyncio.create_task(place.wait_to_gather(0, is_staged=True)) for place in (two, three)]
            await asyncio.wait_for(two.wait_to_gather(0, is_staged=False), 60)
            await played.passes(0.01)
            assert all(map(is_blocked, waiting))
            one.end()
            await asyncio.wait_for(waiting[0], 60)
            assert is_blocked(waiting[1])
            two.end()
            await asyncio.wait_for(waiting[1], 60)
    assert link._early_left == 1


async def test_a_link_rate_that_is_changed_holds_for_what_is_under_way(played: PlayedTime) -> None:
    slow = SchedulerSettings(link_bytes_per_s=1000.0, pool=PoolSettings(gather_s=0.0))
    link = Link(slow, early_max=2)
    async with placed(link) as place:
        turn = asyncio.create_task(carry(place))
        await played.passes(0.01)
        assert is_blocked(turn)
        link.reconfigure(SchedulerSettings(link_bytes_per_s=RATE, pool=slow.pool))
        await asyncio.wait_for(turn, 60)


@pytest.mark.parametrize(
    "changed",
    [
        SchedulerSettings(),
        SchedulerSettings(link_bytes_per_s=RATE, pool=PoolSettings(Policy.EQUAL, gather_s=0.0)),
        SchedulerSettings(link_bytes_per_s=RATE, chunkwise_fraction=0.3),
    ],
    ids=["not limited", "another policy", "another fraction"],
)
@pytest.mark.parametrize("mode", list(Mode))
async def test_rules_that_are_changed_hold_for_what_is_under_way(
    changed: SchedulerSettings, mode: Mode, played: PlayedTime
) -> None:
    """Payloads that were dispatched stay so, and the rest goes by the new rules."""
    link = Link(SchedulerSettings(link_bytes_per_s=1000.0, pool=PoolSettings(gather_s=0.0)), early_max=2)
    async with placed(link, mode) as place:
        turn = asyncio.create_task(carry(place, LAYERS if mode is Mode.LAYER_MAJOR else 1))
        await played.passes(0.01)
        link.reconfigure(changed)
        await asyncio.wait_for(turn, 60)
    assert link.status().queued_bytes == 0


async def test_a_fault_of_the_scheduler_does_not_stop_deliveries(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is under way goes on unpaced, and the log says why."""
    link = link_of()
    async with placed(link) as place:
        monkeypatch.setattr(link._schedule.pool, "due", lambda now: 1 / 0)
        await asyncio.wait_for(carry(place), 60)
    assert "the scheduler failed" in caplog.text
    async with placed(link) as place:
        await asyncio.wait_for(carry(place), 60)


async def test_too_much_that_waits_is_refused_with_when_to_come_back() -> None:
    link = link_of(queued_bytes_max=LAYERS * PAYLOAD + 1)
    async with placed(link):
        with pytest.raises(ServerError) as refused:
            async with placed(link):
                pass
        assert refused.value.code is ErrorCode.SLOW_DOWN
        assert refused.value.retry_after_s == 1
    async with placed(link):
        assert link.status().queued_bytes > 0


def test_what_nothing_is_ahead_of_is_never_refused() -> None:
    """However large: it would be refused for ever."""
    assert refuse_backlog(0, 1 << 46, 1, 1.0) is None
    refused = refuse_backlog(1 << 46, 1, 1 << 20, 1e9)
    assert refused is not None
    assert refused.retry_after_s == RETRY_AFTER_S_MAX


async def test_the_offered_rate_is_a_share_by_weight_and_within_the_cap() -> None:
    """The share is that among those who are there, the one who asks included."""
    tenants = {"HEAVY": LinkTenant("HEAVY", weight=3.0), "CAPPED": LinkTenant("CAPPED", rate_max_bytes_per_s=1000.0)}
    link = link_of(tenants=tenants)
    assert link.offered_rate_bytes_per_s("HEAVY") == RATE
    assert link.offered_rate_bytes_per_s("CAPPED") == 1000.0
    async with placed(link, key="PLAIN"):
        assert link.offered_rate_bytes_per_s("HEAVY") == pytest.approx(RATE * 3 / 4)
        assert link.offered_rate_bytes_per_s("PLAIN") == pytest.approx(RATE / 2)


async def test_chunk_major_deliveries_beyond_the_channels_wait_and_all_end() -> None:
    link = link_of(chunkwise_deliveries_max=1)
    async with placed(link, Mode.CHUNK_MAJOR) as one, placed(link, Mode.CHUNK_MAJOR) as two:
        assert link.status().chunkwise_waiting == 1
        await asyncio.gather(carry(one, 1), carry(two, 1))
    assert link.status().chunkwise_waiting == 0


async def test_neither_side_of_the_link_starves_the_other() -> None:
    """Traffic of both orders without end: some of each comes through."""
    link = link_of(Policy.EQUAL, chunkwise_fraction=0.2)

    ended_count = 0

    async def chunk_major() -> None:
        nonlocal ended_count
        async with placed(link, Mode.CHUNK_MAJOR) as place:
            await carry(place, 1)
        ended_count += 1

    async def without_end() -> None:
        while True:
            await asyncio.gather(*(chunk_major() for _ in range(4)))

    stream = asyncio.create_task(without_end())
    carried_count = 0
    async with asyncio.timeout(60):
        while ended_count < 8 or carried_count < 3:
            async with placed(link) as place:
                await carry(place)
            carried_count += 1
    assert not stream.done()
    stream.cancel()


async def test_a_delivery_behind_its_turns_holds_one_payload_that_others_could_need(played: PlayedTime) -> None:
    """Dispatched payloads are gathered one by one while the transport is behind, unless there is memory to spare."""
    link = Link(SchedulerSettings(link_bytes_per_s=RATE, pool=PoolSettings(gather_s=0.0)), early_max=0)
    async with placed(link) as place:
        await place.wait_to_gather(0, is_staged=True)
        await place.wait_to_send(AHEAD_MAX - 1)
        behind = asyncio.create_task(place.wait_to_gather(1, is_staged=True))
        await played.passes(0.01)
        assert is_blocked(behind)
        place.note_sent()
        await asyncio.wait_for(behind, 60)


async def test_a_delivery_admitted_before_the_rules_change_knows_its_grant(played: PlayedTime) -> None:
    """All of it may have been dispatched before anybody looked."""
    link = link_of()
    async with placed(link) as place:
        while place.flow is not None and not place.flow.is_over:
            place._dispatched_count and place.note_sent()
            await played.passes(0.001)
        link.reconfigure(SchedulerSettings(link_bytes_per_s=RATE, pool=PoolSettings(Policy.EQUAL)))
        grant = await asyncio.wait_for(place.admitted(), 60)
        assert grant.epoch == 1


@pytest.mark.parametrize("call", ["join", "leave", "note_sent", "due", "wake_at"])
async def test_any_fault_of_the_scheduler_leaves_deliveries_going(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    link = link_of()
    async with placed(link) as place:
        monkeypatch.setattr(link._schedule, call, lambda *_: 1 / 0)
        if call == "join":
            async with placed(link) as other:
                await asyncio.wait_for(carry(other), 60)
        if call != "leave":
            await asyncio.wait_for(carry(place), 60)
    assert "the scheduler failed" in caplog.text
    assert not link._places
