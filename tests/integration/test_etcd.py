"""Membership in a real etcd: joining, leaving, dying, and etcd itself failing."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from adapters.etcd import CompactedError, Etcd, EtcdError
from adapters.etcd_membership import EtcdMembership
from adapters.membership import MembershipError
from descriptors.cluster import Member, View
from tests.support.etcd import EtcdServer, etcd_server

pytestmark = pytest.mark.needs_server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd that no test harms; each test has a prefix of its own."""
    with etcd_server(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EtcdServer]:
    with etcd_server(tmp_path / "etcd") as server:
        yield server


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"kv/{request.node.name}"


def member(name: str, **options: Any) -> Member:
    return Member(name, f"http://{name}:9100", **options)


@asynccontextmanager
async def joined(
    server: EtcdServer, prefix: str, own: Member | None = None, **options: Any
) -> AsyncIterator[EtcdMembership]:
    membership = EtcdMembership(Etcd([server.url], call_s=1.0), prefix, **{"lease_s": 2, **options})
    if own is not None:
        membership.announce(own)
    await membership.start()
    try:
        yield membership
    finally:
        await membership.close()


async def until(is_so: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_so():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)


def names(view: View) -> list[str]:
    return [each.name for each in view.members]


async def test_members_that_join_and_leave_are_seen_by_all(shared: EtcdServer, prefix: str) -> None:
    seen: list[list[str]] = []
    async with joined(shared, prefix) as watching:
        watching.on_view(lambda view: seen.append(names(view)))
        async with joined(shared, prefix, member("a")) as first:
            await until(lambda: names(watching.view) == ["a"])
            async with joined(shared, prefix, member("b", weight=2.0)):
                await until(lambda: names(watching.view) == names(first.view) == ["a", "b"])
                assert watching.view.cluster_id == first.view.cluster_id
                assert watching.view.member("b") == member("b", weight=2.0)
            await until(lambda: names(watching.view) == ["a"])
        await until(lambda: names(watching.view) == [])
    assert seen == [["a"], ["a", "b"], ["a"], []]


async def test_a_view_has_the_number_of_the_change_that_made_it(shared: EtcdServer, prefix: str) -> None:
    async with joined(shared, prefix) as watching, joined(shared, prefix, member("a")) as first:
        await until(lambda: names(watching.view) == ["a"])
        changed = watching.changed_at
        assert watching.view.number >= changed > 0
        assert first.view.number > 0
        await first.drain()
        await until(lambda: watching.changed_at > changed)
        assert watching.view.members[0].is_draining
        assert names(View("kv", 1, watching.view.placed)) == ["a"]
        before, changed = watching.view, watching.changed_at
        await watching.refresh()
        assert watching.view.number >= before.number
        assert watching.changed_at == changed


async def test_a_member_that_dies_leaves_when_its_lease_ends(shared: EtcdServer, prefix: str) -> None:
    async with joined(shared, prefix) as watching:
        dying = EtcdMembership(Etcd([shared.url]), prefix, lease_s=2)
        dying.announce(member("a"))
        await dying.start()
        await until(lambda: names(watching.view) == ["a"])
        await dying.abandon()
        await asyncio.sleep(1.0)
        assert names(watching.view) == ["a"]
        await until(lambda: names(watching.view) == [])
        assert not dying.holds_lease


async def test_a_server_that_comes_again_takes_its_own_entry_and_nobody_elses(shared: EtcdServer, prefix: str) -> None:
    first = EtcdMembership(Etcd([shared.url]), prefix, lease_s=60)
    first.announce(member("a"))
    await first.start()
    async with joined(shared, prefix, member("a")) as again:
        assert again.holds_lease
        assert names(again.view) == ["a"]
        with pytest.raises(MembershipError, match="another server is the member a"):
            async with joined(shared, prefix, Member("a", "http://elsewhere:1")):
                pass
    await first.close()


