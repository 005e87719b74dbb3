"""Membership: the latest view of a cluster, from a file, or from etcd (`adapters.etcd_membership`)."""

from __future__ import annotations

import asyncio
import logging
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from descriptors.cluster import ClusterError, Member, View, member_from_fields
from objectcache.adapters.shared_runs import SharedRuns

_log = logging.getLogger(__name__)
OnView = Callable[[View], None]


class MembershipError(Exception):
    """The members cannot be learned; the message says what to do."""


class Membership(Protocol):
    """The latest view of a cluster. `start` before use, `close` after. Used on one event loop."""

    @property
    def view(self) -> View:
        """The latest view. It stays in force where its source cannot be reached."""

    @property
    def changed_at(self) -> int:
        """The number at which the members last changed, as far as is known. A caller with an earlier view is stale."""

    @property
    def holds_lease(self) -> bool:
        """Whether the others surely count this server as a member now, by its own clock."""

    @property
    def registration_count(self) -> int:
        """How often this server has become a member, or may have missed who the members were for a while. Between two
        times others may have taken its place.
        """

    def on_view(self, told: OnView) -> None:
        """Call this with the latest view whenever the members have changed, be it back to what they were."""

    def announce(self, own: Member) -> None:
        """Be this member from `start` on. Where members are listed by hand, this server must be listed."""

    async def start(self) -> None:
        """Learn the first view. Raises MembershipError."""

    async def refresh(self) -> None:
        """Look whether there is a later view. A source that cannot be reached changes nothing."""

    async def close(self) -> None: ...


class StandingMembership:
    """Memberships without leases: members stay until a file is read, or the job started, again."""

    def __init__(self) -> None:
        self._told: list[OnView] = []
        self._view = View("none", 0)
        self._own: Member | None = None

    @property
    def view(self) -> View:
        return self._view

    @property
    def changed_at(self) -> int:
        return self._view.number

    @property
    def holds_lease(self) -> bool:
        """True: nobody takes a member's place meanwhile."""
        return True

    @property
    def registration_count(self) -> int:
        return 1

    def on_view(self, told: OnView) -> None:
        self._told.append(told)

    def announce(self, own: Member) -> None:
        self._own = own

    async def close(self) -> None:
        """Do nothing."""

    def _show(self, view: View) -> None:
        self._view = view
        for told in self._told:
            told(view)


class FileMembership(StandingMembership):
    """The members in a TOML file, which is read again when it is asked for (SIGHUP). Every edition has a greater
    `number`, so that gateways and storage servers can tell which of them have read an older one.

        cluster = "kv"
        number = 2
        [[members]]
        name = "a"
        endpoint = "http://10.0.0.7:9100"
        weight = 1.0
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._refreshes = SharedRuns(self._refresh)

    async def start(self) -> None:
        view = await asyncio.to_thread(read_view, self._path)
        if self._own is not None and view.member(self._own.name) is None:
            _log.warning("%s lists no member %s yet: this server is given no keys", self._path, self._own.name)
        self._show(view)

    async def refresh(self) -> None:
        """Read the file again, once for all who ask meanwhile. An edition that cannot be used, or whose number is not
        greater, changes nothing.
        """
        await self._refreshes.run()

    async def close(self) -> None:
        await self._refreshes.close()

    async def _refresh(self) -> None:
        try:
            view = await asyncio.to_thread(read_view, self._path)
        except MembershipError as error:
            _log.error("the members stay as they were: %s", error)
            return
        if view == self._view:
            return
        if not self._view.id.is_before(view.id):
            _log.error(
                "the members stay as they were: %s has %s, and %s is in force", self._path, view.id, self._view.id
            )
            return
        self._show(view)


def read_view(path: Path) -> View:
    """The view in a members file. Raises MembershipError."""
    try:
        fields = tomllib.loads(path.read_text())
    except OSError as error:
        raise MembershipError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MembershipError(f"{path}: {error}") from None
    unknown = sorted(set(fields) - {"cluster", "number", "members"})
    if unknown:
        raise MembershipError(f"{path}: {unknown[0]}: no such field")
    members = fields.get("members", [])
    if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
        raise MembershipError(f"{path}: members must be [[members]] tables")
    try:
        view = View(fields.get("cluster", ""), fields.get("number", -1), tuple(map(member_from_fields, members)))
    except ClusterError as error:
        raise MembershipError(f"{path}: {error}") from None
    if not view.members:
        raise MembershipError(f"{path}: needs at least one [[members]] table")
    return view
