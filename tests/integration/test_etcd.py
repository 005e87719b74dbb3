"""Membership in a real etcd: joining, leaving, dying, and etcd itself failing."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from descriptors.cluster import Member, View
from objectcache.adapters.etcd import CompactedError, Etcd, EtcdChange, EtcdError, EtcdRange
from objectcache.adapters.etcd_membership import EtcdMembership
from objectcache.adapters.membership import MembershipError
from tests.support.certificates import certificate
from tests.support.etcd import EtcdServer, etcd_nodes, etcd_server, require_program
from tests.support.waiting import eventually, until

pytestmark = pytest.mark.needs_server
CALL_S = 30.0


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
    async with joined_by(Etcd([server.url], call_s=CALL_S), prefix, own, **options) as membership:
        yield membership


@asynccontextmanager
async def joined_by(
    etcd: Etcd, prefix: str, own: Member | None = None, **options: Any
) -> AsyncIterator[EtcdMembership]:
    """Its lease outlasts a test, unless the test is about what happens without renewals."""
    membership = EtcdMembership(etcd, prefix, **{"lease_s": 60, **options})
    if own is not None:
        membership.announce(own)
    await membership.start()
    try:
        yield membership
    finally:
        await membership.close()


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


@pytest.mark.slow
async def test_a_member_that_dies_leaves_when_its_lease_ends(shared: EtcdServer, prefix: str) -> None:
    async with joined(shared, prefix) as watching:
        dying = EtcdMembership(Etcd([shared.url]), prefix, lease_s=2)
        dying.announce(member("a"))
        await dying.start()
        await until(lambda: names(watching.view) == ["a"])
        abandoned_s = time.monotonic()
        await dying.abandon()
        await until(lambda: names(watching.view) == [])
        assert time.monotonic() - abandoned_s > 1  # a lease of 2 s is renewed every 0.5 s, and nobody ends it
        assert not dying.holds_lease


@pytest.mark.slow
async def test_a_busy_event_loop_does_not_end_a_lease(shared: EtcdServer, prefix: str) -> None:
    async with joined(shared, prefix, member("a"), lease_s=4) as own:
        time.sleep(5)  # noqa: ASYNC251 - nothing else runs on the loop for longer than the lease
        assert own.holds_lease
        assert own.registration_count == 1


class SilentWatch(Etcd):
    """An etcd whose watches tell nothing, and do not end, as those of a node that has lost the others do. With
    `reads_fail` renewals of leases get through, and readings do not.
    """

    reads_fail = False

    async def watch(self, prefix: str, revision: int, cluster_id: int = 0) -> AsyncIterator[list[EtcdChange]]:
        await asyncio.Event().wait()
        yield []

    async def range(self, prefix: str) -> EtcdRange:
        if SilentWatch.reads_fail:
            raise EtcdError("played")
        return await super().range(prefix)

    async def latest(self, prefix: str, before: EtcdRange) -> EtcdRange:
        if SilentWatch.reads_fail:
            raise EtcdError("played")
        return await super().latest(prefix, before)

    def copy(self, call_s_max: float) -> Etcd:
        return SilentWatch(self._endpoints, call_s=call_s_max)


@pytest.mark.slow
async def test_a_member_whose_watch_is_silent_learns_a_change_with_its_next_renewal(
    shared: EtcdServer, prefix: str
) -> None:
    """Otherwise it would change objects as their keeper when another one trusts its copies already."""
    silent = SilentWatch([shared.url], call_s=CALL_S)
    async with joined_by(silent, prefix, member("a"), lease_s=2) as own:
        async with joined(shared, prefix, member("b")):
            await until(lambda: names(own.view) == ["a", "b"])
            changed = own.changed_at
            other = Etcd([shared.url], call_s=CALL_S)
            await other.start()
            (entry,) = (await other.range(f"{prefix}/members/b")).entries
            await other.put(entry.key, entry.value, entry.lease)
            await other.close()
            await until(lambda: own.changed_at > changed)  # it may have been another one between
        await until(lambda: names(own.view) == ["a"])
        assert own.holds_lease


@pytest.mark.slow
async def test_a_member_that_cannot_learn_whether_its_view_is_the_latest_does_not_hold_its_lease(
    shared: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined_by(SilentWatch([shared.url], call_s=CALL_S), prefix, member("a"), lease_s=2) as own:
        assert own.holds_lease
        monkeypatch.setattr(SilentWatch, "reads_fail", True)
        await until(lambda: not own.holds_lease)
        assert own.registration_count == 1
        monkeypatch.setattr(SilentWatch, "reads_fail", False)
        await until(lambda: own.holds_lease)


async def test_a_reading_costs_no_entries_while_nothing_has_changed(shared: EtcdServer, prefix: str) -> None:
    etcd = Etcd([shared.url], call_s=CALL_S)
    await etcd.start()
    await etcd.put(f"{prefix}/x", b"1")
    await etcd.put(f"{prefix}/y", b"1")
    first = await etcd.range(f"{prefix}/")
    await etcd.put("elsewhere", b"")
    again = await etcd.latest(f"{prefix}/", first)
    assert again.entries is first.entries
    assert again.revision > first.revision
    await etcd.delete(f"{prefix}/y")
    fewer = await etcd.latest(f"{prefix}/", again)
    assert [entry.key for entry in fewer.entries] == [f"{prefix}/x"]
    await etcd.put(f"{prefix}/z", b"1")
    await etcd.delete(f"{prefix}/x")
    other = await etcd.latest(f"{prefix}/", fewer)
    assert [entry.key for entry in other.entries] == [f"{prefix}/z"]
    await etcd.close()


async def test_entries_that_are_too_long_keep_no_other_from_being_read(shared: EtcdServer, prefix: str) -> None:
    """Entries of 8 MB made a page too long, so that no server could start, or read anything anew."""
    etcd = Etcd([shared.url], call_s=CALL_S)
    await etcd.start()
    names = [f"{prefix}/{number:03d}" for number in range(20)]
    for at, name in enumerate(names):
        await etcd.put(name, b"x" * (1 << 19) if at < 14 else b"short")
    found = await etcd.range(f"{prefix}/")
    assert [entry.key for entry in found.entries] == names
    assert [entry.value for entry in found.entries] == [b"" if at < 14 else b"short" for at in range(20)]
    with pytest.raises(EtcdError, match="more than 19 entries"):
        await etcd.range(f"{prefix}/", 19)
    await etcd.close()


async def test_an_entry_that_somebody_deletes_comes_back(
    shared: EtcdServer, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lease is renewed, so nothing else would make it again while the server runs."""
    async with joined(shared, prefix, member("a")) as own, joined(shared, prefix) as watching:
        etcd = Etcd([shared.url], call_s=CALL_S)
        await etcd.start()
        assert await etcd.delete(f"{prefix}/members/a")
        await etcd.close()
        await until(lambda: own.registration_count == 2 and names(watching.view) == ["a"])
        assert "it registers again" in caplog.text


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


