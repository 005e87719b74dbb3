"""A storage server's part in a cluster: the keys that it is the keeper of, and the refusal of stale calls."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from descriptors.cluster import VIEW_HEADER, ClusterError, Member, View, parse_view_id
from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.placement import CELLS_MAX, Placement, key_words
from objectcache.adapters.membership import Membership
from objectcache.adapters.threads import HERE_ITEMS_MAX, computed
from storage_server.home.rules.keeper_history import KeeperHistory

_log = logging.getLogger(__name__)


SETTLE_S = 15.0
"""How long after a change of the members another server may still take itself for the keeper of keys that are ours now:
longer than a lease of membership, and longer than people take to have every server read a members file.
"""
SETTLE_LEASES = 1.5
"""The same in leases, where those are longer."""
FORMER_S = 600.0
"""So long after a change of the members, those that kept our keys before are asked for their copies."""
COMPARING_REST = 3.0
"""While the members change all the time, comparisons rest for so many times as long as the last one took."""
VIEWS_MAX = 3
"""How many views a question for own keys is answered under. Where each ends before the answer, no key is trusted."""
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
        self._history = KeeperHistory(settle_s)
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

    async def are_own(self, bucket: str, keys: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Whether a copy of each key here is as good as upstream's: bool of shape (len(keys),)."""
        for _ in range(VIEWS_MAX):
            trusted = self._trusted()
            cells = len(keys) * sum(len(placement.members) for placement in trusted)
            is_long = len(keys) > HERE_ITEMS_MAX or cells > CELLS_MAX
            own = await computed(partial(self._owned, trusted, bucket, keys), is_long=is_long)
            if self._trusted() is trusted:
                return own
        return np.zeros(len(keys), dtype=np.bool_)

    def is_own(self, bucket: str, key: str) -> bool:
        """As `are_own`, of one key."""
        return bool(self._owned(self._trusted(), bucket, [key])[0])

    def _trusted(self) -> tuple[Placement, ...]:
        """The placements in each of which a key must have been ours; none while no copy is trusted."""
        if self.membership.registration_count != self._registration_count:
            self._registration_count = self.membership.registration_count  # others were the keepers for a while
            self._history.lose(time.monotonic())
            self._begin_comparing()
        return self._history.trusted if self.membership.holds_lease else ()

    def _owned(self, trusted: tuple[Placement, ...], bucket: str, keys: Sequence[str]) -> npt.NDArray[np.bool_]:
        own = np.full(len(keys), bool(trusted))
        words = key_words(bucket, keys if trusted else ())
        for placement in trusted:
            names = np.array([member.name == self.name for member in placement.members])
            own &= names[placement.keepers_of(words)]
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
        self._history.change(self._placement, self._changed_at_s)
        self._begin_comparing()

    def _begin_comparing(self) -> None:
        if self._comparing is None or self._comparing.done():
            self._comparing = asyncio.get_running_loop().create_task(self._compare_until_settled())

    async def _compare_until_settled(self) -> None:
        """Compare the cache with upstream until no placement but the one in force counts. A comparison goes on while
        the members change, so that members that change all the time do not keep a cache from being trusted.
        """
        pause_s = self.settle_s
        while True:
            await asyncio.sleep(pause_s)
            if self._compare is None or self._placement is None:
                return
            began_s = time.monotonic()
            try:
                await self._compare()
            except Exception as error:
                level = logging.WARNING if isinstance(error, ObjectCacheError) else logging.ERROR
                _log.log(level, "the cache could not be compared with upstream, and is not trusted yet: %r", error)
                pause_s = self.settle_s
                continue
            if self._history.compared(began_s):
                return
            now_s = time.monotonic()
            pause_s = max(self._history.settled_s - now_s, COMPARING_REST * (now_s - began_s))

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
