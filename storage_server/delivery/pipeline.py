"""The delivery of one descriptor: plan it, choose the mode, wait for the link, then gather and send each payload."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np

from descriptors.descriptor import Descriptor, OnMissing, Portion
from descriptors.errors import ChunkUnavailable, ErrorCode, ObjectCacheError
from descriptors.layer_forms import LayerForms, LossBasis
from descriptors.notices import Mode
from descriptors.storage_api import DeliveryOutcome, DeliveryStart, Grant, Spans
from descriptors.tiers import Tier, TierRuns, runs_of
from descriptors.tracing import Phase
from descriptors.units import KIB, MIB
from objectcache.adapters.caller import CallerTurns
from objectcache.adapters.phases import Phases, delivery_timing
from objectcache.adapters.threads import HERE_ITEMS_MAX, computed, finished, to_end
from storage_server.agents.rules.agents import RegisteredAgent
from storage_server.cache.dram import DramTier
from storage_server.cache.rules.lent import Chunks, Lent, with_forms
from storage_server.delivery.downlinks import Downlinks, Pace
from storage_server.delivery.gather.coming import Coming, with_landed
from storage_server.delivery.gather.passing import DELIVERIES_MAX, NOTHING, Brought, Passing
from storage_server.delivery.gather.read import gather
from storage_server.delivery.link import Link, LinkPlace
from storage_server.delivery.meter import DONE, DeliveryMeter
from storage_server.delivery.progress import Deliveries, Progress
from storage_server.delivery.rules.error_budget import ErrorLimits
from storage_server.delivery.scheduler.admission import DeliveryAdmission
from storage_server.delivery.scheduler.mode import choose_mode
from storage_server.delivery.scheduler.profiles import compute_s
from storage_server.delivery.transport.destination import Destination, Room, Transfer
from storage_server.delivery.uncalibrated import UncalibratedNotes
from storage_server.kernel.data.file_threads import FileThreads
from storage_server.kernel.data.replaceable_threads import CallProgress
from storage_server.kernel.shared_room import SharedRoom
from storage_server.kernel.slow_readers import SlowReaders
from storage_server.planning.block_checksums import checksum_bytes
from storage_server.planning.extent import Extent
from storage_server.planning.forms import Reading, Takes, reading_of
from storage_server.planning.plan import (
    DeliveryPlan,
    Numbers,
    Payload,
    TargetWithGaps,
    placed_order,
    plan_delivery,
    plan_encoded,
    plan_placed,
    plan_portion,
)
from storage_server.planning.rows import Rows, SourceTable, by_file, make_table, spans_of
from storage_server.planning.source import ChunkSource
from storage_server.settings import StorageSettings

GATHERED_AHEAD_MAX = 2
JOINED_HERE_BYTES_MAX = 4 * MIB
"""So many checksums are joined in a millisecond or two."""
SEEK_S = 0.02
"""A gather may take so much longer for each place that it reads: a busy disk that spins needs it."""
COPIED_HERE_BYTES_MAX = 256 * KIB
"""Payloads up to this size are gathered on the event loop when all their bytes are resident: copying them takes tens of
microseconds, less than the hand-over to a thread. Bytes in files always go to a thread, because reads may block.
"""


@dataclass(frozen=True, slots=True)
class _Gathering:
    """A payload that is being gathered into `room`, or lies in `spans` of resident memory already."""

    payload: Payload
    spans: Spans
    room: Room | None
    reading: asyncio.Future[None] | None


@dataclass(slots=True)
class _Delivery:
    """One delivery under way: its descriptor, its destination and its progress."""

    request_id: str
    destination: Destination
    progress: Progress
    portion: Portion | None = None
    pace: Pace = field(default_factory=Pace)
    phases: Phases = field(default_factory=lambda: Phases(Phase.PLAN))
    mode: Mode | None = None
    forms: LayerForms | None = None
    """The forms of the chunks, where the descriptor accepts encoded ones."""
    tells_loss: bool = False
    """Whether the client bounds the loss: others may know no forms that tell one."""
    order: Numbers | None = None
    """The descriptor's index of each chunk, where the chunks go by their places in the target."""
    is_resident: bool = False
    """Whether every chunk lies in the DRAM tier."""
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """The chunks of a delivery that are not there when it begins."""

    coming: Coming | None
    passing: Passing | None

    async def wait_for(self, payload: Payload) -> Brought:
        """Return when the payload can be gathered; `release` what is returned when it was. Raises ChunkUnavailable."""
        if self.coming is not None:
            await self.coming.wait_for(payload)
        return NOTHING if self.passing is None else await self.passing.bring(payload)


