"""ClusterStorage: the StorageApi of a cluster. Each call goes to the member, or members, that it concerns."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from descriptors import metrics
from descriptors.chunk_names import is_chunk_key
from descriptors.cluster import Member
from descriptors.errors import ErrorCode
from descriptors.messages import SchedulerStatus, Transports
from descriptors.objects import NotDeleted
from descriptors.peer_calls import CallForm, PeerCall, role_of
from descriptors.status import StorageStatus
from descriptors.storage_api import AgentsApi, ObjectRead, ObjectsApi, PrefixesApi, StatusApi, UploadsApi
from gateway.cluster.agents import ClusterAgents
from gateway.cluster.asking import asked_at_once, asked_in_turn
from gateway.cluster.members import ALIVE_S, Members, nobody
from gateway.cluster.prefixes import ClusterPrefixes
from gateway.storage_client import RemoteStorage, StorageUnreachableError
from objectcache.adapters.metrics import text_of

_T = TypeVar("_T")
READS = frozenset({"head_bucket", "list_buckets", "get_lifecycle", "head_object", "object_parts", "list_objects",
                   "list_parts", "list_uploads"})  # fmt: skip
"""Calls that may be made again where the answer was lost: they change nothing."""
CHANGES = frozenset({"put_object", "delete_object", "copy_object", "complete_upload", "set_tags"})
"""Changes of a chunk that its keeper must carry out: another member would leave the keeper's copy as it was."""


