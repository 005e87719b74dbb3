"""The connections of a gateway to the members of its cluster."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from descriptors.cluster import Member
from gateway.cluster import members as module
from gateway.cluster.members import Members
from gateway.storage_client import StorageUnreachableError
from tests.unit.played_time import PlayedTime
from tests.unit.storage_server.home.test_own_keys import PlayedMembership

CROWD = [Member(f"m{number}", f"http://m{number}:1") for number in range(20)]


class PlayedStorage:
    """Connections to a member, which can be closed."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.is_closed = False

    async def start(self) -> None: ...

    async def close(self) -> None:
        self.is_closed = True


async def test_views_that_change_fast_begin_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody who may write to etcd can change a member many times in a second."""
    monkeypatch.setattr(module, "CLOSE_AFTER_S", 0.0)
    membership = PlayedMembership()
    made: list[PlayedStorage] = []

    def make(endpoint: str) -> PlayedStorage:
        made.append(PlayedStorage(endpoint))
        return made[-1]

    members = Members(membership, make)  # type: ignore[arg-type]
    membership.show(1, *CROWD)
    for member in CROWD:
        await members.storage(member)
    before = len(asyncio.all_tasks())
    for number in range(2, 100):
        membership.show(number, replace(CROWD[0], weight=float(number)))
    assert len(asyncio.all_tasks()) - before == len(CROWD) - 1
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    assert [each.endpoint for each in made if not each.is_closed] == [CROWD[0].endpoint]
    membership.show(200, *CROWD)
    await members.storage(CROWD[3])
    assert len(made) == len(CROWD) + 1
    for number in range(201, 210):  # who is back before its time keeps its connections
        membership.show(number)
        membership.show(number, *CROWD)
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
    assert not made[-1].is_closed
    membership.show(300)
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    assert all(each.is_closed for each in made)


async def test_a_question_that_a_member_never_answers_ends_though_the_member_is_there() -> None:
    """Its disk may hang while its event loop goes on."""
    PlayedTime()
    membership, asked = PlayedMembership(), 0

    class Alive(PlayedStorage):
        def __init__(self, endpoint: str) -> None:
            super().__init__(endpoint)
            self.status = self

        async def transports(self, access_key: str) -> None:
            nonlocal asked
            asked += 1

    members = Members(membership, Alive)  # type: ignore[arg-type]
    membership.show(1, CROWD[0])

    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StorageUnreachableError):
        await members.watched(CROWD[0], never(), call_s_max=module.QUESTION_S_MAX)
    assert asked > 10