def _table_of(chunks: Sequence[Sequence[Extent]], lent: Lent) -> SourceTable:
    return make_table(chunks, with_landed(chain.from_iterable(chunks), lent.addresses), lent.landings)


def _start_of(delivery: _Delivery, plan: DeliveryPlan, grant: Grant) -> DeliveryStart:
    request_id, portion, forms = delivery.request_id, delivery.portion, delivery.forms
    if forms is not None and not delivery.tells_loss:
        forms = forms.without_loss
    if portion is None:
        start = DeliveryStart(request_id, plan.mode, plan.chunk_count, plan.delivery_bytes, grant)
        return replace(start, forms=forms)
    return DeliveryStart(
        request_id=request_id,
        mode=plan.mode,
        chunk_count=portion.chunk_count,
        delivery_bytes=plan.delivery_bytes,
        grant=grant,
        portion=portion.index,
        portions=portion.count,
        forms=forms,
    )


def _plan(
    descriptor: Descriptor,
    mode: Mode,
    chunk_count: int,
    forms: LayerForms | None,
    payload_bytes_max: int,
    landing: TargetWithGaps,
) -> DeliveryPlan:
    layout, portion = descriptor.layout, descriptor.portion
    if forms is not None and not forms.is_exact:
        return plan_encoded(mode, layout, forms.layer_bytes, payload_bytes_max, landing)
    if descriptor.places:
        return plan_placed(layout, descriptor.places[:chunk_count], payload_bytes_max, landing)
    if portion is not None:
        return plan_portion(mode, layout, portion, payload_bytes_max, landing)
    return plan_delivery(mode, layout, chunk_count, payload_bytes_max)


def _index_in_whole(portion: Portion | None, index: int) -> int:
    """The index that a client knows a chunk by."""
    return index if portion is None else portion.positions[index]


def _index_in_descriptor(delivery: _Delivery, index: int) -> int:
    return index if delivery.order is None else int(delivery.order[index])


async def _abandon(gatherings: Sequence[_Gathering]) -> None:
    """Give up gathered payloads that will not be sent. Each gives its memory back when no thread writes to it."""
    for gathering in gatherings:
        if gathering.reading is not None:
            if isinstance(gathering.reading, asyncio.Task):
                gathering.reading.cancel()  # it may wait for its turn
            await finished(gathering.reading)
        if gathering.room is not None:
            gathering.room.release()