async def test_entries_that_are_no_members_are_passed_over(shared: EtcdServer, prefix: str) -> None:
    etcd = Etcd([shared.url])
    await etcd.start()
    await etcd.put(f"{prefix}/members/broken", b"{")
    await etcd.put(f"{prefix}/members/other", json.dumps({"name": "b", "endpoint": "http://b:1"}).encode())
    await etcd.put(f"{prefix}/members/number", b"7")
    async with joined(shared, prefix, member("a")) as membership:
        assert names(membership.view) == ["a"]
        await etcd.put(f"{prefix}/members/later", b"[]")
        await etcd.put(f"{prefix}/members/c", json.dumps({"name": "c", "endpoint": "http://c:1"}).encode())
        await until(lambda: names(membership.view) == ["a", "c"])
    await etcd.close()


async def test_the_last_view_stays_while_etcd_hangs_or_is_gone(own_server: EtcdServer) -> None:
    async with joined(own_server, "kv", member("a"), lease_s=2) as own, joined(own_server, "kv") as watching:
        await until(lambda: names(watching.view) == ["a"])
        own_server.send(signal.SIGSTOP)
        await until(lambda: not own.is_connected and not own.holds_lease)
        assert names(own.view) == names(watching.view) == ["a"]
        own_server.send(signal.SIGCONT)
        await until(lambda: own.is_connected and own.holds_lease)
        own_server.kill()
        await until(lambda: not own.is_connected)
        assert names(watching.view) == ["a"]
        own_server.start()
        await until(lambda: own.is_connected and own.holds_lease)
        async with joined(own_server, "kv", member("b")):
            await until(lambda: names(watching.view) == names(own.view) == ["a", "b"], 30)


async def test_a_rebuilt_etcd_is_not_taken_for_the_cluster(own_server: EtcdServer, tmp_path: Path) -> None:
    learned: list[str] = []
    async with joined(own_server, "kv", member("a"), learned_id=learned.append) as own:
        own_server.kill()
        own_server.directory = tmp_path / "rebuilt"
        own_server.start()
        await asyncio.sleep(3)
        assert names(own.view) == ["a"]
        assert own.view.cluster_id == learned[0]
    with pytest.raises(MembershipError, match="cluster adopt"):
        async with joined(own_server, "kv", member("a"), known_id=learned[0]):
            pass
    async with joined(own_server, "kv", member("a")) as adopted:
        assert adopted.view.cluster_id != learned[0]


async def test_another_endpoint_is_asked_where_one_is_gone(shared: EtcdServer) -> None:
    etcd = Etcd(["http://127.0.0.1:1", shared.url])
    await etcd.start()
    await etcd.put("spare/key", b"value")
    found = await etcd.range("spare/")
    assert [(entry.key, entry.value) for entry in found.entries] == [("spare/key", b"value")]
    assert await etcd.create("spare/key", b"other") == found.entries[0]
    assert not await etcd.replace(found.entries[0].__class__("spare/key", b"", 1), b"other")
    assert await etcd.replace(found.entries[0], b"")
    assert (await etcd.range("spare/")).entries[0].value == b""
    assert await etcd.delete("spare/key")
    assert not await etcd.delete("spare/key")
    await etcd.close()
    nobody = Etcd(["http://127.0.0.1:1"])
    await nobody.start()
    with pytest.raises(EtcdError, match=r"127\.0\.0\.1:1"):
        await nobody.range("spare/")
    await nobody.close()


async def test_a_watch_from_a_revision_that_is_gone_says_so(shared: EtcdServer) -> None:
    etcd = Etcd([shared.url])
    await etcd.start()
    for _ in range(3):
        await etcd.put("gone/key", b"x")
    revision = (await etcd.range("gone/")).revision
    await etcd.call("kv/compaction", {"revision": str(revision)})
    with pytest.raises(CompactedError):
        async for _ in etcd.watch("gone/", 1):
            pass
    await etcd.close()


async def test_long_lines_of_a_watch_come_whole(shared: EtcdServer) -> None:
    etcd = Etcd([shared.url])
    await etcd.start()
    revision = (await etcd.range("long/")).revision
    value = b"x" * 700_000
    await etcd.put("long/key", value)
    async with asyncio.timeout(10):
        async for changes in etcd.watch("long/", revision + 1):
            assert [(change.key, change.value) for change in changes] == [("long/key", value)]
            break
    await etcd.close()
