"""Engines join and leave as the registry has them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, cast

import aiohttp
import pytest

from objectcache.orchestrator import fleet as fleet_module
from objectcache.orchestrator.fleet import Fleet
from objectcache.orchestrator.registry import Engines
from objectcache.orchestrator.rules.kv_events import KnownBatch
from objectcache.orchestrator.rules.policies import LeastTtft
from objectcache.orchestrator.rules.prefix_index import ENGINES_MAX, PrefixIndex
from objectcache.orchestrator.settings import EngineSettings, OrchestratorSettings
from objectcache.orchestrator.writing import Writing
from tests.support.waiting import LIMIT_S, settled


class MadeEngine(fleet_module.Engine):
    """An engine that is not watched."""

    made_count = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        MadeEngine.made_count += 1
        super().__init__(*arguments, **options)

    async def run(self) -> None:
        """Nobody is asked."""
        await asyncio.Event().wait()


def engines(count: int) -> Engines:
    return {f"e{at}": (EngineSettings(f"http://h:{at + 1}", f"e{at}"), False) for at in range(count)}


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    MadeEngine.made_count = 0
    monkeypatch.setattr(fleet_module, "Engine", MadeEngine)
    settings = OrchestratorSettings(admin_token="a-token-of-sixteen-letters")
    return Fleet(settings, cast(aiohttp.ClientSession, None), PrefixIndex(), LeastTtft(), None, None, {}, lambda: None)


async def followed(fleet: Fleet, count: int) -> None:
    while len(fleet.engines) != count:
        await settled()
    for _ in range(8):  # those behind the last one for which there is room
        await settled()


async def test_engines_for_which_there_is_no_room_are_not_tried_one_by_one(fleet: Fleet) -> None:
    """Each of three thousand was made and warned of at each change, which stopped the event loop for seconds."""
    fleet.follow(engines(3 * ENGINES_MAX))
    await followed(fleet, ENGINES_MAX)
    assert MadeEngine.made_count <= ENGINES_MAX + 1
    fleet.follow(engines(3 * ENGINES_MAX))
    await followed(fleet, ENGINES_MAX)
    assert MadeEngine.made_count <= ENGINES_MAX + 2
    fleet.follow({name: each for name, each in engines(3 * ENGINES_MAX).items() if name != "e0"})
    await followed(fleet, ENGINES_MAX)
    assert f"e{ENGINES_MAX}" in fleet.engines, "one that has left makes room"
    await fleet.stop()


class HungWriting:
    """The metadata on a disk that hangs."""

    def __init__(self) -> None:
        self.kept: list[set[str]] = []

    async def warm(self, _: str) -> dict[str, KnownBatch]:
        return {}

    async def flush(self) -> None:
        await asyncio.Event().wait()

    def forget_others(self, engines: Collection[str]) -> None:
        self.kept.append(set(engines))


async def test_engines_of_the_registry_come_and_go_while_the_disk_hangs(fleet: Fleet) -> None:
    fleet._writing = cast(Writing, HungWriting())
    fleet.follow(engines(2))
    await followed(fleet, 2)
    fleet.follow({"new": (EngineSettings("http://h:9", "new"), False)})
    async with asyncio.timeout(LIMIT_S):
        await followed(fleet, 1)
    assert set(fleet.engines) == {"new"}
    await fleet.stop()


@pytest.mark.parametrize("is_drained", [True, False])
async def test_nobody_waits_for_an_engine_that_drains_or_has_left(fleet: Fleet, is_drained: bool) -> None:
    """Requests that waited for it did so to the end of their time, while new ones were refused at once."""
    await fleet.register({"url": "http://h:1", "name": "a"})
    fleet.engines["a"].models = {"large": {}}
    waiting = [asyncio.ensure_future(fleet.waiting.comes(model, LIMIT_S)) for model in ("large", "other")]
    await settled()
    await (fleet.drain("a", is_wanted=True) if is_drained else fleet.remove("a"))
    assert await waiting[0]
    assert not waiting[1].done()
    waiting[1].cancel()
    await fleet.stop()


async def test_those_that_wait_are_told_of_the_engines_that_have_changed_only(fleet: Fleet) -> None:
    """A change of one entry told them a thousand times, once for each engine of the registry: while 2,000 waited and
    five entries changed each second, no request was answered.
    """
    told: list[int] = []
    fleet._on_up = lambda: told.append(1)
    fleet.follow(engines(9))
    await followed(fleet, 9)
    assert told == []
    fleet.follow({**engines(9), "e3": (EngineSettings("http://h:4", "e3"), True)})
    await followed(fleet, 9)
    assert told == [1]
    await fleet.drain("e3", is_wanted=True)
    assert told == [1]
    await fleet.stop()


async def test_only_the_latest_state_of_the_registry_is_followed(fleet: Fleet) -> None:
    for count in range(1, 200):
        fleet.follow(engines(count))
    fleet.follow(engines(3))
    await followed(fleet, 3)
    assert MadeEngine.made_count == 3
    await fleet.stop()


async def test_nothing_written_down_is_forgotten_before_the_registry_has_told_all_engines(fleet: Fleet) -> None:
    """It tells them some at a time: the blocks of the others are needed when they join."""
    written = HungWriting()
    fleet._writing, fleet._knows_all = cast(Writing, written), False
    fleet.follow(engines(2))
    await followed(fleet, 2)
    assert written.kept == []
    fleet.follow(engines(3))
    fleet.know_all()
    await followed(fleet, 3)
    assert written.kept == [{"e0", "e1", "e2"}]
    fleet.follow(engines(1))
    await followed(fleet, 1)
    assert written.kept[-1] == {"e0"}
    await fleet.stop()


async def test_an_error_that_nobody_knows_does_not_end_the_following_of_the_registry(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = fleet._begin
    monkeypatch.setattr(fleet, "_begin", lambda *_: 1 / 0)
    fleet.follow(engines(1))
    await settled()
    assert not fleet.engines
    monkeypatch.setattr(fleet, "_begin", begin)
    fleet.follow(engines(2))
    await followed(fleet, 2)
    await fleet.stop()
