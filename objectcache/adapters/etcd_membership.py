"""Membership in etcd: each storage server keeps its entry under a lease, and everybody watches the entries. A lease is
renewed in a thread of its own (`adapters.renewals`).

The number of a view is the revision of etcd that it was true at. While etcd cannot be reached the last view stays in
force; entries whose leases end meanwhile leave only when etcd says so.

A watch can be silent although members change: a node of etcd that has lost its majority tells nothing, and does not end
its watches. So each renewal of a lease also reads, with a majority of etcd, whether the members have changed, and a
member holds its lease only as long as its view was the latest within the time of a lease.

    PREFIX/cluster          the cluster's id, made once
    PREFIX/members/NAME     {"name": …, "endpoint": …, "weight": …, "is_draining": …}, under the server's lease
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from descriptors.cluster import ClusterError, Member, View, member_fields, member_from_fields, require_name
from objectcache.adapters.breaker import back_off_s
from objectcache.adapters.etcd import CompactedError, Etcd, EtcdChange, EtcdEntry, EtcdError, EtcdRange, ManyValuesError
from objectcache.adapters.membership import MembershipError, OnView
from objectcache.adapters.renewals import RENEWALS, Renewals
from objectcache.adapters.shared_runs import SharedRuns

LEASE_S = 10
REGISTRATIONS_MAX = 3
"""How often this server's entry is written where others write it at the same time."""
STILL_LEASES = 3
"""For how many leases the event loop may stand still before its server leaves the cluster."""
KEEP_ALIVE_S_MIN = 1.0
"""The least time that etcd has to answer a renewal; otherwise it has as long as the renewals are apart."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.1, 5.0
MEMBER_BYTES_MAX = 4096
"""Anybody who may write to etcd chooses what is parsed here, on the event loop."""
KEY_CHARACTERS_TOLD = 200
_log = logging.getLogger(__name__)


class EtcdMembership:
    """Implements adapters.membership.Membership. Of a member that is announced it keeps the entry."""

    def __init__(
        self,
        etcd: Etcd,
        prefix: str,
        lease_s: int = LEASE_S,
        known_id: str | None = None,
        learned_id: Callable[[str], None] = lambda cluster_id: None,
    ) -> None:
        """`known_id` is the cluster's id as this server has seen it before; `learned_id` is called with it the first
        time.
        """
        self._etcd = etcd
        self._prefix = prefix.rstrip("/")
        self._own: Member | None = None
        self._lease_s = lease_s
        self._known_id = known_id
        self._learned_id = learned_id
        self._told: list[OnView] = []
        self._view = View("none", 0)
        self._changed_at = 0
        self._etcd_id = 0
        self._lease = 0
        self._registration_count = 0
        self._seen = 0
        """The revision up to which the watch has told every change."""
        self._told_at = 0
        self._has_gone_back = False
        """Whether etcd has told less than it had before: from then on nothing of it is taken."""
        self._lease_until_s = 0.0
        self._latest: EtcdRange | None = None
        """The last reading of all entries that the view in force has taken, while it has this server's own entry."""
        self._latest_until_s = 0.0
        """Until when the view counts as the latest: the time of a lease after a majority of etcd was asked for it."""
        self._renewals: Renewals | None = None
        self._registering: asyncio.Task[None] | None = None
        self._loop_seen_s = 0.0
        """When this server's event loop was last seen to run."""
        self._members: dict[str, Member] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._refreshes = SharedRuns(self._refresh)
        self.is_connected = False
        """Whether etcd has answered the last time that it was asked."""

    @property
    def view(self) -> View:
        return self._view

    @property
    def changed_at(self) -> int:
        return self._changed_at

    @property
    def holds_lease(self) -> bool:
        """Whether this server's lease has surely not ended, and no view was later a lease ago, by its own clock."""
        return time.monotonic() < min(self._lease_until_s, self._latest_until_s)

    @property
    def registration_count(self) -> int:
        return self._registration_count

    def on_view(self, told: OnView) -> None:
        self._told.append(told)

    def announce(self, own: Member) -> None:
        self._own = own

    async def start(self) -> None:
        """Learn the members, and be one of them. Raises MembershipError."""
        await self._etcd.start()
        try:
            cluster_id = await self._cluster_id()
            if self._known_id is not None and cluster_id != self._known_id:
                raise MembershipError(
                    f"etcd has the cluster {cluster_id}, and this server was a member of {self._known_id}. If etcd was"
                    " rebuilt: objectcache cluster adopt"
                )
            self._learned_id(cluster_id)
            self._known_id = cluster_id
            if self._own is not None:
                await self._register(self._own)
            began_s = time.monotonic()
            self._take(await self._etcd.range(self._members_prefix), began_s)
        except EtcdError as error:
            await self._etcd.close()
            raise MembershipError(f"etcd: {error}") from None
        except MembershipError:
            await self._etcd.close()
            raise
        self._tasks = [asyncio.create_task(self._watch())]
        if self._own is not None:
            self._keep_lease(self._own, asyncio.get_running_loop())

    async def refresh(self) -> None:
        """Read the members again: once for all who ask meanwhile."""
        await self._refreshes.run()

    async def _refresh(self) -> None:
        try:
            await self._read()
        except EtcdError as error:
            self.is_connected = False
            _log.warning("the members stay as they were: %s", error)

    async def close(self) -> None:
        """Leave the cluster."""
        await self._stop()
        if self._lease:
            with contextlib.suppress(EtcdError):
                await self._etcd.revoke(self._lease)
        await self._etcd.close()

    async def abandon(self) -> None:
        """Do nothing more, and leave the lease to end by itself, as after a crash."""
        await self._stop()
        await self._etcd.close()

    async def _stop(self) -> None:
        if self._renewals is not None:
            await asyncio.to_thread(self._renewals.stop)
        if self._registering is not None:
            self._tasks.append(self._registering)
        await self._refreshes.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def drain(self, *, is_draining: bool = True) -> None:
        """Give this member's keys to others, or take them again. Raises EtcdError."""
        if self._own is not None:
            self._own = replace(self._own, is_draining=is_draining)
            await self._etcd.put(self._own_key(self._own), _value(self._own), self._lease)

    @property
    def _members_prefix(self) -> str:
        return f"{self._prefix}/members/"

    def _own_key(self, own: Member) -> str:
        return f"{self._members_prefix}{own.name}"

    async def _cluster_id(self) -> str:
        made = f"kv-{secrets.token_hex(8)}"
        there = await self._etcd.create(f"{self._prefix}/cluster", made.encode())
        if there is None:
            return made
        try:
            return require_name(there.value.decode(errors="replace"), f"the id in {self._prefix}/cluster")
        except ClusterError as error:
            raise MembershipError(f"etcd: {error}") from None

    async def _register(self, own: Member) -> None:
        """Put this member's entry under a new lease. An entry of the same endpoint is ours, of an earlier life. Raises
        EtcdError, MembershipError where another server has the name.
        """
        began_s = time.monotonic()
        lease = await self._etcd.grant(self._lease_s)
        key, value = self._own_key(own), _value(own)
        for _ in range(REGISTRATIONS_MAX):
            there = await self._etcd.create(key, value, lease)
            if there is not None:
                if _endpoint(there) != own.endpoint:
                    where = _endpoint(there) or "no endpoint that can be read"
                    raise MembershipError(f"another server is the member {own.name}, at {where}")
                if not await self._etcd.replace(there, value, lease):
                    continue
            self._lease, self._lease_until_s = lease, began_s + self._lease_s
            self._registration_count += 1
            return
        raise MembershipError(f"the entry of the member {own.name} changes all the time")

    def _keep_lease(self, own: Member, loop: asyncio.AbstractEventLoop) -> None:
        """Keep the lease, in a thread that has an event loop and connections of its own. A server whose own event loop
        stands still for too long serves nobody, and must leave.
        """
        self._see_loop()
        what = f"the lease of the member {own.name}"
        etcd = self._etcd.copy(max(KEEP_ALIVE_S_MIN, self._lease_s / RENEWALS))
        runner = asyncio.Runner()
        is_started = False

        async def keep_alive(lease: int) -> bool:
            nonlocal is_started
            if not is_started:
                await etcd.start()
                is_started = True
            return await etcd.keep_alive(lease)

        async def latest(before: EtcdRange | None) -> EtcdRange:
            return await (
                etcd.range(self._members_prefix) if before is None else etcd.latest(self._members_prefix, before)
            )

        def renew() -> None:
            lease, began_s = self._lease, time.monotonic()
            loop.call_soon_threadsafe(self._see_loop)
            still_s = began_s - self._loop_seen_s
            if still_s > STILL_LEASES * self._lease_s:
                raise EtcdError(f"the event loop has stood still for {still_s:.0f} s")
            try:
                is_kept = runner.run(keep_alive(lease))
                if is_kept and lease == self._lease:
                    self._lease_until_s = max(self._lease_until_s, began_s + self._lease_s)
                before, known, asked_s = self._latest, self._known_revision, time.monotonic()
                found = runner.run(latest(before)) if is_kept else None
            except BaseException:
                self.is_connected = False
                raise
            self.is_connected = True
            if found is None:
                loop.call_soon_threadsafe(self._register_again, lease)
                raise EtcdError("it has ended; the member registers again")
            if before is not None and found.entries is before.entries and found.revision >= known:
                self._note_latest(asked_s)  # also while the event loop is busy
            else:
                loop.call_soon_threadsafe(self._take_found, found, asked_s, known)

        def end() -> None:
            runner.run(etcd.close())
            runner.close()

        self._renewals = Renewals(what, self._lease_s, renew, end)
        self._renewals.start()

    def _see_loop(self) -> None:
        self._loop_seen_s = time.monotonic()

    def _register_again(self, ended: int) -> None:
        """This lease has ended: take another one, unless that has been done, or is under way."""
        is_under_way = self._registering is not None and not self._registering.done()
        if self._own is not None and ended == self._lease and not is_under_way:
            self._registering = asyncio.get_running_loop().create_task(self._replace_lease(self._own))

    async def _replace_lease(self, own: Member) -> None:
        try:
            await self._register(own)
            await self.refresh()
        except Exception as error:
            self.is_connected = False
            _log.warning("the member %s could not register again: %s", own.name, error)

    async def _watch(self) -> None:
        """Take changes as they come, for ever, each once. After a break the watch goes on where it was; where those
        changes are kept no more, all is read again.
        """
        failed_count = 0
        while True:
            try:
                if failed_count:  # an etcd that has gone back would let the watch wait in silence
                    await self._read()
                try:
                    async for changes in self._etcd.watch(self._members_prefix, self._seen + 1, self._etcd_id):
                        failed_count = 0
                        self._apply(changes)
                except (CompactedError, ManyValuesError) as error:
                    _log.info("the changes of the members since %d are not told: %s", self._seen, error)
                    await self._read_anew()
            except Exception as error:
                failed_count += 1
                self.is_connected = False
                if failed_count == 1:
                    _log.warning("the members are not watched: %r", error)
            await asyncio.sleep(back_off_s(max(failed_count, 1), PAUSE_S_MIN, PAUSE_S_MAX))

    async def _read(self) -> None:
        """Read the members. Raises EtcdError."""
        known, asked_s = self._known_revision, time.monotonic()
        self._take(await self._etcd.range(self._members_prefix), asked_s, known)

    @property
    def _known_revision(self) -> int:
        """A revision that etcd has had."""
        return max(self._seen, self._view.number)

    def _note_latest(self, asked_s: float) -> None:
        """The view was the latest when etcd was asked, at `asked_s`."""
        self._latest_until_s = max(self._latest_until_s, asked_s + self._lease_s)

    async def _read_anew(self) -> None:
        """Read all, after changes that were not seen: the members may have been others meanwhile. Raises EtcdError."""
        asked_s = time.monotonic()
        found = await self._etcd.range(self._members_prefix)
        self._take(found, asked_s)
        if found.cluster_id == self._etcd_id:
            self._seen = max(self._seen, found.revision)
            self._tell_missed(found.revision)

    def _take_found(self, found: EtcdRange, asked_s: float, known: int) -> None:
        try:
            self._take(found, asked_s, known)
        except EtcdError as error:
            _log.warning("the members stay as they were: %s", error)

    def _take(self, found: EtcdRange, asked_s: float, known: int = 0) -> None:
        """Take all entries, as of a revision. `known` is one that etcd had when it was asked for them, at `asked_s`.
        Raises EtcdError where they cannot be a cluster.
        """
        self.is_connected = True
        self._latest = None
        if self._etcd_id and found.cluster_id != self._etcd_id:
            _log.error(
                "etcd has been rebuilt; the members stay as they were. Restart the servers after `objectcache cluster"
                " adopt`"
            )
            return
        if found.revision < known and not self._has_gone_back:
            self._has_gone_back = True
            _log.error(
                "etcd has gone back from the revision %d to %d, as a backup does; the members stay as they were."
                " docs/guides/cluster.md says how to go on",
                known,
                found.revision,
            )
        if self._has_gone_back:
            return
        if not self._etcd_id:
            self._etcd_id, self._seen = found.cluster_id, found.revision
        if found.revision >= self._view.number:
            members = _members_of(self._members_prefix, ((entry.key, entry.value) for entry in found.entries))
            newest = max((entry.revision for entry in found.entries), default=0)
            if not self._set(members, found.revision) and newest > self._told_at:
                self._tell_missed(newest)
        if self._own is None or self._own.name in self._members:
            self._latest = found
            self._note_latest(asked_s)

    def _apply(self, changes: Sequence[EtcdChange]) -> None:
        """Take changes of the watch. Each says that the members have changed, also where a view has them already."""
        if self._has_gone_back:
            return
        newest = changes[-1].revision
        last = {change.key: change.value for change in changes if change.revision > self._view.number}
        names = {key.removeprefix(self._members_prefix) for key in last}
        members = {name: member for name, member in self._members.items() if name not in names}
        written = ((key, value) for key, value in last.items() if value is not None)
        members |= _members_of(self._members_prefix, written)
        self._seen = max(self._seen, newest)
        is_told = self._set(members, max(newest, self._view.number))
        if not is_told and newest > self._told_at:
            self._tell(newest)

    def _set(self, members: dict[str, Member], revision: int) -> bool:
        """Take the members as of a revision; whether they differ from those before. Raises EtcdError where they cannot
        be a cluster: there are too many.
        """
        is_changed = members != self._members or self._view.number == 0
        try:
            self._view = View(self._known_id or "none", revision, tuple(members.values()))
        except ClusterError as error:
            raise EtcdError(f"what etcd has is no cluster: {error}") from error
        self._members = members
        if is_changed:
            self._tell(revision)
        if self._own is not None and self._own.name not in members and self._lease:
            _log.warning("etcd has no entry of the member %s any more; it registers again", self._own.name)
            self._register_again(self._lease)
        return is_changed

    def _tell_missed(self, revision: int) -> None:
        """The members are known as of this revision, and may have been others between."""
        self._registration_count += 1
        self._tell(revision)

    def _tell(self, revision: int) -> None:
        """The members have changed at this revision."""
        self._told_at = revision
        self._changed_at = max(self._changed_at, revision)
        for told in self._told:
            told(self._view)