class Pipeline:
    """Carries descriptors out over one source of chunks, the DRAM tier before it and one pool of gather threads."""

    def __init__(
        self,
        settings: StorageSettings,
        source: ChunkSource,
        dram: DramTier,
        downlinks: Downlinks,
        slow_readers: SlowReaders,
    ) -> None:
        self._downlinks = downlinks
        self._slow_readers = slow_readers
        self._settings = settings
        self._source = source
        self._dram = dram
        self._admission = DeliveryAdmission(settings.deliveries_max)
        problem = "too many deliveries of chunks that find no room in the cache are under way"
        self._passing_room = SharedRoom(DELIVERIES_MAX, DELIVERIES_MAX // 2, problem)
        self._turns = CallerTurns(1)
        self.limits = ErrorLimits(settings.max_errors, settings.error_budgets, settings.max_losses)
        self._uncalibrated = UncalibratedNotes()
        self.meter = DeliveryMeter()
        self.deliveries = Deliveries()
        self.link = Link(settings.scheduler, settings.staging_bytes // settings.aggregation_bytes // 2)
        self._gatherers = FileThreads(settings.gather_threads, settings.gather_threads)
        self._copiers = ThreadPoolExecutor(settings.gather_threads, "copy")

    def close(self) -> None:
        """Wait for running gathers."""
        self.link.close()
        self._gatherers.close()
        self._copiers.shutdown()

    @property
    def active_count(self) -> int:
        """How many deliveries were admitted and have not ended."""
        return self._admission.active_count

    async def tiers(self, bucket: str, keys: Sequence[str], reader: Takes | None) -> TierRuns:
        """Where these chunks, which are stored, lie for this reader. Nothing counts as used."""
        tiers: list[Tier] = []
        async with aclosing(self._source.resolve(bucket, keys)) as parts:
            async for part in parts:
                async with self._turns.turn():
                    tiers += [self._tier(extents, reader) for extents in part]
                await asyncio.sleep(0)
        return runs_of(tiers)

    def _tier(self, extents: Sequence[Extent] | None, reader: Takes | None) -> Tier:
        if extents is None:
            return Tier.SERVICE
        return Tier.DRAM if self._dram.has(extents, reader) else Tier.DISK

    async def run(
        self,
        access_key: str,
        bucket: str,
        descriptor: Descriptor,
        request_id: str,
        destination: Destination,
        agent: RegisteredAgent | None = None,
    ) -> DeliveryOutcome:
        """Deliver the chunks that `descriptor` names, at the rate the link has for `access_key`, and that the downlink
        of `agent` has for this server; None where nobody's memory is written.

        Raises ChunkUnavailable (nothing has been sent, or the client has had the notice "failed"),
        ServerError(TargetUnreachable, SlowDown). At the end, also after an error, nothing is in flight, and memory,
        pins and rate are given back.
        """
        progress = Progress(request_id, bucket, destination.transport, time.time(), time.monotonic())
        delivery = _Delivery(request_id, destination, progress, descriptor.portion)
        outcome = DONE
        try:
            downlink = nullcontext(Pace()) if agent is None else self._downlinks.pace(agent)
            with self.deliveries.running(progress):
                async with downlink as delivery.pace:
                    return await self._carry_out(delivery, access_key, bucket, descriptor)
        except ObjectCacheError as error:
            outcome = error.code.value
            raise
        except asyncio.CancelledError:
            outcome = ErrorCode.CANCELLED.value
            raise
        except BaseException:
            outcome = ErrorCode.INTERNAL_ERROR.value
            raise
        finally:
            progress.ended(outcome, time.monotonic())
            self.meter.ended(destination.transport, delivery.mode, outcome, delivery.sent_bytes, delivery.phases)

    async def _carry_out(
        self, delivery: _Delivery, access_key: str, bucket: str, descriptor: Descriptor
    ) -> DeliveryOutcome:
        layout, destination = descriptor.layout, delivery.destination
        reading = self.limits.limited(access_key, reading_of(descriptor, bucket, self._settings.losses))
        async with (
            self._admission.admit(access_key, self.link.drained_s()),
            self._opened(delivery, bucket, descriptor, reading) as chunks,
            self._lent(access_key, list(chain.from_iterable(chunks)), reading) as lent,
        ):
            portion = descriptor.portion
            whole_bytes = layout.delivery_bytes(len(chunks) if portion is None else portion.chunk_count)
            delivered: Chunks = chunks
            if descriptor.accept is not None:
                forms, delivered, lent = await computed(
                    partial(with_forms, chunks, lent, layout, reading), is_long=len(chunks) > HERE_ITEMS_MAX
                )
                delivery.forms = forms
                delivery.tells_loss = descriptor.accept.max_loss is not None
                if reading is not None and forms.loss_basis is not LossBasis.CALIBRATED:
                    self._uncalibrated.note(reading)
                if portion is None:  # a portion's mode goes by the whole as if it were exact, so that all choose one
                    whole_bytes = layout.num_layers * int(forms.layer_bytes.sum())
                self.limits.note(access_key, forms.chunk_count, forms.mean_error)
            mode = choose_mode(descriptor.delivery, whole_bytes, self._settings.theta_bytes)
            delivery.mode = mode
            words_bytes = len(chunks) * checksum_bytes(layout.chunk_bytes)
            is_long = len(lent.addresses) > HERE_ITEMS_MAX or words_bytes > JOINED_HERE_BYTES_MAX
            delivery.is_resident = None not in lent.addresses
            table = await computed(partial(_table_of, delivered, lent), is_long=is_long)
            coming = Coming.among(table, delivered)
            table = table if coming is None else coming.table
            passing = Passing.among(table, delivered)
            payload_bytes_max = destination.payload_bytes_max(is_resident=delivery.is_resident)
            if passing is not None:
                payload_bytes_max = passing.payload_bytes_max(payload_bytes_max, layout.per_layer_chunk_bytes)
            plan = _plan(
                descriptor,
                mode,
                chunk_count=len(chunks),
                forms=delivery.forms,
                payload_bytes_max=payload_bytes_max,
                landing=destination.landing,
            )
            delivery.pace.begin(plan.delivery_bytes, whole_bytes)
            layer_compute_s = compute_s(descriptor, len(chunks), self.link.settings.profiles)
            delivery.progress.planned(mode, plan.group_count, plan.delivery_bytes, layer_compute_s)
            async with self.link.place(access_key, plan, layer_compute_s) as place:
                delivery.phases.enter(Phase.WAIT)

                def note_damage(index: int) -> None:
                    key = descriptor.chunk_keys[_index_in_descriptor(delivery, index)]
                    self._source.note_damage(bucket, key, chunks[index])

                async with self._passing_room.holding() as held:
                    if passing is not None:
                        await held.at_least(1)
                    with coming or nullcontext():
                        arrivals = _Arrivals(coming, passing)
                        return await self._transfer(
                            delivery, plan, table=table, place=place, arrivals=arrivals, note_damage=note_damage
                        )

    @asynccontextmanager
    async def _opened(
        self, delivery: _Delivery, bucket: str, descriptor: Descriptor, reading: Reading | None
    ) -> AsyncIterator[Chunks]:
        """The chunks that will come, in the order in which they lie in the target."""
        keys, prefix_only = descriptor.chunk_keys, descriptor.on_missing is OnMissing.PREFIX
        opening = self._source.open_chunks(bucket, keys, descriptor.layout, prefix_only=prefix_only, reader=reading)
        async with opening as chunks:
            if descriptor.places:
                delivery.order = placed_order(descriptor.places[: len(chunks)])
            yield chunks if delivery.order is None else [chunks[index] for index in delivery.order.tolist()]

    @asynccontextmanager
    async def _lent(self, access_key: str, extents: list[Extent], reading: Reading | None) -> AsyncIterator[Lent]:
        """The addresses of what lies in memory. The extents are being read until the block ends."""
        with self._slow_readers.reading(access_key, extents):
            async with self._dram.lent(extents, reading) as lent:
                yield lent

    async def _transfer(
        self,
        delivery: _Delivery,
        plan: DeliveryPlan,
        table: SourceTable,
        place: LinkPlace,
        arrivals: _Arrivals,
        note_damage: Callable[[int], None],
    ) -> DeliveryOutcome:
        """Plan and send. `note_damage` is called with the index of a damaged chunk before the client hears of the
        damage, so that the client's next lookup stops there.
        """
        transfer = delivery.destination.open(plan)
        try:
            grant = await place.admitted()
            delivery.phases.enter(Phase.TRANSFER)
            delivery.progress.rate_bytes_per_s = grant.rate_bytes_per_s
            start = _start_of(delivery, plan, grant)
            await transfer.start(start)
            await self._send_all(delivery, plan, table=table, transfer=transfer, place=place, arrivals=arrivals)
            transferred_bytes = await transfer.finish()
            if delivery.forms is not None:
                self.meter.delivered(delivery.forms)
            return DeliveryOutcome(start, transferred_bytes, delivery_timing(delivery.phases))
        except ChunkUnavailable as missing:
            if missing.code is ErrorCode.CHUNK_CORRUPT:
                note_damage(missing.index or 0)
            index = _index_in_descriptor(delivery, missing.index or 0)
            in_whole = _index_in_whole(delivery.portion, index)
            await transfer.fail(missing.layer or 0, in_whole, tells_client=delivery.portion is None)
            raise missing.at(index) from None
        finally:
            await to_end(asyncio.ensure_future(transfer.close()))

    async def _send_all(
        self,
        delivery: _Delivery,
        plan: DeliveryPlan,
        table: SourceTable,
        transfer: Transfer,
        place: LinkPlace,
        arrivals: _Arrivals,
    ) -> None:
        """Gather later payloads while payload n is sent: a task of its own starts gathers ahead of the sender."""
        phases, destination = delivery.phases, delivery.destination
        is_staged = destination.uses_staging(is_resident=delivery.is_resident)
        begun: asyncio.Queue[_Gathering | None] = asyncio.Queue(GATHERED_AHEAD_MAX)
        held: list[_Gathering] = []

        async def begin_all() -> None:
            for index, payload in enumerate(plan.payloads()):
                brought = await arrivals.wait_for(payload)
                try:
                    await place.wait_to_gather(index, is_staged=is_staged)
                    gathering = await self._begin(delivery, table, payload, transfer)
                except BaseException:
                    brought.release()
                    raise
                brought.release_after(gathering.reading)
                held.append(gathering)
                await begun.put(gathering)
            await begun.put(None)

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(begin_all())
                index = 0
                phases.enter(Phase.GATHER)
                while (gathering := await begun.get()) is not None:
                    payload = gathering.payload
                    if gathering.reading is not None:
                        await asyncio.shield(gathering.reading)
                    phases.enter(Phase.WAIT)
                    await place.wait_to_send(index)
                    await delivery.pace.wait(payload.nbytes)
                    phases.enter(Phase.TRANSFER)
                    held.remove(gathering)
                    await transfer.send(payload, gathering.spans, gathering.room)
                    place.note_sent()
                    delivery.sent_bytes += payload.nbytes
                    delivery.progress.sent_bytes = delivery.sent_bytes
                    if payload.ends_group:
                        delivery.progress.group_sent(time.monotonic())
                    if payload.ends_group and payload.group.index == plan.first_group and plan.mode is Mode.LAYER_MAJOR:
                        self.meter.first_layer(destination.transport, phases)
                    phases.enter(Phase.GATHER)
                    index += 1
                phases.enter(Phase.TRANSFER)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            await to_end(asyncio.ensure_future(_abandon(held)))

    async def _begin(self, delivery: _Delivery, table: SourceTable, payload: Payload, transfer: Transfer) -> _Gathering:
        rows = table.rows(payload)
        room = await transfer.room(payload, is_resident=delivery.is_resident)
        if room is None:
            return _Gathering(payload, spans_of(rows), None, None)
        spans = np.array([[room.address, payload.nbytes]], dtype=np.int64)
        past_cache = delivery.destination.past_cache
        work = partial(self._gather, table, payload, room.address, past_cache=past_cache)
        if table.is_resident and payload.nbytes <= COPIED_HERE_BYTES_MAX:
            work(rows)
            return _Gathering(payload, spans, room, None)
        if table.is_resident:  # no file that may hang
            copying = asyncio.get_running_loop().run_in_executor(self._copiers, work, rows)
            return _Gathering(payload, spans, room, copying)
        files = table.files_of(rows)
        if not self._gatherers.may_hang(files):
            begun = self._gatherers.begin(files, partial(work, rows), CallProgress(len(rows) * SEEK_S))
            if begun is not None:
                return _Gathering(payload, spans, room, begun)
        return _Gathering(payload, spans, room, asyncio.create_task(self._gather_files(table, rows, work)))

    async def _gather_files(self, table: SourceTable, rows: Rows, work: Callable[[Rows], None]) -> None:
        """Gather from files, in turn. Where one of them may hang they are read one by one, so that it is known which
        one.
        """
        parts = by_file(rows) if self._gatherers.may_hang(table.files_of(rows)) else [rows]
        for part in parts:
            await self._gatherers.run_on(table.files_of(part), partial(work, part), CallProgress(len(part) * SEEK_S))

    def _gather(self, table: SourceTable, payload: Payload, address: int, rows: Rows, *, past_cache: bool) -> None:
        gather(self._source, table, payload, rows, address, past_cache=past_cache)
        if table.landings is not None:
            self._dram.note_landed(rows)
