"""Lookups and deliveries of prefixes whose chunks lie on several members."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from adapters.phases import Phases, delivery_timing
from descriptors.cluster import Member
from descriptors.descriptor import Descriptor, OnMissing
from descriptors.errors import CHUNK_CODES, CallerError, ChunkUnavailable, ErrorCode, ObjectCacheError, ServerError
from descriptors.messages import LookupAnswer, LookupRequest
from descriptors.notices import Mode
from descriptors.objects import BodyDigests, PutRequest, ReadRequest
from descriptors.placement import Indices
from descriptors.rdma_token import RdmaToken, declined
from descriptors.recompute import advise
from descriptors.storage_api import (
    BodySink,
    ChunksPut,
    DeliveryOutcome,
    DeliveryStart,
    Grant,
    ObjectDelivery,
    ObjectStored,
)
from descriptors.tracing import Phase
from gateway.cluster.members import Members
from gateway.cluster.merge import WINDOW_BYTES, Merger, PartBody, Window, windows
from gateway.cluster.split import Share, cut_to, descriptor_of, matched_of, shares, shares_at
from gateway.storage_client import StaleViewError, StorageUnreachableError

LEASE_S = 10.0
"""Chunks that a lookup before a delivery has counted are not evicted for so long."""
REFRESHES_MAX = 8
"""How often one request takes a later view, where members refuse it for an older one."""
_T = TypeVar("_T")


class ClusterPrefixes:
    """Implements descriptors.storage_api.PrefixesApi over the members of a cluster."""

    def __init__(self, members: Members) -> None:
        self._members = members

    async def lookup(self, access_key: str, bucket: str, request: LookupRequest) -> LookupAnswer:
        """Each member counts its own chunks of the prefix. Advice assumes the rate at which the slowest part comes."""
        keys, compute = request.chunk_keys, request.compute
        asked = None if compute is None else replace(compute, bytes_per_s=0.0)

        async def ask(share: Share) -> LookupAnswer:
            storage = await self._members.storage(share.member)
            own = tuple([keys[position] for position in share.positions.tolist()])
            return await storage.prefixes.lookup(access_key, bucket, LookupRequest(own, request.lease_s, asked))

        parts, answers = await self._of_each(bucket, keys, ask)
        matched = matched_of(parts, [answer.matched for answer in answers], len(keys))
        if compute is None:
            return LookupAnswer(matched)
        rates = [
            answer.advice.rate_bytes_per_s * len(keys) / part.chunk_count
            for part, answer in zip(parts, answers, strict=True)
            if answer.advice is not None and answer.advice.rate_bytes_per_s is not None
        ]
        return LookupAnswer(matched, advise(matched, compute, min(rates, default=0.0)))

    async def deliver(self, access_key: str, bucket: str, descriptor: Descriptor, sink: BodySink) -> DeliveryOutcome:
        """Have every member deliver its chunks, and merge their bodies. How many come is decided before."""
        if descriptor.rdma_target is not None:
            problem = "a cluster takes no registrations of memory; ask for the body instead"
            raise CallerError(ErrorCode.NOT_IMPLEMENTED, problem, field="rdma_target")
        if descriptor.on_missing is OnMissing.PREFIX:
            matched = (await self.lookup(access_key, bucket, LookupRequest(descriptor.chunk_keys, LEASE_S))).matched
            if matched == 0:
                raise _missing(0)
            descriptor = cut_to(descriptor, matched)
        delivery = _Delivery(self._members, access_key, bucket, descriptor)
        try:
            return await delivery.run(sink)
        finally:
            await delivery.close()

    async def put_chunks_from(self, access_key: str, bucket: str, descriptor: Descriptor) -> ChunksPut:
        """Raises CallerError(NotImplemented): no memory is registered with a cluster."""
        problem = "a cluster takes no registrations of memory; put chunks as bodies instead"
        raise CallerError(ErrorCode.NOT_IMPLEMENTED, problem, field="rdma_target")

    async def get_object_into(self, access_key: str, request: ReadRequest, token: RdmaToken) -> ObjectDelivery:
        """Raises CallerError(NotImplemented): the client asks for the body instead."""
        raise declined("a cluster has no ucx transport")

    async def put_object_from(
        self, access_key: str, request: PutRequest, token: RdmaToken, said: BodyDigests
    ) -> ObjectStored:
        """Raises CallerError(NotImplemented): the client sends the body instead."""
        raise declined("a cluster has no ucx transport")

    async def cancel(self, access_key: str, request_id: str) -> None:
        """Stop every part. A member that cannot be reached writes into nobody's memory."""

        async def ask(member: Member) -> None:
            storage = await self._members.storage(member)
            with suppress(StorageUnreachableError):
                await storage.prefixes.cancel(access_key, request_id)

        await asyncio.gather(*map(ask, self._members.view.members))

    async def _of_each(
        self, bucket: str, keys: Sequence[str], ask: Callable[[Share], Awaitable[_T]]
    ) -> tuple[list[Share], list[_T]]:
        """The answers of the members to a question that changes nothing. The chunks of a member that does not answer
        are asked of the next in their order.
        """
        without: set[str] = set(self._members.unreachable)
        waiting = shares(self._members.placement, bucket, keys, without)
        parts: list[Share] = []
        answers: list[_T] = []
        refreshed_count = 0
        while waiting:
            asked = await asyncio.gather(*map(ask, waiting), return_exceptions=True)
            lost: list[Share] = []
            for share, answer in zip(waiting, asked, strict=True):
                if isinstance(answer, StorageUnreachableError):
                    self._members.failed(share.member)
                    without.add(share.member.name)
                    lost.append(share)
                elif isinstance(answer, StaleViewError) and refreshed_count < REFRESHES_MAX:
                    refreshed_count += 1
                    await self._members.membership.refresh()
                    lost.append(share)
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    self._members.succeeded(share.member)
                    parts.append(share)
                    answers.append(answer)
            waiting = [part for share in lost for part in self._elsewhere(bucket, keys, share.positions, without)]
        return parts, answers

    def _elsewhere(self, bucket: str, keys: Sequence[str], positions: Indices, without: set[str]) -> list[Share]:
        try:
            return shares_at(self._members.placement, bucket, keys, positions, without)
        except ValueError:
            raise _nobody() from None


