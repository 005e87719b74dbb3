"""Requests wait for an engine, and are woken when there is nothing to wait for any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from aiohttp import web

from objectcache.adapters import loop_share
from objectcache.adapters.loop_share import LoopShare
from objectcache.orchestrator.answering import Answering
from objectcache.orchestrator.exchange import Exchange
from objectcache.orchestrator.rules.admission import Tenant
from objectcache.orchestrator.rules.openai_requests import RequestKind
from objectcache.orchestrator.service import Orchestrator
from objectcache.orchestrator.waiting_for_engines import WaitingForEngines
from tests.support.waiting import LIMIT_S, settled


class Looks:
    """Says of each model whether an engine may come, and counts how often that was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.over: set[str] = set()

    def may_come(self, model: str) -> bool:
        self.asked.append(model)
        return model not in self.over


async def test_a_change_has_one_look_at_each_model_however_many_wait_for_it() -> None:
    """Each that waited looked at a thousand engines, a thousand times for each change: nobody had an answer."""
    looks = Looks()
    waiting = WaitingForEngines(looks.may_come)
    coming = [asyncio.ensure_future(waiting.comes(model, LIMIT_S)) for model in ["a"] * 500 + ["b"]]
    await settled()
    for _ in range(1000):
        waiting.wake(lambda model: model == "a")
    await settled()
    assert 0 < looks.asked.count("a") == len(looks.asked) <= 1000
    assert not any(each.done() for each in coming)
    looks.over.add("a")
    waiting.wake(lambda _: True)
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(*coming[:-1]) == [True] * 500
    assert not coming[-1].done()
    coming[-1].cancel()


async def test_a_change_amid_a_look_has_a_look_of_its_own() -> None:
    looks = Looks()
    waiting = WaitingForEngines(looks.may_come)
    coming = asyncio.ensure_future(waiting.comes("a", LIMIT_S))
    await settled()
    waiting.wake(lambda _: True)
    looks.over.add("a")
    waiting.wake(lambda _: True)
    async with asyncio.timeout(LIMIT_S):
        assert await coming


@pytest.fixture
def spend(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock of turns on."""
    now_s = 0.0

    def spent(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(loop_share.time, "perf_counter", lambda: now_s)
    return spent


async def test_requests_that_come_at_once_look_at_all_engines_in_turns(spend: Callable[[float], None]) -> None:
    """A look takes a millisecond where there are a thousand engines: two thousand requests stopped the loop for 3 s."""
    passes, looked_in = 0, list[int]()

    def may_come(_: str) -> bool:
        spend(loop_share.TURN_S)
        looked_in.append(passes)
        return False

    roster = SimpleNamespace(may_come=may_come)
    parts = cast(Orchestrator, SimpleNamespace(deciding=LoopShare(), roster=roster))
    answering = Answering(parts, cast(web.BaseRequest, None), RequestKind.CHAT)
    asked = SimpleNamespace(asked=SimpleNamespace(model="a"), body=SimpleNamespace(caller="c"))
    comings = [answering._engine_comes(cast(Exchange, asked), Tenant(""), 0.0) for _ in range(20)]
    coming = asyncio.gather(*comings)
    while not coming.done():
        passes += 1
        await asyncio.sleep(0)
    assert len(looked_in) == 20
    assert max(looked_in.count(each) for each in looked_in) <= 2
