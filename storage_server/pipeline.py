"""The story of one descriptor: plan, mode, schedule, then gather and send payload after payload."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from adapters.threads import HERE_ITEMS_MAX, computed, finished, to_end
from descriptors.descriptor import Descriptor, OnMissing
from descriptors.errors import ChunkUnavailable, ErrorCode
from descriptors.storage_api import DeliveryOutcome, DeliveryStart, DeliveryTiming, Spans
from descriptors.units import KIB
from storage_server.gather.plan import DeliveryPlan, Payload, plan_delivery
from storage_server.gather.read import gather
from storage_server.gather.rows import SourceTable, make_table, spans_of
from storage_server.scheduler.admission import Admission
from storage_server.scheduler.link import Link, Place
from storage_server.scheduler.mode import choose_mode
from storage_server.scheduler.profiles import compute_s
from storage_server.settings import StorageSettings
from storage_server.store.embedded import EmbeddedStore
from storage_server.tiers.dram import DramTier
from storage_server.transport.transfer import Room, Route, Transfer

Gate = Callable[[str, Payload], Awaitable[None]]
"""Called with request id and payload before each gather; tests hold layers back with it."""
GATHERED_AHEAD_MAX = 2
HERE_BYTES_MAX = 256 * KIB
"""Copied in tens of microseconds, which is less than handing it to a thread costs; files may have to be waited for."""


@dataclass(frozen=True, slots=True)
class _Gathering:
    """A payload on its way into `room`, or lying in `spans` already."""

    payload: Payload
    spans: Spans
    room: Room | None
    reading: asyncio.Future[None] | None


async def _abandon(gatherings: Sequence[_Gathering]) -> None:
    """Not to be sent: memory is given back once nobody writes to it."""
    for gathering in gatherings:
        if gathering.reading is not None:
            await finished(gathering.reading)
        if gathering.room is not None:
            gathering.room.release()


class Pipeline:
    """Carries descriptors out over one store, its DRAM tier and one set of gather threads."""

    def __init__(self, settings: StorageSettings, store: EmbeddedStore, dram: DramTier) -> None:
        self._settings = settings
        self._store = store
        self._dram = dram
        self._admission = Admission(settings.deliveries_max)
        self.link = Link(settings.scheduler, settings.staging_bytes // settings.aggregation_bytes // 2)
        self._gatherers = ThreadPoolExecutor(settings.gather_threads, "gather")
        self.gate: Gate | None = None

    def close(self) -> None:
        """Wait for running gathers."""
        self.link.close()
        self._gatherers.shutdown()

    async def run(
        self, access_key: str, bucket: str, descriptor: Descriptor, request_id: str, route: Route
    ) -> DeliveryOutcome:
        """Deliver what `descriptor` names, at the rate the link has for `access_key`.

        Raises ChunkUnavailable (nothing sent yet, or announced as failed), ServerError(TargetUnreachable, SlowDown).
        However it ends, nothing is in flight, and memory, pins and rate are given back.
        """
        clock = _Clock()
        layout = descriptor.layout
        prefix_only = descriptor.on_missing is OnMissing.PREFIX
        async with (
            self._admission.admit(access_key, self.link.drained_s()),
            self._store.reads.open_prefix(
                bucket, descriptor.chunk_keys, layout.chunk_bytes, prefix_only=prefix_only
            ) as chunks,
            self._dram.lent(list(chain.from_iterable(chunks))) as addresses,
        ):
            mode = choose_mode(descriptor.delivery, layout.payload_bytes(len(chunks)), self._settings.theta_bytes)
            is_long = len(addresses) > HERE_ITEMS_MAX
            table = await computed(partial(make_table, chunks, addresses), is_long=is_long)
            payload_bytes_max = route.payload_bytes_max(is_resident=table.is_resident)
            plan = plan_delivery(mode, layout, len(chunks), payload_bytes_max)
            layer_compute_s = compute_s(descriptor, len(chunks), self.link.settings.profiles)

            def note_damage(index: int) -> None:
                self._store.reads.damaged.note(bucket, descriptor.chunk_keys[index], chunks[index])

            async with self.link.place(access_key, plan, layer_compute_s) as place:
                clock.planned()
                return await self._deliver(plan, table, place, request_id, route, clock, note_damage)

    async def _deliver(
        self,
        plan: DeliveryPlan,
        table: SourceTable,
        place: Place,
        request_id: str,
        route: Route,
        clock: _Clock,
        note_damage: Callable[[int], None],
    ) -> DeliveryOutcome:
        transfer = route.make_transfer(plan)
        try:
            grant = await place.admitted()
            clock.waited()
            start = DeliveryStart(request_id, plan.mode, plan.chunk_count, plan.payload_bytes, grant)
            await transfer.start(start)
            await self._send_all(plan, table, transfer, place, request_id, clock, route)
            transferred_bytes = await transfer.finish()
            return DeliveryOutcome(start, transferred_bytes, clock.timing())
        except ChunkUnavailable as missing:
            if missing.code is ErrorCode.CHUNK_CORRUPT:
                note_damage(missing.index or 0)
            await transfer.fail(missing.layer or 0, missing.index or 0)
            raise
        finally:
            await to_end(asyncio.ensure_future(transfer.close()))

    async def _send_all(
        self,
        plan: DeliveryPlan,
        table: SourceTable,
        transfer: Transfer,
        place: Place,
        request_id: str,
        clock: _Clock,
        route: Route,
    ) -> None:
        """Gather later payloads while payload n is sent: one task starts gathers ahead of the sender."""
        is_staged = route.is_staged(is_resident=table.is_resident)
        begun: asyncio.Queue[_Gathering | None] = asyncio.Queue(GATHERED_AHEAD_MAX)
        held: list[_Gathering] = []

        async def begin_all() -> None:
            for index, payload in enumerate(plan.payloads()):
                if self.gate is not None:
                    await self.gate(request_id, payload)
                await place.near(index, is_staged=is_staged)
                gathering = await self._begin(table, payload, transfer, past_cache=route.past_cache)
                held.append(gathering)
                await begun.put(gathering)
            await begun.put(None)

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(begin_all())
                index = 0
                while (gathering := await begun.get()) is not None:
                    if gathering.reading is not None:
                        await asyncio.shield(gathering.reading)
                    clock.gathered()
                    await place.turn(index)
                    clock.waited()
                    held.remove(gathering)
                    await transfer.send(gathering.payload, gathering.spans, gathering.room)
                    place.took()
                    clock.sent()
                    index += 1
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            await to_end(asyncio.ensure_future(_abandon(held)))

    async def _begin(self, table: SourceTable, payload: Payload, transfer: Transfer, *, past_cache: bool) -> _Gathering:
        rows = table.rows(payload)
        room = await transfer.room(payload, is_resident=table.is_resident)
        if room is None:
            return _Gathering(payload, spans_of(rows), None, None)
        spans = np.array([[room.address, payload.nbytes]], dtype=np.int64)
        work = partial(gather, self._store.files, table, payload, rows, room.address, past_cache=past_cache)
        if table.is_resident and payload.nbytes <= HERE_BYTES_MAX:
            work()
            return _Gathering(payload, spans, room, None)
        reading = asyncio.get_running_loop().run_in_executor(self._gatherers, work)
        return _Gathering(payload, spans, room, reading)


class _Clock:
    """Where one delivery's time goes, from its start on."""

    def __init__(self) -> None:
        self._at_s = time.monotonic()
        self._plan_s = self._wait_s = self._gather_s = self._transfer_s = 0.0

    def planned(self) -> None:
        self._plan_s += self._lap()

    def waited(self) -> None:
        """The link was others' until now."""
        self._wait_s += self._lap()

    def gathered(self) -> None:
        """The sender has waited for bytes until now."""
        self._gather_s += self._lap()

    def sent(self) -> None:
        self._transfer_s += self._lap()

    def timing(self) -> DeliveryTiming:
        """What is left, up to now, was spent on the transfer."""
        self.sent()
        return DeliveryTiming(self._plan_s, self._gather_s, self._transfer_s, self._wait_s)

    def _lap(self) -> float:
        before, self._at_s = self._at_s, time.monotonic()
        return self._at_s - before