@pytest.mark.parametrize("value", [b"[" * 100_000, b"x" * 10_000, b"\xff", b"7"], ids=["deep", "long", "binary", "7"])
async def test_an_own_entry_that_makes_no_sense_is_said_at_the_start(
    shared: EtcdServer, prefix: str, value: bytes
) -> None:
    etcd = Etcd([shared.url])
    await etcd.start()
    await etcd.put(f"{prefix}/members/a", value)
    await etcd.close()
    with pytest.raises(MembershipError, match="another server is the member a"):
        async with joined(shared, prefix, member("a")):
            pass


@pytest.mark.parametrize("value", [b"x" * 65, b"", b"a b", b"\xff"], ids=["long", "empty", "a blank", "binary"])
async def test_a_cluster_id_that_makes_no_sense_is_not_remembered(
    shared: EtcdServer, prefix: str, value: bytes
) -> None:
    """Written down, it would keep the server from every later start."""
    etcd = Etcd([shared.url])
    await etcd.start()
    await etcd.put(f"{prefix}/cluster", value)
    await etcd.close()
    learned: list[str] = []
    with pytest.raises(MembershipError, match="the id in"):
        async with joined(shared, prefix, member("a"), learned_id=learned.append):
            pass
    assert not learned


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


@pytest.mark.slow
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
            await until(lambda: names(watching.view) == names(own.view) == ["a", "b"])


