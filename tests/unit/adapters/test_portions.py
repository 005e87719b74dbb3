"""Calls that come at once are made in order, a portion in each pass of the loop."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from objectcache.adapters import portions as portions_module
from objectcache.adapters.portions import PORTION, Portions
from tests.support.waiting import settled


async def test_a_pass_makes_a_portion_of_those_that_come_at_once() -> None:
    made = list[int]()
    portions = Portions()
    count = 3 * PORTION + 5
    for number in range(count):
        portions.add(partial(made.append, number))
    per_pass = [len(made)]
    while portions:
        await asyncio.sleep(0)
        per_pass.append(len(made))
    assert made == list(range(count))
    assert max(after - before for before, after in zip([0, *per_pass], per_pass, strict=False)) == PORTION


async def test_one_that_comes_alone_is_made_at_once() -> None:
    made = list[int]()
    portions = Portions()
    for number in range(3):
        portions.add(partial(made.append, number))
        assert made[-1] == number
        await asyncio.sleep(0)


async def test_calls_that_come_while_others_wait_come_after_them() -> None:
    made = list[int]()
    portions = Portions()
    for number in range(PORTION + 1):
        portions.add(partial(made.append, number))
    portions.add(partial(made.append, PORTION + 1))
    await settled()
    assert made == list(range(PORTION + 2))


async def test_a_pass_makes_fewer_of_those_that_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 64 calls looked at a thousand engines: one pass of the loop took 0.1 s, again and again."""
    now_s = made = 0

    def look() -> None:
        nonlocal now_s, made
        now_s += 1
        made += 1

    monkeypatch.setattr(portions_module, "PORTION_S", 2)
    monkeypatch.setattr(portions_module.time, "perf_counter", lambda: now_s)
    portions = Portions()
    for _ in range(10):
        portions.add(look)
    per_pass = [made]
    while portions:
        await asyncio.sleep(0)
        per_pass.append(made)
    assert per_pass == [2, 4, 6, 8, 10]