@dataclass(slots=True)
class _Part:
    """A part under way: its share, its body, and the task that brings it. Its body begins with `first_layer`."""

    share: Share
    body: PartBody
    first_layer: int
    task: asyncio.Task[None]


class _Delivery:
    """One delivery over http whose parts come from several members."""

    def __init__(self, members: Members, access_key: str, bucket: str, descriptor: Descriptor) -> None:
        self._members = members
        self._access_key = access_key
        self._bucket = bucket
        self._descriptor = descriptor
        self._parts: list[_Part] = []
        self._without: set[str] = set(members.unreachable)
        self._begun_count = 0
        self._refreshed_count = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._mode: Mode | None = None
        self._phases = Phases(Phase.PLAN)

    async def run(self, sink: BodySink) -> DeliveryOutcome:
        """Carry it out. Before the first byte an error is an answer; after it the body is cut short."""
        first = shares(self._members.placement, self._bucket, self._descriptor.chunk_keys, self._without)
        self._parts = [await self._begin(share, 0) for share in first]
        start = await self._start()
        layout, is_layered = self._descriptor.layout, start.mode is Mode.LAYER_MAJOR
        slice_bytes = layout.per_layer_chunk_bytes if is_layered else layout.chunk_bytes
        group_count = layout.num_layers if is_layered else 1
        merger, sent_bytes = Merger(slice_bytes), 0
        try:
            for window in windows(group_count, start.chunk_count, slice_bytes, WINDOW_BYTES):
                self._phases.enter(Phase.GATHER)
                await self._fill(merger, window)
                self._phases.enter(Phase.TRANSFER)
                if not sent_bytes:
                    await sink.begin(start)
                sent_bytes += window.nbytes
                await sink.write(merger.view(window))
        except BaseException:
            if sent_bytes:
                sink.abort()
            raise
        return DeliveryOutcome(start, sent_bytes, delivery_timing(self._phases))

    async def close(self) -> None:
        """End what is still under way."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _start(self) -> DeliveryStart:
        """The start of the whole, when every part has started."""
        starts: list[DeliveryStart] = []
        waiting = list(self._parts)
        while waiting:
            part = waiting.pop(0)
            try:
                starts.append(await part.body.started())
            except ObjectCacheError as error:
                waiting[:0] = await self._replace(part, error, 0, 0)
        self._mode = starts[0].mode
        if any(start.mode is not self._mode for start in starts):
            raise _modes_differ()
        grant = Grant(sum(start.grant.rate_bytes_per_s for start in starts), max(start.grant.epoch for start in starts))
        layout, chunk_count = self._descriptor.layout, self._descriptor.chunk_count
        return DeliveryStart(starts[0].request_id, self._mode, chunk_count, layout.delivery_bytes(chunk_count), grant)

    async def _fill(self, merger: Merger, window: Window) -> None:
        """Take a window's slices from every part. One that fails is asked of others, which begin with the window."""
        waiting = list(self._parts)
        while waiting:
            part = waiting.pop(0)
            try:
                await merger.take(window, part.body, part.share.positions, part.first_layer)
            except ObjectCacheError as error:
                if self._mode is Mode.LAYER_MAJOR:
                    waiting[:0] = await self._replace(part, error, window.group, 0)
                else:
                    waiting[:0] = await self._replace(part, error, 0, window.first)

    async def _begin(self, share: Share, first_layer: int) -> _Part:
        """Ask a member for its share, from this layer on."""
        index, self._begun_count = self._begun_count, self._begun_count + 1
        wanted = descriptor_of(self._descriptor, share, index, index + 1, self._mode, first_layer)
        storage = await self._members.storage(share.member)
        body = PartBody(partial(self._members.require_alive, share.member))

        async def bring() -> None:
            try:
                await storage.prefixes.deliver(self._access_key, self._bucket, wanted, body)
            except Exception as error:
                body.fail(error)

        task = asyncio.create_task(bring())
        self._tasks.append(task)
        return _Part(share, body, first_layer, task)

    async def _replace(self, part: _Part, reason: ObjectCacheError, layer: int, position: int) -> list[_Part]:
        """Ask others for the chunks of a part that failed, from this layer and this chunk of the prefix on. Raises the
        reason where others would say the same.
        """
        if isinstance(reason, ChunkUnavailable):
            raise _of_whole(reason, part.share) from None
        if isinstance(reason, StaleViewError) and self._refreshed_count < REFRESHES_MAX:
            self._refreshed_count += 1
            await self._members.membership.refresh()
        elif isinstance(reason, StorageUnreachableError):
            self._members.failed(part.share.member)
            self._without.add(part.share.member.name)
        else:
            raise reason
        part.task.cancel()
        positions = part.share.positions[part.share.positions >= position]
        try:
            others = shares_at(
                self._members.placement, self._bucket, self._descriptor.chunk_keys, positions, self._without
            )
        except ValueError:
            raise _nobody() from reason
        begun = [await self._begin(share, layer) for share in others]
        at = self._parts.index(part)
        self._parts[at : at + 1] = begun
        return begun


def _modes_differ() -> ServerError:
    problem = "the storage servers of the cluster choose different modes: they must have the same theta_bytes"
    return ServerError(ErrorCode.INTERNAL_ERROR, problem)


def _missing(index: int) -> ChunkUnavailable:
    field = f"chunk_keys[{index}]"
    return ChunkUnavailable(ErrorCode.NO_SUCH_CHUNK, f"{field} is not stored", field=field, index=index)


def _nobody() -> ServerError:
    return ServerError(ErrorCode.SLOW_DOWN, "no storage server can be reached", retryable=True, retry_after_s=1)


def _of_whole(error: ChunkUnavailable, share: Share) -> ChunkUnavailable:
    """The error with the index of the chunk in the whole prefix."""
    if error.index is None or error.code not in CHUNK_CODES:
        return error
    index = int(share.positions[error.index])
    field = f"chunk_keys[{index}]"
    message = error.message.replace(f"chunk_keys[{error.index}]", field)
    return ChunkUnavailable(error.code, message, field=field, index=index, layer=error.layer)