class ClusterStorage:
    """Implements descriptors.storage_api.StorageApi over the members of a cluster. All of them stand in front of the
    same home of objects, so any of them can carry a call out; a key's keeper does, since its copies lie there.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self.membership = members.membership
        self.objects: ObjectsApi = role_of("objects", partial(_routed, members))
        self.uploads: UploadsApi = role_of("uploads", partial(_routed, members))
        self.prefixes: PrefixesApi = ClusterPrefixes(members)
        self.agents: AgentsApi = ClusterAgents(members)

    @property
    def status(self) -> ClusterStorage:
        """The StatusApi."""
        return self

    async def start(self) -> None:
        """Learn who the members are. Raises MembershipError."""
        await self._members.start()

    async def close(self) -> None:
        """Close every connection."""
        await self._members.close()

    async def transports(self, access_key: str) -> Transports:
        """The transports that every member offers which can be reached."""
        found = await self._of_all(lambda status: status.transports(access_key))
        names = list(found)
        members = self._members.view
        ids = {name: member.id for name in names if (member := members.member(name)) is not None}
        sockets = {ids[name]: socket for name in ids if (socket := found[name].shm_socket) is not None}
        return Transports(
            all(offered.ucx for offered in found.values()), None, sockets if len(sockets) == len(names) else {}
        )

    async def scheduler(self, access_key: str) -> SchedulerStatus:
        """The settings of the first member that answers, and the deliveries of all that answer."""
        found = list((await self._of_all(lambda status: status.scheduler(access_key))).values())
        first: SchedulerStatus = found[0]
        counts = ("layerwise_active", "layerwise_waiting", "chunkwise_active", "chunkwise_waiting", "queued_bytes")
        summed = {name: sum(getattr(status, name) for status in found) for name in counts}
        return SchedulerStatus(
            first.policy, first.rates, first.link_bytes_per_s, first.margin_bytes_per_s, first.epoch, **summed
        )

    async def servers(self, access_key: str) -> list[StorageStatus]:
        """Each member that can be reached, by its name."""
        found = await self._of_all(lambda status: status.servers(access_key))
        return [replace(each, name=name) for name, (each,) in sorted(found.items())]

    async def metrics(self, access_key: str) -> str:
        """The hedges of this gateway. Each storage server tells its own metrics."""
        hedging = self._members.hedging
        counts = (
            (metrics.HEDGED_PORTIONS, hedging.hedge_count),
            (metrics.HEDGES_WON, hedging.won_count),
            (metrics.HEDGED_BYTES, hedging.extra_bytes),
        )
        return text_of((metric, {(): float(count)}) for metric, count in counts).decode()

    async def _of_all(self, ask: Callable[[StatusApi], Coroutine[Any, Any, _T]]) -> dict[str, _T]:
        """The answers of the members that can be reached, by name. Raises ServerError(SlowDown) where none can."""
        members = self._members.view.members
        told = await asked_at_once(self._members, members, lambda storage, _: ask(storage.status), ALIVE_S)
        if not told.good:
            raise nobody()
        return {member.name: told.good[member.id] for member in members if member.id in told.good}


def _routed(members: Members, call: PeerCall) -> Callable[..., Any]:
    """A call goes to the keeper of the bucket and key that it is about, and where that cannot be reached to the next in
    the key's order.
    """
    if call.operation == "objects.delete_objects":
        return partial(_delete_objects, members)
    made = _read if call.form is CallForm.READ else _ask
    return lambda *values, **named: made(members, call, call.bound(*values, **named))


def order(members: Members, call: PeerCall, bucket: str, key: str) -> list[Member]:
    """The members that may be asked, in turn. Those that could not be reached a moment ago come last."""
    ordered = members.placement.order(bucket, key)
    if call.method in CHANGES and is_chunk_key(key):
        return ordered[:1]
    unreachable = members.unreachable
    return sorted(ordered, key=lambda member: member.name in unreachable)


def may_ask_again(call: PeerCall, error: StorageUnreachableError) -> bool:
    """Whether another member may carry out a call that was not answered."""
    return error.never_connected or call.method in READS


async def _ask(members: Members, call: PeerCall, arguments: dict[str, Any]) -> Any:
    """A call that a member refuses, because its view is later than ours, is made again under that view."""

    async def ask() -> Any:
        ordered = order(members, call, *call.about(arguments))
        return await asked_in_turn(
            members,
            ordered,
            lambda storage: _method(storage, call)(**arguments),
            lambda error: may_ask_again(call, error),
        )

    return await members.in_latest_view(ask)


@asynccontextmanager
async def _read(members: Members, call: PeerCall, arguments: dict[str, Any]) -> AsyncIterator[ObjectRead]:
    """Once the object is open, its bytes come from that member alone."""
    async with AsyncExitStack() as opened:

        async def open_one() -> ObjectRead:
            ordered = order(members, call, *call.about(arguments))
            return await asked_in_turn(
                members, ordered, lambda storage: opened.enter_async_context(_method(storage, call)(**arguments))
            )

        yield await members.in_latest_view(open_one)


def _method(storage: RemoteStorage, call: PeerCall) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(getattr(storage, call.role), call.method)
    return method


async def _delete_objects(members: Members, access_key: str, bucket: str, keys: Sequence[str]) -> list[NotDeleted]:
    """Each key is deleted by its keeper; keys whose keeper does not answer are told as not deleted."""

    async def ask(member: Member, of_member: list[str]) -> list[NotDeleted]:
        storage = await members.storage(member)
        try:
            found = await members.watched(member, storage.objects.delete_objects(access_key, bucket, of_member))
        except StorageUnreachableError as error:
            members.failed(member)
            return [NotDeleted(key, ErrorCode.SLOW_DOWN.value, error.message) for key in of_member]
        members.succeeded(member)
        return found

    async def ask_all() -> list[NotDeleted]:
        placement = members.placement
        of_keeper = defaultdict[int, list[str]](list)
        for key, keeper in zip(keys, placement.keepers(bucket, list(keys)).tolist(), strict=True):
            of_keeper[keeper].append(key)
        asked = [ask(placement.members[keeper], some) for keeper, some in of_keeper.items()]
        return [each for some in await asyncio.gather(*asked) for each in some]

    return await members.in_latest_view(ask_all)  # what was deleted already is no error to delete again