@pytest.mark.slow
async def test_a_rebuilt_etcd_is_not_taken_for_the_cluster(
    own_server: EtcdServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learned: list[str] = []
    async with joined(own_server, "kv", member("a"), lease_s=2, learned_id=learned.append) as own:
        own_server.kill()
        own_server.directory = tmp_path / "rebuilt"
        own_server.start()
        await until(lambda: "etcd has gone back" in caplog.text and own.registration_count == 2)
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


async def test_a_long_range_comes_in_pages_of_one_revision(shared: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An orchestrator could not start any more, once there were 2,049 pins."""
    monkeypatch.setattr("objectcache.adapters.etcd.ENTRIES_MAX", 2)
    etcd = Etcd([shared.url])
    await etcd.start()
    names = [f"pages/{at}" for at in range(7)]
    for name in names:
        await etcd.put(name, b"x")
    found = await etcd.range("pages/", 7)
    assert [entry.key for entry in found.entries] == names
    assert found.revision == max(entry.revision for entry in found.entries)
    for most in (2, 5, 6):
        with pytest.raises(EtcdError, match=f"more than {most}"):
            await etcd.range("pages/", most)
    await etcd.close()


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
    async with asyncio.timeout(60):
        async for changes in etcd.watch("long/", revision + 1):
            assert [(change.key, change.value) for change in changes] == [("long/key", value)]
            break
    await etcd.close()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EtcdServer]]:
    with etcd_nodes(tmp_path_factory.mktemp("nodes")) as running:
        yield running


async def leader_of(running: list[EtcdServer]) -> EtcdServer:
    """The node that leads the others, once they have agreed."""
    async with asyncio.timeout(60):
        while True:
            for node in running:
                etcd = Etcd([node.url], call_s=30.0)
                await etcd.start()
                try:
                    status = await etcd.call("maintenance/status", {})
                except EtcdError:  # a machine that stands still makes a connection look late
                    continue
                finally:
                    await etcd.close()
                if status.get("leader") == status["header"]["member_id"]:
                    return node


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "stop"])
async def test_members_keep_their_leases_and_see_changes_when_the_leader_of_three_goes(
    nodes: list[EtcdServer], prefix: str, fault: str
) -> None:
    """A majority is there all along. The members ask the leader first, so that they must go elsewhere."""
    leader = await leader_of(nodes)
    urls = [leader.url, *(node.url for node in nodes if node is not leader)]

    def etcd() -> Etcd:
        return Etcd(urls, call_s=3.0, watch_s=5.0)

    async with joined_by(etcd(), prefix, member("a"), lease_s=10) as own, joined_by(etcd(), prefix) as watching:
        await until(lambda: names(watching.view) == ["a"])
        try:
            if fault == "kill":
                leader.kill()
            else:
                leader.send(signal.SIGSTOP)
            async with joined_by(etcd(), prefix, member("b"), lease_s=10):
                await until(lambda: names(watching.view) == names(own.view) == ["a", "b"])
                await asyncio.sleep(3)  # longer than renewals are apart: the next one comes without the leader
                assert own.holds_lease
                assert own.registration_count == 1
            await until(lambda: names(watching.view) == ["a"])
        finally:
            if fault == "kill":
                leader.start()
            else:
                leader.send(signal.SIGCONT)
            assert await asyncio.to_thread(eventually, lambda: all(node.is_ready() for node in nodes))


@pytest.mark.slow
async def test_without_a_majority_the_last_view_stays(nodes: list[EtcdServer], prefix: str) -> None:
    urls = [node.url for node in nodes]
    async with joined_by(Etcd(urls, call_s=10.0), prefix, member("a"), lease_s=2) as own:
        try:
            for node in nodes[1:]:
                node.kill()
            await until(lambda: not own.is_connected and not own.holds_lease)
            assert names(own.view) == ["a"]
        finally:
            for node in nodes[1:]:
                node.spawn()
            assert await asyncio.to_thread(eventually, lambda: all(node.is_ready() for node in nodes))
        await until(lambda: own.is_connected and own.holds_lease)


@pytest.mark.slow
async def test_over_tls_only_an_etcd_with_a_trusted_certificate_is_spoken_to(tmp_path: Path) -> None:
    made, other = certificate(tmp_path, "etcd", "127.0.0.1"), certificate(tmp_path, "other", "127.0.0.1")
    with etcd_server(tmp_path / "data", made) as server:
        trusted = Etcd([server.url], tls=ssl.create_default_context(cafile=made[0]))
        async with joined_by(trusted, "kv", member("a"), lease_s=2) as own:
            await until(lambda: names(own.view) == ["a"])
            await asyncio.sleep(3)  # longer than a lease that is not renewed
            await until(lambda: own.holds_lease)
        for tls in (ssl.create_default_context(cafile=other[0]), None):
            with pytest.raises(MembershipError, match="ertificate"):
                async with joined_by(Etcd([server.url], tls=tls), "kv"):
                    pass


@pytest.mark.slow
async def test_members_with_a_password_go_on_when_accounts_change_and_etcd_forgets_tokens(
    own_server: EtcdServer,
) -> None:
    admin = Etcd([own_server.url])
    await admin.start()
    await admin.call("auth/user/add", {"name": "root", "password": "r"})
    await admin.call("auth/user/add", {"name": "kv", "password": "p"})
    await admin.call("auth/role/add", {"name": "members"})
    allowed = {"permType": "READWRITE", "key": b64("kv/"), "range_end": b64("kv0")}
    await admin.call("auth/role/grant", {"name": "members", "perm": allowed})
    await admin.call("auth/user/grant", {"user": "kv", "role": "members"})
    await admin.call("auth/user/grant", {"user": "root", "role": "root"})
    await admin.call("auth/enable", {})
    await admin.close()

    def etcd(name: str = "kv", password: str = "p") -> Etcd:
        return Etcd([own_server.url], (name, password), call_s=CALL_S)

    async with joined_by(etcd(), "kv", member("a"), lease_s=2) as own, joined_by(etcd(), "kv") as watching:
        await until(lambda: names(watching.view) == ["a"])
        root = etcd("root", "r")
        await root.start()
        await root.call("auth/user/add", {"name": "more", "password": "m"})
        await root.close()
        await asyncio.sleep(3)  # longer than a lease that is not renewed
        await until(lambda: own.holds_lease)
        own_server.kill()
        own_server.start()
        await until(lambda: own.is_connected and own.holds_lease)
        async with joined_by(etcd(), "kv", member("b")):
            await until(lambda: names(watching.view) == names(own.view) == ["a", "b"])
    for wrong in (etcd(password="q"), Etcd([own_server.url]), etcd("more", "m")):
        with pytest.raises(MembershipError, match="etcd"):
            async with joined_by(wrong, "kv"):
                pass


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True])
async def test_a_backup_is_taken_for_the_cluster_only_as_long_as_nothing_has_changed_since(
    own_server: EtcdServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_late: bool
) -> None:
    """Members that know of later changes keep their view, because numbers of views must not be given twice."""
    require_program("etcdctl", "etcd-client")
    backup = str(tmp_path / "backup")
    environment = {**os.environ, "ETCDCTL_API": "3"}
    async with joined(own_server, "kv", member("a"), lease_s=30) as own, joined(own_server, "kv") as watching:
        await until(lambda: names(watching.view) == ["a"])
        save = ["etcdctl", "--endpoints", own_server.url, "snapshot", "save", backup]
        await asyncio.to_thread(subprocess.run, save, check=True, capture_output=True, env=environment)
        if is_late:
            async with joined(own_server, "kv", member("b")):
                await until(lambda: names(watching.view) == names(own.view) == ["a", "b"])
            await until(lambda: names(watching.view) == names(own.view) == ["a"])
        number = watching.view.number
        own_server.kill()
        own_server.directory = tmp_path / "restored"
        restore = ["etcdctl", "snapshot", "restore", backup, "--data-dir", str(own_server.directory)]
        restore += own_server.membership
        await asyncio.to_thread(subprocess.run, restore, check=True, capture_output=True, env=environment)
        own_server.start()
        async with joined(own_server, "kv", member("c"), known_id=own.view.cluster_id):
            if is_late:
                await until(lambda: caplog.text.count("etcd has gone back") >= 2)
                assert names(watching.view) == names(own.view) == ["a"]
                assert watching.view.number == number
            else:
                await until(lambda: names(watching.view) == names(own.view) == ["a", "c"])
                assert "gone back" not in caplog.text


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
