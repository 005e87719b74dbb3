"""Lookups and deliveries of prefixes whose chunks lie on several members."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from descriptors.descriptor import Descriptor, OnMissing, RdmaTarget
from descriptors.errors import CallerError, ChunkUnavailable, ErrorCode, ObjectCacheError
from descriptors.messages import LookupAnswer, LookupRequest
from descriptors.objects import BodyDigests, PutRequest, ReadRequest
from descriptors.placement import Indices
from descriptors.presence import leading_count
from descriptors.rdma_token import RdmaToken, declined
from descriptors.recompute import advise
from descriptors.storage_api import (
    BodySink,
    ChunksPut,
    DeliveryOutcome,
    ObjectDelivery,
    ObjectStored,
)
from gateway.cluster.agents import UNKNOWN
from gateway.cluster.asking import asked_in_turn
from gateway.cluster.body_delivery import BodyDelivery, NotEncodedError
from gateway.cluster.dividing import divided, made_of
from gateway.cluster.members import QUESTION_S_MAX, ROUNDS_MAX, Members, nobody
from gateway.cluster.memory import MemoryDelivery, cancel_everywhere
from gateway.cluster.split import Holding, descriptor_of, matched_of, of_whole, present_of, tiers_of
from gateway.storage_client import StaleViewError, StorageUnreachableError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class ClusterPrefixes:
    """Implements descriptors.storage_api.PrefixesApi over the members of a cluster."""

    def __init__(self, members: Members) -> None:
        self._members = members

    async def lookup(self, access_key: str, bucket: str, request: LookupRequest) -> LookupAnswer:
        """Each member counts its own chunks of the prefix. Advice assumes the rate of the slowest portion."""
        keys, compute = request.chunk_keys, request.compute
        asked = None if compute is None else replace(compute, bytes_per_s=0.0)

        async def ask(holding: Holding) -> LookupAnswer:
            storage = await self._members.storage(holding.member)

            def portion() -> LookupRequest:
                own = tuple([keys[position] for position in holding.positions.tolist()])
                return LookupRequest(own, request.lease_s, asked, tiers=request.tiers, each=request.each)

            wanted = await made_of(holding, portion)
            looked_up = storage.prefixes.lookup(access_key, bucket, wanted)
            return await self._members.watched(holding.member, looked_up, call_s_max=QUESTION_S_MAX)

        portions, answers = await self._of_each(bucket, keys, ask)
        if request.each:
            present = present_of(portions, [answer.present or () for answer in answers], len(keys))
            return LookupAnswer(
                leading_count(present), None, any(answer.is_partial for answer in answers), None, present
            )
        matched = matched_of(portions, [answer.matched for answer in answers], len(keys))
        is_partial = matched < len(keys) and any(answer.is_partial for answer in answers)
        tiers = tiers_of(portions, [answer.tiers or () for answer in answers], matched) if request.tiers else None
        if compute is None:
            return LookupAnswer(matched, None, is_partial, tiers)
        rates = [
            answer.advice.rate_bytes_per_s * len(keys) / portion.chunk_count
            for portion, answer in zip(portions, answers, strict=True)
            if answer.advice is not None and answer.advice.rate_bytes_per_s is not None
        ]
        return LookupAnswer(matched, advise(matched, compute, min(rates, default=0.0)), is_partial, tiers)

    async def deliver(self, access_key: str, bucket: str, descriptor: Descriptor, sink: BodySink) -> DeliveryOutcome:
        """Have every member deliver its chunks: into the client's memory, or as bodies that are merged. How many come
        is decided before, and whether all can come that must. Chunks that members have encoded, and that the caller
        accepts, come so in bodies; into memory all come exactly.
        """
        accept, descriptor = descriptor.accept, descriptor.exact
        without: set[str] = set(self._members.unreachable)
        if descriptor.on_missing is OnMissing.PREFIX or descriptor.rdma_target is not None:
            count = await self._count(access_key, bucket, descriptor, without)
            if count == 0:
                raise _missing(0)
            descriptor = descriptor.cut_to(count)
        if descriptor.request_id is None:
            descriptor = replace(descriptor, request_id=secrets.token_hex(16))
        else:
            await self.claim(access_key, descriptor.request_id)
        if descriptor.rdma_target is not None:
            return await MemoryDelivery(self._members, access_key, bucket, descriptor, without).run()
        begun_count = 0
        if accept is not None:
            encoded = BodyDelivery(self._members, access_key, bucket, descriptor, accept)
            try:
                return await encoded.run(sink)
            except NotEncodedError as reason:
                _log.info("%s: all chunks come exactly: %s", descriptor.request_id, reason)
            finally:
                await encoded.close()
            begun_count = encoded.begun_count
        delivery = BodyDelivery(self._members, access_key, bucket, descriptor, begun_count=begun_count)
        try:
            return await delivery.run(sink)
        finally:
            await delivery.close()

    async def put_chunks_from(self, access_key: str, bucket: str, descriptor: Descriptor) -> ChunksPut:
        """Raises CallerError(NotImplemented): the client sends bodies instead."""
        problem = "a cluster does not read chunks out of registered memory; put them as bodies"
        raise CallerError(ErrorCode.NOT_IMPLEMENTED, problem, field="rdma_target")

    async def get_object_into(self, access_key: str, request: ReadRequest, token: RdmaToken) -> ObjectDelivery:
        """Raises CallerError(NotImplemented): the client asks for the body instead."""
        raise declined("objects do not go past HTTP in a cluster")

    async def put_object_from(
        self, access_key: str, request: PutRequest, token: RdmaToken, said: BodyDigests
    ) -> ObjectStored:
        """Raises CallerError(NotImplemented): the client sends the body instead."""
        raise declined("objects do not go past HTTP in a cluster")

    async def count_prefix(
        self, access_key: str, bucket: str, descriptor: Descriptor, target: RdmaTarget | None = None
    ) -> int:
        """Each member counts its own chunks, exactly."""
        whole = replace(descriptor, rdma_target=target)
        return await self._count(access_key, bucket, whole, set(self._members.unreachable))

    async def _count(self, access_key: str, bucket: str, descriptor: Descriptor, without: set[str]) -> int:
        """Members that do not know the memory that the descriptor names, or cannot be reached, are added to `without`;
        others count in their place.
        """
        keys = descriptor.chunk_keys

        async def ask(holding: Holding) -> int:
            storage = await self._members.storage(holding.member)
            own = await made_of(
                holding, lambda: descriptor_of(descriptor.unplaced, holding, 0, 1, on_missing=descriptor.on_missing)
            )
            asked = storage.prefixes.count_prefix(access_key, bucket, own, descriptor.rdma_target)
            try:
                return await self._members.watched(holding.member, asked, call_s_max=QUESTION_S_MAX)
            except ChunkUnavailable as error:
                raise of_whole(error, holding.positions) from None

        return matched_of(*await self._of_each(bucket, keys, ask, without), len(keys))

    async def claim(self, access_key: str, request_id: str) -> None:
        """Take a request id once in the cluster: the id has a keeper among the members, as keys have."""

        async def ask() -> None:
            unreachable = self._members.unreachable
            ordered = self._members.placement.order("", request_id)
            ordered = sorted(ordered, key=lambda member: member.name in unreachable)
            await asked_in_turn(self._members, ordered, lambda storage: storage.prefixes.claim(access_key, request_id))

        await self._members.in_latest_view(ask)

    async def cancel(self, access_key: str, request_id: str, writers: tuple[str, ...] = ()) -> None:
        """Stop every portion. Raises ServerError where one of `writers` cannot be asked, which may still write."""
        await cancel_everywhere(self._members, access_key, request_id, writers)

    async def _of_each(
        self,
        bucket: str,
        keys: Sequence[str],
        ask: Callable[[Holding], Awaitable[_T]],
        without: set[str] | None = None,
    ) -> tuple[list[Holding], list[_T]]:
        """The answers of the members to a question that changes nothing. The chunks of a member that does not answer,
        or that does not know the client's memory, are asked of the next in their order; it is added to `without`.
        """
        without = set(self._members.unreachable) if without is None else without
        waiting = await self._elsewhere(bucket, keys, np.arange(len(keys)), without, None)
        portions: list[Holding] = []
        answers: list[_T] = []
        round_count = 0
        while waiting:
            asked = await asyncio.gather(*map(ask, waiting), return_exceptions=True)
            lost: list[Holding] = []
            missing: list[ChunkUnavailable] = []
            unknown: ObjectCacheError | None = None
            is_stale = False
            for holding, answer in zip(waiting, asked, strict=True):
                if isinstance(answer, StaleViewError) and round_count < ROUNDS_MAX:
                    is_stale = True
                    lost.append(holding)
                elif isinstance(answer, StorageUnreachableError):
                    self._members.failed(holding.member)
                    without.add(holding.member.name)
                    lost.append(holding)
                elif isinstance(answer, ObjectCacheError) and answer.code in UNKNOWN:
                    unknown = answer
                    without.add(holding.member.name)
                    lost.append(holding)
                elif isinstance(answer, ChunkUnavailable):
                    missing.append(answer)
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    self._members.succeeded(holding.member)
                    portions.append(holding)
                    answers.append(answer)
            if missing:
                raise min(missing, key=lambda error: len(keys) if error.index is None else error.index)
            if is_stale:
                round_count += 1
                await self._members.membership.refresh()
            waiting = [
                portion
                for holding in lost
                for portion in await self._elsewhere(bucket, keys, holding.positions, without, unknown)
            ]
        return portions, answers

    async def _elsewhere(
        self,
        bucket: str,
        keys: Sequence[str],
        positions: Indices,
        without: set[str],
        unknown: ObjectCacheError | None,
    ) -> list[Holding]:
        try:
            return await divided(self._members.placement, bucket, keys, without, positions)
        except ValueError:
            raise unknown or nobody() from None


def _missing(index: int) -> ChunkUnavailable:
    field = f"chunk_keys[{index}]"
    return ChunkUnavailable(ErrorCode.NO_SUCH_CHUNK, f"{field} is not stored as a chunk", field=field, index=index)
