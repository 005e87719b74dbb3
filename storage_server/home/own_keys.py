"""A storage server's part in a cluster: the keys that it is the keeper of, and the refusal of stale calls."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from descriptors.cluster import VIEW_HEADER, ClusterError, Member, View, parse_view_id
from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.placement import Placement
from objectcache.adapters.membership import Membership

_log = logging.getLogger(__name__)


SETTLE_S = 15.0
"""How long after a change of the members another server may still take itself for the keeper of keys that are ours now:
longer than a lease of membership, and longer than people take to have every server read a members file.
"""
SETTLE_LEASES = 1.5
"""The same in leases, where those are longer."""
FORMER_S = 600.0
"""So long after a change of the members, those that kept our keys before are asked for their copies."""
CHANGES = frozenset({"put_object", "delete_object", "delete_objects", "copy_object", "complete_upload", "set_tags"})
Compare = Callable[[], Awaitable[None]]


class OwnKeys:
    """The keys whose keeper is the member `name`, and of those the ones whose copies here can be trusted.

    Only the keeper of a key is told of changes. So a server asks the upstream service before it answers from its cache
    for any key of which it has not been the keeper since its cache was last compared with upstream. That is done after
    its start, when it may have missed changes, and after a change of the members. It trusts no copy while its lease of
    membership may have ended, since another server may be the keeper by now. Used on one event loop.
    """

    def __init__(self, membership: Membership, name: str, weight: float = 1.0, settle_s: float = SETTLE_S) -> None:
        self.membership = membership
        self.name = name
        self.weight = weight
        self.settle_s = settle_s
        self._since: list[Placement] | None = None
        self._registration_count = 0
        self._compare: Compare | None = None
        self._comparing: asyncio.Task[None] | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._placement: Placement | None = None
        self._former: Placement | None = None
        """Before the last change of the members; where this server has joined since, without it."""
        self._changed_at_s = -math.inf
        membership.on_view(self._take)

    async def start(self, compare: Compare, endpoint: str) -> None:
        """Be a member, whom gateways reach at `endpoint`, and learn the others. From now on `compare`, which removes
        what upstream has no more, is called after each change of the members. Raises MembershipError, ClusterError.
        """
        self._compare = compare
        self.membership.announce(Member(self.name, endpoint, self.weight))
        await self.membership.start()
        self._registration_count = self.membership.registration_count

    async def close(self) -> None:
        """Look for no further view."""
        tasks = [task for task in (self._refreshing, self._comparing) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.membership.close()

    def are_own(self, bucket: str, keys: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Whether a copy of each key here is as good as upstream's."""
        if self.membership.registration_count != self._registration_count:
            self._registration_count = self.membership.registration_count  # others were the keepers for a while
            self._since = None
            self._take(self.membership.view)
        if not self._since or not self.membership.holds_lease:
            return np.zeros(len(keys), dtype=np.bool_)
        own = np.ones(len(keys), dtype=np.bool_)
        for placement in self._since:
            names = np.array([member.name == self.name for member in placement.members])
            own &= names[placement.keepers(bucket, keys)]
        return own

    def keeper_of_agent(self, agent_id: str) -> Member | None:
        """The member that shares an agent's downlink out; None while no members are known."""
        return None if self._placement is None else self._placement.order("", agent_id)[0]

    def former_keeper(self, bucket: str, key: str) -> Member | None:
        """The member that kept a key before the last change of the members, and so may have a copy of it; None where
        that is long ago, where it was this server, or where that member has left.
        """
        if self._former is None or time.monotonic() > self._changed_at_s + FORMER_S:
            return None
        (index,) = self._former.keepers(bucket, [key]).tolist()
        member = self._former.members[index]
        return None if member.name == self.name else self.membership.view.by_id(member.id)

    def _take(self, view: View) -> None:
        """Trust no key of which this server was not the keeper all along."""
        self._former, self._placement = self._placement or _without(view, self.name), _placement(view)
        self._changed_at_s = time.monotonic()
        if not view.members:
            self._since = None
        elif self._since is not None:
            self._since = [*self._since, Placement(view)]
        if self._comparing is not None:
            self._comparing.cancel()
        self._comparing = asyncio.get_running_loop().create_task(self._trust(view))

    async def _trust(self, view: View) -> None:
        """When the members have settled, compare the cache with upstream, until that has been done."""
        await asyncio.sleep(self.settle_s)
        while self._compare is not None and view.members:
            try:
                await self._compare()
            except Exception as error:
                level = logging.WARNING if isinstance(error, ObjectCacheError) else logging.ERROR
                _log.log(level, "the cache could not be compared with upstream, and is not trusted yet: %r", error)
                await asyncio.sleep(self.settle_s)
                continue
            self._since = [Placement(view)]
            return

    def require_current(self, view_id: str, method: str) -> None:
        """Check the view that a call was made under. Raises ServerError(SlowDown) for one from before the last change
        that this server knows of, and for a change of objects where another server may be their keeper by now;
        CallerError(AccessDenied) for one of another cluster. A later view is looked for.
        """
        try:
            theirs = parse_view_id(view_id)
        except ClusterError as error:
            raise CallerError(ErrorCode.INVALID_REQUEST, str(error), field=VIEW_HEADER) from None
        view: View = self.membership.view
        if not view.number:
            problem = "this server does not know the members of the cluster yet"
            raise ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True, field=VIEW_HEADER, retry_after_s=1)
        if theirs.cluster_id != view.cluster_id:
            problem = f"the call is of the cluster {theirs.cluster_id}, and this server is of {view.cluster_id}"
            raise CallerError(ErrorCode.ACCESS_DENIED, problem)
        if theirs.number < self.membership.changed_at:
            problem = f"the members have changed since the view {theirs}"
            raise ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True, field=VIEW_HEADER, retry_after_s=1)
        if method in CHANGES and not self.membership.holds_lease:
            problem = "this server may be no member any more, so it changes nothing"
            raise ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True, retry_after_s=1)
        if theirs.number > view.number and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.get_running_loop().create_task(self.membership.refresh())


def _placement(view: View) -> Placement | None:
    return Placement(view) if view.members else None


def _without(view: View, name: str) -> Placement | None:
    members = tuple(member for member in view.members if member.name != name)
    return _placement(replace(view, members=members))