def _members_of(prefix: str, entries: Iterable[tuple[str, bytes]]) -> dict[str, Member]:
    """The members by name; entries that are none are passed over, and told in one line."""
    members: dict[str, Member] = {}
    bad: list[str] = []
    for key, value in entries:
        name = key.removeprefix(prefix)
        try:
            member = member_from_fields(_fields(value))
            if member.name != name:
                raise ClusterError(f"the entry {key} is of the member {member.name}")
        except (ValueError, RecursionError) as error:
            bad.append(f"{key[:KEY_CHARACTERS_TOLD]}: {error}")
            continue
        members[name] = member
    if bad:
        _log.error("%d entries are no members; the first one is %s", len(bad), bad[0])
    return members


def _value(member: Member) -> bytes:
    return json.dumps(member_fields(member)).encode()


def _endpoint(entry: EtcdEntry) -> str:
    """The endpoint in a member's entry; "" where there is none that can be read."""
    try:
        return str(_fields(entry.value).get("endpoint", ""))
    except (ValueError, RecursionError):
        return ""


def _fields(value: bytes) -> dict[str, object]:
    """The JSON object of an entry. Raises ValueError, RecursionError."""
    if len(value) > MEMBER_BYTES_MAX:
        raise ClusterError(f"a member has at most {MEMBER_BYTES_MAX} bytes")
    fields = json.loads(value)
    if not isinstance(fields, dict):
        raise ClusterError("a member is a JSON object")
    return fields
