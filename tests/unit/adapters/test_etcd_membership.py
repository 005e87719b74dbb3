"""Membership in an etcd whose answers are played: what is taken of them, and when nothing is any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from descriptors.cluster import MEMBERS_MAX, Member, member_fields
from objectcache.adapters.etcd import EtcdChange, EtcdEntry, EtcdError, EtcdRange, ManyValuesError, parsed_answer
from objectcache.adapters.etcd_membership import EtcdMembership
from tests.support.waiting import settled
from tests.unit.played_time import PlayedTime

PREFIX = "kv/members/"


def value(name: str) -> bytes:
    return json.dumps(member_fields(Member(name, f"http://{name}:1"))).encode()


def found(revision: int, *names: str) -> EtcdRange:
    return EtcdRange(7, revision, tuple(EtcdEntry(f"{PREFIX}{name}", value(name), revision) for name in names))


def joins(revision: int, name: str) -> EtcdChange:
    return EtcdChange(f"{PREFIX}{name}", value(name), revision)


class PlayedEtcd:
    """Answers ranges in order, the last one again and again; a watch tells what the test puts into `changes`."""

    def __init__(self, *ranges: EtcdRange) -> None:
        self.ranges = list(ranges)
        self.changes: asyncio.Queue[list[EtcdChange] | None] = asyncio.Queue()
        self.refusal = EtcdError("the watch ended")
        """The error with which a watch ends."""
        self.watched_from: list[int] = []
        self.range_count = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def create(self, key: str, value: bytes, lease: int = 0) -> None: ...

    async def range(self, prefix: str) -> EtcdRange:
        self.range_count += 1
        answer = self.ranges.pop(0) if len(self.ranges) > 1 else self.ranges[0]
        await self.may_answer.wait()
        return answer

    async def watch(self, prefix: str, revision: int, cluster_id: int = 0) -> AsyncIterator[list[EtcdChange]]:
        self.watched_from.append(revision)
        while (changes := await self.changes.get()) is not None:
            yield changes
        raise self.refusal


async def joined(etcd: PlayedEtcd) -> EtcdMembership:
    PlayedTime()
    membership = EtcdMembership(etcd, "kv")  # type: ignore[arg-type]
    await membership.start()
    return membership


async def told(etcd: PlayedEtcd, changes: list[EtcdChange] | None) -> None:
    etcd.changes.put_nowait(changes)
    await PlayedTime.passes(5.0)  # a watch that has ended begins again after a pause


def names(membership: EtcdMembership) -> str:
    return "".join(member.name for member in membership.view.members)


async def test_an_etcd_that_has_gone_back_is_not_followed_when_it_has_caught_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two members must not have two views of one number."""
    etcd = PlayedEtcd(found(6, "a", "b"), found(4, "a"))
    membership = await joined(etcd)
    await told(etcd, None)
    assert caplog.text.count("etcd has gone back from the revision 6 to 4") == 1
    await told(etcd, [joins(7, "c")])
    etcd.ranges = [found(9, "a", "c", "d")]
    await membership.refresh()
    assert (names(membership), membership.view.number) == ("ab", 6)
    await membership.close()


async def test_what_a_read_has_shown_counts_as_known_too(caplog: pytest.LogCaptureFixture) -> None:
    """Others use the same etcd, so revisions grow without changes of members."""
    etcd = PlayedEtcd(found(4, "a"), found(15, "a"), found(5, "a"))
    membership = await joined(etcd)
    await membership.refresh()
    assert membership.view.number == 15
    await membership.refresh()
    assert "etcd has gone back from the revision 15 to 5" in caplog.text
    await told(etcd, [joins(20, "b")])
    assert names(membership) == "a"
    await membership.close()


async def test_an_answer_that_comes_late_is_no_step_back(caplog: pytest.LogCaptureFixture) -> None:
    etcd = PlayedEtcd(found(3, "a"), found(3, "a"))
    membership = await joined(etcd)
    etcd.may_answer.clear()
    refreshing = asyncio.ensure_future(membership.refresh())
    await settled()  # it has asked by now
    await told(etcd, [joins(4, "b")])
    etcd.may_answer.set()
    await refreshing
    assert "gone back" not in caplog.text
    assert (names(membership), membership.view.number) == ("ab", 4)
    await told(etcd, [joins(5, "c")])
    assert names(membership) == "abc"
    await membership.close()


async def test_more_members_than_a_cluster_has_change_nothing_until_they_are_fewer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Anybody who may write to etcd can put entries there. The view and the members behind it stay one."""
    crowd = [f"m{number}" for number in range(MEMBERS_MAX)]
    etcd = PlayedEtcd(found(3, "a"), found(MEMBERS_MAX + 5, "a", *crowd))
    membership = await joined(etcd)
    await told(etcd, [joins(4 + at, name) for at, name in enumerate(crowd)])
    assert (names(membership), membership.view.number) == ("a", 3)
    assert f"a cluster has at most {MEMBERS_MAX} members" in caplog.text
    await membership.refresh()
    assert names(membership) == "a"
    assert not membership.is_connected
    etcd.ranges = [found(MEMBERS_MAX + 9, "a", "b")]
    await PlayedTime.passes(30.0)
    assert names(membership) == "ab"
    await told(etcd, [joins(MEMBERS_MAX + 10, "c")])
    assert (names(membership), membership.is_connected) == ("abc", True)
    await membership.close()


async def test_many_that_look_for_a_later_view_share_what_etcd_is_asked() -> None:
    """A member that refuses each call as stale would queue all calls of a gateway, one answer of etcd after another."""
    etcd = PlayedEtcd(found(3, "a"))
    membership = await joined(etcd)
    etcd.may_answer.clear()
    asked = etcd.range_count
    refreshing = [asyncio.ensure_future(membership.refresh()) for _ in range(100)]
    await settled()
    refreshing += [asyncio.ensure_future(membership.refresh()) for _ in range(100)]
    await settled()
    etcd.may_answer.set()
    await asyncio.gather(*refreshing)
    assert etcd.range_count == asked + 2
    await membership.close()


async def test_an_entry_below_a_member_is_none_whether_it_was_read_or_watched() -> None:
    """Two servers must not have two views of one number."""
    nested = EtcdEntry(f"{PREFIX}x/b", value("b"), 2)
    read = EtcdRange(7, 3, (*found(3, "a").entries, nested))
    etcd = PlayedEtcd(read)
    membership = await joined(etcd)
    assert names(membership) == "a"
    await told(etcd, [EtcdChange(f"{PREFIX}x/c", value("c"), 4)])
    assert names(membership) == "a"
    await membership.close()


async def test_changes_that_are_too_many_to_be_told_are_read() -> None:
    """A watch from the same revision would be told them again, and refuse them again, for ever."""
    etcd = PlayedEtcd(found(3, "a"), found(9, "a", "b"))
    membership = await joined(etcd)
    changed = membership.changed_at
    etcd.refusal = ManyValuesError("played")
    await told(etcd, None)
    assert (names(membership), membership.changed_at) == ("ab", 9)
    assert membership.changed_at > changed
    await told(etcd, [joins(10, "c")])
    assert names(membership) == "abc"
    assert etcd.watched_from == [4, 10]
    await membership.close()


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b'{"kvs":[' + b"{}," * 10_000 + b"{}]}", b"[" * 10_000, b"[]", b'{"a": "\xff"}'],
    ids=["deep", "many", "less deep", "a list", "no UTF-8"],
)
def test_an_answer_of_any_form_is_refused_before_it_costs_much(text: bytes) -> None:
    with pytest.raises((EtcdError, json.JSONDecodeError)):
        parsed_answer(text)
