"""A delivery over http whose chunks lie on several members: their bodies are merged into one."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from descriptors.cluster import Member
from descriptors.descriptor import Accept, Descriptor
from descriptors.errors import CallerError, ChunkUnavailable, ErrorCode, ObjectCacheError, ServerError
from descriptors.layer_forms import WrongFormsError
from descriptors.notices import Mode
from descriptors.storage_api import (
    BodySink,
    DeliveryOutcome,
    DeliveryStart,
    Grant,
)
from descriptors.tracing import Phase
from gateway.cluster.dividing import divided, made_of
from gateway.cluster.forms import merged_forms
from gateway.cluster.hedging import HedgeStep
from gateway.cluster.members import ROUNDS_MAX, Members, nobody, stopped
from gateway.cluster.merge import WINDOW_BYTES, Merger, Overtaken, PortionBody, Slices, Window, windows
from gateway.cluster.split import Holding, descriptor_of, of_whole
from gateway.storage_client import StaleViewError, StorageUnreachableError
from objectcache.adapters.phases import Phases, delivery_timing

CUT_MAX = 2
"""How often a member may cut a portion short and be asked again, while it is there."""
_T = TypeVar("_T")


class NotEncodedError(Exception):
    """Members cannot bring encoded chunks as one delivery; nothing was sent."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a delivery is: the layer, the first chunk of the prefix, and the bytes that a portion has to bring now."""

    layer: int
    position: int
    nbytes: int


@dataclass(slots=True)
class _Portion:
    """A portion under way: its holding, its body, and the task that brings it. Its body begins with `first_layer`."""

    holding: Holding
    body: PortionBody
    first_layer: int
    task: asyncio.Task[None]
    view_number: int

    def stop(self) -> None:
        """End it: none of its bytes is put anywhere from now on."""
        self.body.overtake()
        self.task.cancel()


