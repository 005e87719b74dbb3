"""ClusterStorage: the StorageApi of a cluster. Each call goes to the member, or members, that it concerns."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

from descriptors import metrics
from descriptors.chunk_names import is_chunk_key
from descriptors.cluster import Member
from descriptors.errors import ErrorCode
from descriptors.messages import SchedulerStatus, Transports
from descriptors.objects import NotDeleted
from descriptors.peer_calls import CALLS, CallForm, PeerCall
from descriptors.status import StorageStatus
from descriptors.storage_api import AgentsApi, ObjectRead, ObjectsApi, PrefixesApi, UploadsApi
from gateway.cluster.agents import ClusterAgents
from gateway.cluster.members import ALIVE_S, Members, nobody
from gateway.cluster.prefixes import ClusterPrefixes
from gateway.storage_client import StorageUnreachableError
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
        self.objects = cast(ObjectsApi, _Role(members, "objects", {"delete_objects": _delete_objects}))
        self.uploads = cast(UploadsApi, _Role(members, "uploads", {}))
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
        found = await self._of_all("transports", access_key)
        names = list(found)
        members = self._members.view
        ids = {name: member.id for name in names if (member := members.member(name)) is not None}
        sockets = {ids[name]: socket for name in ids if (socket := found[name].shm_socket) is not None}
        return Transports(
            all(offered.ucx for offered in found.values()), None, sockets if len(sockets) == len(names) else {}
        )

    async def scheduler(self, access_key: str) -> SchedulerStatus:
        """The settings of the first member that answers, and the deliveries of all that answer."""
        found = list((await self._of_all("scheduler", access_key)).values())
        first: SchedulerStatus = found[0]
        counts = ("layerwise_active", "layerwise_waiting", "chunkwise_active", "chunkwise_waiting", "queued_bytes")
        summed = {name: sum(getattr(status, name) for status in found) for name in counts}
        return SchedulerStatus(
            first.policy, first.rates, first.link_bytes_per_s, first.margin_bytes_per_s, first.epoch, **summed
        )

    async def servers(self, access_key: str) -> list[StorageStatus]:
        """Each member that can be reached, by its name."""
        found = await self._of_all("servers", access_key)
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

    async def _of_all(self, method: str, access_key: str) -> dict[str, Any]:
        """The answers of the members that can be reached, by name. Raises ServerError(SlowDown) where none can."""
        members = self._members.view.members

        async def ask(member: Member) -> Any:
            storage = await self._members.storage(member)
            async with asyncio.timeout(ALIVE_S):
                return await getattr(storage.status, method)(access_key)

        answers = await asyncio.gather(*map(ask, members), return_exceptions=True)
        good = {
            member.name: answer
            for member, answer in zip(members, answers, strict=True)
            if not isinstance(answer, BaseException)
        }
        if not good:
            raise nobody()
        return good


Special = Callable[..., Awaitable[Any]]


class _Role:
    """One role: a method for each of its calls, which goes to the keeper of the bucket and key that it names, and where
    that cannot be reached to the next in the key's order. `special` has the calls that are otherwise.
    """

    def __init__(self, members: Members, role: str, special: Mapping[str, Special]) -> None:
        for call in CALLS.values():
            if call.role == role:
                made = special.get(call.method)
                setattr(self, call.method, _routed(members, call) if made is None else _bound(members, call, made))


def _bound(members: Members, call: PeerCall, special: Special) -> Callable[..., Awaitable[Any]]:
    return lambda *values, **named: special(members, **call.bound(*values, **named))


def _routed(members: Members, call: PeerCall) -> Callable[..., Any]:
    if call.form is CallForm.READ:
        return lambda *values, **named: _read(members, call, call.bound(*values, **named))
    return lambda *values, **named: _ask(members, call, call.bound(*values, **named))


def concerns(arguments: Mapping[str, Any]) -> tuple[str, str]:
    """The bucket and key that a call is about; the key is empty for a call about a bucket, both for one about all."""
    for name in ("request", "upload"):
        named = arguments.get(name)
        if named is not None:
            named = getattr(named, "upload", named)
            return named.bucket, getattr(named, "key", "")
    return arguments.get("bucket", ""), arguments.get("key", "")


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
    return await members.in_latest_view(lambda: _ask_in_turn(members, call, arguments))


async def _ask_in_turn(members: Members, call: PeerCall, arguments: dict[str, Any]) -> Any:
    bucket, key = concerns(arguments)
    lost: StorageUnreachableError | None = None
    for member in order(members, call, bucket, key):
        storage = await members.storage(member)
        try:
            made = getattr(getattr(storage, call.role), call.method)(**arguments)
            result = await members.watched(member, made)
        except StorageUnreachableError as error:
            members.failed(member)
            if not may_ask_again(call, error):
                raise
            lost = error
            continue
        members.succeeded(member)
        return result
    raise lost or nobody()


@asynccontextmanager
async def _read(members: Members, call: PeerCall, arguments: dict[str, Any]) -> AsyncIterator[ObjectRead]:
    """Once the object is open, its bytes come from that member alone."""
    async with AsyncExitStack() as opened:
        yield await members.in_latest_view(lambda: _open_in_turn(members, call, arguments, opened))


async def _open_in_turn(
    members: Members, call: PeerCall, arguments: dict[str, Any], opened: AsyncExitStack
) -> ObjectRead:
    bucket, key = concerns(arguments)
    lost: StorageUnreachableError | None = None
    for member in order(members, call, bucket, key):
        storage = await members.storage(member)
        try:
            method = getattr(getattr(storage, call.role), call.method)
            async with members.watching(member):
                read: ObjectRead = await opened.enter_async_context(method(**arguments))
        except StorageUnreachableError as error:
            members.failed(member)
            lost = error
            continue
        members.succeeded(member)
        return read
    raise lost or nobody()


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
