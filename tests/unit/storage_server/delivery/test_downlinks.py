"""Servers keep to their share of a client's downlink, and to their own part where the keeper cannot be asked."""

from __future__ import annotations

import asyncio
import math

import pytest

from descriptors.cluster import Member
from descriptors.errors import ErrorCode, ServerError
from storage_server.agents.rules.agents import RegisteredAgent
from storage_server.delivery import downlinks as module
from storage_server.delivery.downlinks import ASK_S, BURST_S, Downlinks
from storage_server.delivery.scheduler.downlink_shares import RENEW_S, DownlinkShares
from storage_server.home import own_keys
from storage_server.home.own_keys import OwnKeys
from tests.support.waiting import settled, until
from tests.unit.played_time import PlayedTime
from tests.unit.storage_server.home.test_own_keys import PlayedMembership

RATE = 20e6
PAYLOAD_BYTES = 100_000
MEMBERS = tuple(Member(name, f"http://{name}:1") for name in "abcd")


@pytest.fixture(autouse=True)
async def played(monkeypatch: pytest.MonkeyPatch) -> PlayedTime:
    played = PlayedTime()
    for asking in (module, own_keys):
        monkeypatch.setattr(asking, "time", played)
    return played


class PlayedKeepers:
    """The other members: each answer is a share, or what is raised."""

    def __init__(self, *answers: float | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str, int]] = []

    async def downlink_share(
        self, member: Member, agent: RegisteredAgent, writer: str, left_bytes: int, whole_bytes: int
    ) -> float:
        self.asked.append((member.name, writer, left_bytes))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def member_a() -> OwnKeys:
    membership = PlayedMembership()
    own = OwnKeys(membership, "a", settle_s=1e6)
    membership.show(1, *MEMBERS)
    return own


def agent_kept_by(name: str, own: OwnKeys) -> RegisteredAgent:
    ids = (f"{number:032x}" for number in range(1000))
    agent_id = next(each for each in ids if (keeper := own.keeper_of_agent(each)) and keeper.name == name)
    return RegisteredAgent(agent_id, "key", "peer", (), 1e18, RATE)