class BodyDelivery:
    """One delivery over http whose portions come from several members. With `accept`, chunks may come encoded. Nobody
    else has the same encoded bytes: where a member then fails, or is slow, nobody takes its place, and the delivery
    fails if it has begun.
    """

    def __init__(
        self,
        members: Members,
        access_key: str,
        bucket: str,
        descriptor: Descriptor,
        accept: Accept | None = None,
        begun_count: int = 0,
    ) -> None:
        self._members = members
        self._access_key = access_key
        self._bucket = bucket
        self._descriptor = descriptor
        self._accept = accept
        self._portions: list[_Portion] = []
        self._without: set[str] = set(members.unreachable)
        self.begun_count = begun_count
        """How many portions of the request have been asked for: members take each number once."""
        self._stale_count = 0
        self._cuts = Counter[str]()
        self._tasks: list[asyncio.Task[None]] = []
        self._mode: Mode | None = None
        self._phases = Phases(Phase.PLAN)

    async def run(self, sink: BodySink) -> DeliveryOutcome:
        """Carry it out. Before the first byte an error is an answer; after it the body is cut short. With `accept`,
        raises NotEncodedError where nothing has been sent, and the same is to be done without.
        """
        try:
            keys = self._descriptor.chunk_keys
            first = await divided(self._members.placement, self._bucket, keys, self._without)
        except ValueError:
            raise nobody() from None
        self._portions = [await self._begin(holding, 0) for holding in first]
        start = await (self._start() if self._accept is None else self._start_encoded())
        layout, is_layered = self._descriptor.layout, start.mode is Mode.LAYER_MAJOR
        layer_bytes = layout.per_layer_chunk_bytes
        sizes = np.full(start.chunk_count, layer_bytes) if start.forms is None else start.forms.layer_bytes
        slices = Slices.of(sizes if is_layered else sizes * layout.num_layers)
        group_count = layout.num_layers if is_layered else 1
        merger, sent_bytes = Merger(slices), 0
        try:
            for window in windows(group_count, slices, WINDOW_BYTES):
                self._phases.enter(Phase.GATHER)
                await self._fill(merger, window)
                self._phases.enter(Phase.TRANSFER)
                if not sent_bytes:
                    await sink.begin(start)
                sent_bytes += window.nbytes
                await sink.write(merger.view(window))
                self._members.hedging.delivered(window.nbytes)
        except (StaleViewError, StorageUnreachableError) as error:
            if self._accept is not None and not sent_bytes:
                raise NotEncodedError(str(error)) from error
            if sent_bytes:
                sink.abort()
            raise
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
        """The start of the whole, when every portion has started."""
        starts: list[DeliveryStart] = []
        waiting = list(self._portions)
        while waiting:
            portion = waiting.pop(0)
            try:
                starts += await self._first(HedgeStep.BEGIN, portion, lambda each: each.body.started(), _Place(0, 0, 0))
            except ObjectCacheError as error:
                waiting[:0] = await self._replace(portion, error, 0, 0)
        self._mode = starts[0].mode
        if any(start.mode is not self._mode for start in starts):
            raise _modes_differ()
        grant = Grant(sum(start.grant.rate_bytes_per_s for start in starts), max(start.grant.epoch for start in starts))
        layout, chunk_count = self._descriptor.layout, self._descriptor.chunk_count
        return DeliveryStart(starts[0].request_id, self._mode, chunk_count, layout.delivery_bytes(chunk_count), grant)

    async def _start_encoded(self) -> DeliveryStart:
        """The start of the whole, with the forms of all chunks."""
        try:
            starts = [await portion.body.started() for portion in self._portions]
            positions = [portion.holding.positions for portion in self._portions]
            bounds_loss = self._accept is not None and self._accept.max_loss is not None
            told = [start.forms for start in starts]
            forms = merged_forms(positions, told, self._descriptor, bounds_loss=bounds_loss)
        except (StaleViewError, StorageUnreachableError, WrongFormsError) as error:
            raise NotEncodedError(str(error)) from error
        except CallerError as error:
            if error.field in ("accept", "flags", "max_loss", "version"):  # a member of the release before
                raise NotEncodedError(str(error)) from error
            raise
        except ChunkUnavailable as error:
            raise NotEncodedError(str(error)) from error
        if forms.is_exact:  # others have the same bytes
            self._accept = None
        mode = self._mode = starts[0].mode
        if any(start.mode is not mode for start in starts):
            raise _modes_differ()
        grant = Grant(sum(start.grant.rate_bytes_per_s for start in starts), max(start.grant.epoch for start in starts))
        nbytes = self._descriptor.layout.num_layers * int(forms.layer_bytes.sum())
        return DeliveryStart(starts[0].request_id, mode, forms.chunk_count, nbytes, grant, forms=forms)

    async def _fill(self, merger: Merger, window: Window) -> None:
        """Take a window's slices from every portion. One that fails is asked of others, which begin with the window."""

        async def take(each: _Portion) -> None:
            await merger.take(window, each.body, each.holding.positions, each.first_layer)

        layer, position = (window.group, 0) if self._mode is Mode.LAYER_MAJOR else (0, window.first)
        waiting = list(self._portions)
        for portion in waiting:  # all at once, and awaited one after the other
            merger.want(window, portion.body, portion.holding.positions, portion.first_layer)
        while waiting:
            portion = waiting.pop(0)
            place = _Place(layer, position, merger.nbytes_of(window, portion.holding.positions))
            try:
                if place.nbytes:
                    await self._first(HedgeStep.WINDOW, portion, take, place)
            except ObjectCacheError as error:
                waiting[:0] = await self._replace(portion, error, layer, position)

    async def _first(
        self, step: HedgeStep, portion: _Portion, ask: Callable[[_Portion], Awaitable[_T]], place: _Place
    ) -> list[_T]:
        """The answer of a portion. Where it is slow, others are asked for the same from that place on, and the answers
        of whoever is first are taken: the others are stopped. Raises what the portion failed with, if no others did
        better.
        """
        if self._accept is not None:
            return [await ask(portion)]
        hedging, began_s = self._members.hedging, time.monotonic()
        races: list[asyncio.Task[list[_T] | None]] = []

        def begin_race() -> None:
            races.append(asyncio.create_task(self._race(portion, ask, place)))

        # no task for the portion itself: nearly all portions come in time, and a task for each window costs a tenth
        limit_s = hedging.limit_s(step)
        timer = None if limit_s is None else asyncio.get_running_loop().call_later(limit_s, begin_race)
        try:
            answer = await ask(portion)
            if races and races[0].done() and (overtook := races[0].result()) is not None:
                return overtook
            hedging.waited(step, time.monotonic() - began_s)
            return [answer]
        except (ObjectCacheError, Overtaken):
            answers = await races[0] if races else None
            if answers is None:
                raise
            return answers
        finally:
            if timer is not None:
                timer.cancel()
            await stopped(races)

    async def _race(
        self, portion: _Portion, ask: Callable[[_Portion], Awaitable[_T]], place: _Place
    ) -> list[_T] | None:
        """Ask others for what a slow portion has to bring, and have them take over if they are first. None where there
        are no others, or they fail.
        """
        others: list[_Portion] = []
        asked: list[asyncio.Future[_T]] = []
        try:
            others = await self._hedge(portion, place)
            asked = [asyncio.ensure_future(ask(other)) for other in others]
            answers = await _all_of(asked)
            if answers:
                self._take_over(portion, others)
                self._members.hedging.won()
                others = []
            return answers or None
        except ObjectCacheError:
            return None
        finally:
            for other in others:
                other.stop()
            await stopped(asked)

    async def _hedge(self, portion: _Portion, place: _Place) -> list[_Portion]:
        """Ask others for a slow portion's chunks from that place on; none where that would cost too much, or where
        there are no others.
        """
        positions = portion.holding.positions[portion.holding.positions >= place.position]
        without, keys = self._without | {portion.holding.member.name}, self._descriptor.chunk_keys
        try:
            others = await divided(self._members.placement, self._bucket, keys, without, positions)
        except ValueError:
            return []
        if not self._members.hedging.begin(place.nbytes):
            return []
        return [await self._begin(holding, place.layer) for holding in others]

    async def _begin(self, holding: Holding, first_layer: int) -> _Portion:
        """Ask a member for its holding, from this layer on."""
        index, self.begun_count = self.begun_count, self.begun_count + 1

        def portion() -> Descriptor:
            wanted = descriptor_of(
                self._descriptor, holding, index=index, count=index + 1, mode=self._mode, first_layer=first_layer
            )
            return wanted.accepting(self._accept)

        wanted = await made_of(holding, portion)
        storage = await self._members.storage(holding.member)
        body = PortionBody(partial(self._members.require_alive, holding.member))

        async def bring() -> None:
            try:
                await storage.prefixes.deliver(self._access_key, self._bucket, wanted, body)
                body.fail(StorageUnreachableError(ConnectionError("a portion that ended early")))
            except Exception as error:
                body.fail(error)

        task = asyncio.create_task(bring())
        self._tasks.append(task)
        return _Portion(holding, body, first_layer, task, self._members.view.number)

    async def _replace(self, portion: _Portion, reason: ObjectCacheError, layer: int, position: int) -> list[_Portion]:
        """Ask others for the chunks of a portion that failed, from this layer and this chunk of the prefix on. Raises
        the reason where others would say the same.
        """
        if isinstance(reason, ChunkUnavailable):
            raise of_whole(reason, portion.holding.positions) from None
        if self._accept is not None:
            raise reason
        member = portion.holding.member
        if isinstance(reason, StaleViewError) and self._stale_count < ROUNDS_MAX:
            if self._members.view.number <= portion.view_number:  # no other portion has looked since
                self._stale_count += 1
                await self._members.membership.refresh()
        elif isinstance(reason, StorageUnreachableError):
            await self._note_cut(member)
        else:
            raise reason
        positions = portion.holding.positions[portion.holding.positions >= position]
        try:
            keys = self._descriptor.chunk_keys
            others = await divided(self._members.placement, self._bucket, keys, self._without, positions)
        except ValueError:
            raise nobody() from reason
        begun = [await self._begin(holding, layer) for holding in others]
        self._take_over(portion, begun)
        return begun

    def _take_over(self, portion: _Portion, others: list[_Portion]) -> None:
        """Others bring what is left of a portion, which is stopped: its reader is told."""
        portion.stop()
        at = self._portions.index(portion)
        self._portions[at : at + 1] = others

    async def _note_cut(self, member: Member) -> None:
        """A member that is there may have cut a body for a reason of its own: it is asked again, a few times."""
        self._cuts[member.name] += 1
        try:
            await self._members.require_alive(member)
        except StorageUnreachableError:
            self._members.failed(member)
            self._without.add(member.name)
            return
        if self._cuts[member.name] > CUT_MAX:
            self._without.add(member.name)


async def _all_of(asked: Sequence[asyncio.Future[_T]]) -> list[_T] | None:
    """All results; None where one of them failed."""
    if asked:
        await asyncio.wait(asked)
    failures = [each.cancelled() or each.exception() is not None for each in asked]
    if any(failures):
        return None
    return [each.result() for each in asked]


def _modes_differ() -> ServerError:
    problem = "the storage servers of the cluster choose different modes: they must have the same theta_bytes"
    return ServerError(ErrorCode.INTERNAL_ERROR, problem)
