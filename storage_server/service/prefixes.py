"""PrefixesApi: deliveries of prefixes, and objects that move into and out of registered memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from descriptors.descriptor import Descriptor, OnMissing, RdmaTarget, invalid, require_request_id
from descriptors.errors import ChunkUnavailable
from descriptors.messages import LookupAnswer, LookupRequest
from descriptors.objects import BodyDigests, PutRequest, ReadRequest
from descriptors.presence import leading_count
from descriptors.rdma_token import RdmaToken
from descriptors.recompute import advise
from descriptors.storage_api import (
    BodySink,
    ChunksPut,
    DeliveryOutcome,
    ObjectDelivery,
    ObjectStored,
    Patience,
)
from objectcache.adapters.caller import CALLER
from storage_server.agents.requests import RequestTable
from storage_server.delivery.gather.staging import StagingPool
from storage_server.delivery.pipeline import Pipeline
from storage_server.delivery.registrar import Registrar
from storage_server.delivery.transport.destination import Destination, PayloadLimits
from storage_server.delivery.transport.http import HttpDestination
from storage_server.moves.object_transfers import ObjectTransfers
from storage_server.planning.forms import reading_of, taken_of
from storage_server.planning.source import ChunkSource
from storage_server.settings import StorageSettings


class Prefixes:
    """Implements descriptors.storage_api.PrefixesApi. `staging` holds the payloads of HTTP bodies."""

    def __init__(
        self,
        settings: StorageSettings,
        source: ChunkSource,
        pipeline: Pipeline,
        staging: StagingPool,
        registrar: Registrar,
        requests: RequestTable,
        transfers: ObjectTransfers,
        wrap_destination: Callable[[Destination], Destination],
    ) -> None:
        self._settings = settings
        self._source = source
        self._pipeline = pipeline
        self._staging = staging
        self._registrar = registrar
        self._requests = requests
        self._transfers = transfers
        self._wrap_destination = wrap_destination

    async def lookup(self, access_key: str, bucket: str, request: LookupRequest) -> LookupAnswer:
        """How many chunks of the prefix are stored, and how many of them are worth loading; or which chunks are."""
        CALLER.set(access_key)
        reader = self._pipeline.limits.limited(
            access_key, taken_of(request.accept, bucket, request.chunk_keys, self._settings.losses)
        )
        if request.each:
            present, is_whole = await self._source.present(bucket, request.chunk_keys, request.lease_s, reader)
            self._pipeline.meter.looked_up(len(present), sum(present))
            return LookupAnswer(leading_count(present), None, not is_whole, present=present)
        matched = await self._source.matched(bucket, request.chunk_keys, request.lease_s, reader)
        self._pipeline.meter.looked_up(len(request.chunk_keys), matched)
        is_partial = matched < len(request.chunk_keys) and self._source.is_cut_off(bucket)
        tiers = await self._pipeline.tiers(bucket, request.chunk_keys[:matched], reader) if request.tiers else None
        if request.compute is None:
            return LookupAnswer(matched, None, is_partial, tiers)
        offered = self._pipeline.link.offered_rate_bytes_per_s(access_key)
        return LookupAnswer(matched, advise(matched, request.compute, offered), is_partial, tiers)

    async def deliver(self, access_key: str, bucket: str, descriptor: Descriptor, sink: BodySink) -> DeliveryOutcome:
        """Carry out one descriptor GET: into the sink, or into registered memory when the descriptor names a target.

        Raises CallerError(RequestCancelled) for a cancelled request. When the caller of this method is cancelled
        instead, the delivery stops at once and drains on its own.
        """
        CALLER.set(access_key)
        if descriptor.portion is not None and descriptor.on_missing is not OnMissing.FAIL:
            raise invalid("on_missing", "must be fail in a portion: how many chunks come is decided for the whole")
        target, now_s = descriptor.rdma_target, time.monotonic()
        portion = "" if descriptor.portion is None else descriptor.portion.label
        agent = None
        if target is None:
            request = self._requests.begin(access_key, descriptor.request_id, now_s, portion=portion)
            destination: Destination = self._body(access_key, sink)
        else:
            agent, region = self._registrar.target(access_key, target)
            destination = self._registrar.endpoint(agent).destination(access_key, region, target.offset)
            request = self._requests.begin(
                access_key, descriptor.request_id, now_s=now_s, agent_id=agent.agent_id, region=region, portion=portion
            )
        wrapped = self._wrap_destination(destination)
        work = self._pipeline.run(
            access_key, bucket, descriptor=descriptor, request_id=request.request_id, destination=wrapped, agent=agent
        )
        return await self._requests.run(request, work)

    async def put_chunks_from(self, access_key: str, bucket: str, descriptor: Descriptor) -> ChunksPut:
        """Read every chunk from the descriptor's target and store it; the answer says which chunks failed."""
        CALLER.set(access_key)
        return await self._transfers.put_chunks(access_key, bucket, descriptor)

    async def get_object_into(self, access_key: str, request: ReadRequest, token: RdmaToken) -> ObjectDelivery:
        """Write an object into the client's memory."""
        CALLER.set(access_key)
        return await self._transfers.get_into(access_key, request, token)

    async def put_object_from(
        self, access_key: str, request: PutRequest, token: RdmaToken, said: BodyDigests
    ) -> ObjectStored:
        """Store an object out of the client's memory."""
        CALLER.set(access_key)
        return await self._transfers.put_from(access_key, request, token, said)

    async def count_prefix(
        self, access_key: str, bucket: str, descriptor: Descriptor, target: RdmaTarget | None = None
    ) -> int:
        """Open the chunks as a delivery does, and count them. Raises what a delivery raises before its first byte."""
        CALLER.set(access_key)
        keys, layout, prefix_only = descriptor.chunk_keys, descriptor.layout, descriptor.on_missing is OnMissing.PREFIX
        reader = self._pipeline.limits.limited(access_key, reading_of(descriptor, bucket, self._settings.losses))
        if target is not None:
            self._registrar.target(access_key, target)
        try:
            async with self._source.open_chunks(bucket, keys, layout, prefix_only=prefix_only, reader=reader) as chunks:
                return len(chunks)
        except ChunkUnavailable:
            if not prefix_only:
                raise
            return 0

    async def claim(self, access_key: str, request_id: str) -> None:
        """Take a request id whose request is carried out elsewhere, or in portions."""
        self._requests.claim(access_key, require_request_id(request_id), time.monotonic())

    async def cancel(self, access_key: str, request_id: str, writers: tuple[str, ...] = ()) -> None:
        """Stop a request. Returns when nothing of the request is in flight here."""
        await self._requests.cancel(access_key, require_request_id(request_id), time.monotonic())

    def _body(self, access_key: str, sink: BodySink) -> HttpDestination:
        """The destination that is the body of an HTTP answer."""
        settings = self._settings
        window = self._staging.window(access_key, settings.window_bytes // settings.aggregation_bytes)
        patience = Patience(settings.stall_timeout_s, settings.least_bytes_per_s)
        limits = PayloadLimits(settings.aggregation_bytes, settings.direct_payload_bytes)
        return HttpDestination(sink, window, patience, limits)