async def sent(downlinks: Downlinks, agent: RegisteredAgent, nbytes: int, whole_bytes: int = 0) -> float:
    """The bytes/s at which one delivery goes, which is all of the request or a part of `whole_bytes`."""
    async with downlinks.pace(agent) as pace:
        pace.begin(nbytes, whole_bytes or nbytes)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for _ in range(nbytes // PAYLOAD_BYTES):
            await pace.wait(PAYLOAD_BYTES)
        await pace.wait(0)  # until the last payload is through
        took_s = loop.time() - began_s
        return nbytes / took_s if took_s else math.inf


def at_most(rate: float, nbytes: int) -> float:
    """With the burst that may go at once."""
    return rate * nbytes / (nbytes - rate * BURST_S)


async def test_alone_a_server_has_the_whole_downlink() -> None:
    downlinks = Downlinks(DownlinkShares(), None, None)
    agent = RegisteredAgent("id", "key", "peer", (), 1e18, RATE)
    assert await sent(downlinks, agent, 4_000_000) <= at_most(RATE, 4_000_000)
    assert downlinks.asked_count == 0
    await downlinks.close()


async def test_an_agent_without_a_downlink_is_not_paced() -> None:
    downlinks = Downlinks(DownlinkShares(), None, None)
    agent = RegisteredAgent("id", "key", "peer", (), 1e18)
    assert await sent(downlinks, agent, 10**11) == math.inf


async def test_deliveries_to_one_agent_share_its_downlink(played: PlayedTime) -> None:
    downlinks = Downlinks(DownlinkShares(), None, None)
    agent = RegisteredAgent("id", "key", "peer", (), 1e18, RATE)
    began_s = played.monotonic()
    await asyncio.gather(*(sent(downlinks, agent, 1_000_000) for _ in range(4)))
    assert 4_000_000 / (played.monotonic() - began_s) <= at_most(RATE, 4_000_000)
    await downlinks.close()


async def test_a_member_asks_the_keeper_of_the_agent_and_gives_its_share_back() -> None:
    own, keepers = member_a(), PlayedKeepers(RATE / 2)
    downlinks = Downlinks(DownlinkShares(), own, keepers)
    agent = agent_kept_by("c", own)
    assert await sent(downlinks, agent, 3_000_000) <= at_most(RATE / 2, 3_000_000)
    await settled()
    assert {(keeper, writer) for keeper, writer, _ in keepers.asked} == {("c", "a")}
    lefts = [left_bytes for _, _, left_bytes in keepers.asked]
    assert lefts == sorted(lefts, reverse=True)
    assert lefts[-1] == 0
    assert downlinks.asked_count == len(lefts)
    await own.close()


async def test_the_keeper_itself_asks_nobody(played: PlayedTime) -> None:
    own, shares = member_a(), DownlinkShares()
    downlinks = Downlinks(shares, own, PlayedKeepers(AssertionError()))
    agent = agent_kept_by("a", own)
    shares.share(agent.agent_id, RATE, "b", 3_000_000, 3_000_000, played.monotonic())
    async with downlinks.pace(agent) as pace:
        pace.begin(3_000_000, 3_000_000)
        await played.passes(RENEW_S / 2)
        assert len(shares) == 1
    await settled()
    assert downlinks.asked_count == 0
    assert shares.share(agent.agent_id, RATE, "b", 0, 0, played.monotonic()) == 0.0
    assert len(shares) == 0  # nothing is left of the share of a
    await own.close()


@pytest.mark.parametrize(
    "failure",
    [ConnectionResetError(), ServerError(ErrorCode.SLOW_DOWN, "stale", retryable=True), TimeoutError()],
)
async def test_where_the_keeper_cannot_be_asked_the_own_part_of_the_request_is_used(failure: Exception) -> None:
    own = member_a()
    downlinks = Downlinks(DownlinkShares(), own, PlayedKeepers(failure))
    agent = agent_kept_by("d", own)
    assert await sent(downlinks, agent, 1_000_000, 4_000_000) <= at_most(RATE / 4, 1_000_000)
    assert downlinks.failed_count >= 1
    await own.close()


async def test_a_keeper_that_hangs_does_not_stop_a_delivery() -> None:
    own = member_a()

    class Hanging(PlayedKeepers):
        async def downlink_share(self, *_: object) -> float:
            await asyncio.Event().wait()
            return 0.0

    downlinks = Downlinks(DownlinkShares(), own, Hanging(0.0))
    agent = agent_kept_by("b", own)
    async with asyncio.timeout(ASK_S + 20):
        await sent(downlinks, agent, 2_000_000)
    await downlinks.close()
    await own.close()


async def test_small_deliveries_one_after_the_other_are_paced_as_one_is(played: PlayedTime) -> None:
    """A downlink is remembered as long as it still carries what was sent."""
    downlinks = Downlinks(DownlinkShares(), None, None)
    agent = RegisteredAgent("id", "key", "peer", (), 1e18, RATE)
    began_s = played.monotonic()
    for _ in range(11):
        async with downlinks.pace(agent) as pace:
            pace.begin(400_000, 400_000)
            await pace.wait(400_000)
    assert 4_000_000 / (played.monotonic() - began_s) <= at_most(RATE, 4_000_000)
    await until(lambda: not downlinks._downlinks)
    await downlinks.close()


async def test_a_keeper_of_another_release_does_not_stop_a_delivery() -> None:
    own = member_a()
    downlinks = Downlinks(DownlinkShares(), own, PlayedKeepers(ValueError("no such answer")))
    async with asyncio.timeout(20):
        await sent(downlinks, agent_kept_by("b", own), 1_000_000)
    assert downlinks.failed_count >= 1
    await downlinks.close()
    await own.close()


@pytest.mark.slow
async def test_a_delivery_goes_on_whatever_small_share_it_gets() -> None:
    own = member_a()
    downlinks = Downlinks(DownlinkShares(), own, PlayedKeepers(0.001))
    async with asyncio.timeout(20):
        await sent(downlinks, agent_kept_by("b", own), 300_000)
    await downlinks.close()
    await own.close()
