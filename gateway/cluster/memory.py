"""Deliveries into a client's registered memory: every member writes its own slices there by itself."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from descriptors.cluster import Member
from descriptors.descriptor import Descriptor
from descriptors.errors import ChunkUnavailable, ErrorCode, ObjectCacheError, ServerError
from descriptors.placement import Indices
from descriptors.storage_api import BodySink, DeliveryOutcome, DeliveryStart, DeliveryTiming
from gateway.cluster.agents import UNKNOWN, may_still_write
from gateway.cluster.asking import asked_at_once
from gateway.cluster.dividing import divided, made_of
from gateway.cluster.hedging import HedgeStep
from gateway.cluster.members import Members, nobody, stopped
from gateway.cluster.split import Holding, descriptor_of, holdings_at, of_whole
from gateway.storage_client import StaleViewError, StorageUnreachableError

_log = logging.getLogger(__name__)
PACED_FRACTION = 0.1
"""A portion that has waited for links for more than this fraction of its time was paced."""
STALE_MAX = 4
"""How often one portion takes a later view."""
NO_BODY = cast(BodySink, None)
"""Where bytes go to registered memory nothing is written to a body."""


@dataclass(frozen=True, slots=True)
class _Portion:
    """Chunks that one member after the other may be asked for; every time is an attempt with a number of its own."""

    index: int
    count: int
    positions: Indices
    attempts: Iterator[int] = field(default_factory=itertools.count)


class MemoryDelivery:
    """One delivery. The client counts a layer as complete when each portion has reported it, by the portion's number.
    So a portion keeps its number, whoever brings it. A member that was given up may still write, but only bytes that
    are there already: the outcome names it, and the client must not use the memory for anything else before it has
    drained.
    """

    def __init__(
        self, members: Members, access_key: str, bucket: str, descriptor: Descriptor, without: Collection[str]
    ) -> None:
        """`without` names members that cannot be reached, or do not know the client's memory."""
        self._members = members
        self._access_key = access_key
        self._bucket = bucket
        self._descriptor = descriptor
        self._without = frozenset(without)
        self._asked: dict[str, Member] = {}
        self._given_up: set[str] = set()

    async def run(self) -> DeliveryOutcome:
        """Carry it out. When this raises, nothing is in flight any more; it raises ConnectionResetError, which ends the
        client's connection without an answer, where that cannot be known.
        """
        try:
            keys = self._descriptor.chunk_keys
            portions = await divided(self._members.placement, self._bucket, keys, self._without)
        except ValueError:
            raise nobody() from None
        tasks = [
            asyncio.create_task(self._bring(index, len(portions), holding)) for index, holding in enumerate(portions)
        ]
        try:
            outcomes = await asyncio.gather(*tasks)
        except BaseException as error:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await asyncio.shield(asyncio.ensure_future(self._stop(error)))
            raise
        start = outcomes[0].start
        if any(outcome.start.mode is not start.mode for outcome in outcomes):
            problem = "the storage servers of the cluster choose different modes: they must have the same theta_bytes"
            raise ServerError(ErrorCode.INTERNAL_ERROR, problem)
        layout, chunk_count = self._descriptor.layout, self._descriptor.chunk_count
        nbytes = layout.delivery_bytes(chunk_count)
        whole = DeliveryStart(start.request_id, start.mode, chunk_count, nbytes, start.grant)
        self._members.hedging.delivered(nbytes)
        moved_bytes = sum(outcome.transferred_bytes for outcome in outcomes)
        slowest = max(outcomes, key=lambda outcome: _total_s(outcome.timing))
        return DeliveryOutcome(whole, moved_bytes, slowest.timing, tuple(sorted(self._given_up)))

    async def _stop(self, reason: BaseException) -> None:
        """Have every member that was asked drain what it writes, be it a member still or not. Raises
        ConnectionResetError where one cannot be asked.
        """
        request_id = self._descriptor.request_id or ""
        try:
            await cancel_at(self._members, list(self._asked.values()), self._access_key, request_id)
        except ObjectCacheError as error:
            _log.warning("request %s failed, and %s: %r", request_id, error.message, reason)
            raise ConnectionResetError("a storage server may still be moving bytes") from error

    async def _bring(self, index: int, count: int, holding: Holding) -> DeliveryOutcome:
        """Bring one portion, by its member or by those that stand in for it, one after the other."""
        stale_count, member, without = 0, holding.member, set(self._without)
        unknown: ObjectCacheError | None = None
        portion = _Portion(index, count, holding.positions)
        while True:
            try:
                return await self._first(portion, member, without)
            except ChunkUnavailable as error:
                raise of_whole(error, holding.positions) from None
            except StaleViewError:
                stale_count += 1
                if stale_count > STALE_MAX:
                    raise
                await self._members.membership.refresh()
            except StorageUnreachableError as error:
                if not error.has_ended:
                    self._given_up.add(member.id)
                self._members.failed(member)
                without.add(member.name)
            except ObjectCacheError as error:
                if error.code not in UNKNOWN and error.field != "rdma_target.region_id":
                    raise
                unknown = error
                without.add(member.name)  # it has joined or restarted, and does not know the client's memory
            try:
                member = self._next(portion, without)
            except ValueError:
                raise unknown or nobody() from None

    def _next(self, portion: _Portion, without: Collection[str]) -> Member:
        """The member that brings a portion which these do not. Raises ValueError where nobody is left."""
        keys, first = self._descriptor.chunk_keys, portion.positions[:1]
        return holdings_at(self._members.placement, self._bucket, keys, first, frozenset(without))[0].member

    async def _first(self, portion: _Portion, member: Member, without: set[str]) -> DeliveryOutcome:
        """The outcome of a member, or of another one that is asked for the same because the first is slow. Both write
        the same bytes to the same places; whoever is later is stopped, and given up, since it may still be writing.
        Raises what the member failed with, if no other did better.
        """
        hedging, nbytes, began_s = self._members.hedging, self._nbytes_of(portion), time.monotonic()
        asked = {self._asked_of(portion, member): member}
        (own,) = asked
        try:
            limit_s = None if self._members.are_paced(self._agent_id) else hedging.limit_s(HedgeStep.PORTION, nbytes)
            if not (await asyncio.wait(asked, timeout=limit_s))[0]:
                with suppress(ValueError):
                    second = self._next(portion, {*without, member.name})
                    if hedging.begin(nbytes):
                        asked[self._asked_of(portion, second)] = second
            winner = await _first_good(list(asked))
            for task, each in asked.items():
                if task is not winner:
                    self._note_loser(task, each, without)
            if winner is not own:
                hedging.won()
            outcome = winner.result()
            self._learn(outcome.timing, time.monotonic() - began_s if winner is own else None, nbytes)
            return outcome
        finally:
            await stopped(list(asked))

    def _note_loser(self, task: asyncio.Task[DeliveryOutcome], member: Member, without: set[str]) -> None:
        """Give a member up that may still write: it is under way, or nobody says that it has drained. A member that
        could not be reached is added to `without`.
        """
        error = task.exception() if task.done() and not task.cancelled() else None
        is_lost = isinstance(error, StorageUnreachableError) and not error.has_ended
        if not task.done() or is_lost:
            self._given_up.add(member.id)
        if isinstance(error, StorageUnreachableError):
            self._members.failed(member)
            without.add(member.name)

    def _learn(self, timing: DeliveryTiming, seconds: float | None, nbytes: int) -> None:
        """Portions that the server's own link, or the client's, made wait say nothing of what is slow, and another
        member would not bring them sooner.
        """
        is_paced = timing.wait_s > PACED_FRACTION * _total_s(timing)
        self._members.note_paced(self._agent_id, is_paced=is_paced)
        if seconds is not None and not is_paced:
            self._members.hedging.waited(HedgeStep.PORTION, seconds, nbytes)

    @property
    def _agent_id(self) -> str:
        target = self._descriptor.rdma_target
        return "" if target is None else target.agent_id

    def _asked_of(self, portion: _Portion, member: Member) -> asyncio.Task[DeliveryOutcome]:
        holding, attempt = Holding(member, portion.positions), next(portion.attempts)

        async def ask() -> DeliveryOutcome:
            wanted = await made_of(
                holding,
                lambda: descriptor_of(self._descriptor, holding, portion.index, portion.count, attempt=attempt),
            )
            return await self._members.watched(member, self._ask(member, wanted))

        return asyncio.create_task(ask())

    def _nbytes_of(self, portion: _Portion) -> int:
        return self._descriptor.layout.delivery_bytes(len(portion.positions))

    async def _ask(self, member: Member, wanted: Descriptor) -> DeliveryOutcome:
        storage = await self._members.storage(member)
        self._asked[member.id] = member
        try:
            return await storage.prefixes.deliver(self._access_key, self._bucket, wanted, NO_BODY)
        except StaleViewError:
            raise
        except StorageUnreachableError as error:  # it never left, or it has drained
            error.has_ended = True
            raise
        except ConnectionResetError as error:  # it broke, and nobody says that its writes have drained
            raise StorageUnreachableError(error) from error


async def cancel_everywhere(members: Members, access_key: str, request_id: str, writers: tuple[str, ...]) -> None:
    """Stop a request on every member. Raises ServerError(SlowDown) where one of `writers`, by their ids, cannot be
    asked: it may still write.
    """
    for member_id in writers:
        if members.view.by_id(member_id) is None:
            raise may_still_write(member_id)
    must = [member for member in members.view.members if member.id in writers]
    others = [member for member in members.view.members if member.id not in writers]
    asked = [cancel_at(members, [member], access_key, request_id) for member in others]
    results = await asyncio.gather(cancel_at(members, must, access_key, request_id), *asked, return_exceptions=True)
    if isinstance(results[0], BaseException):
        raise results[0]


async def cancel_at(members: Members, asked: list[Member], access_key: str, request_id: str) -> None:
    """Stop a request on these servers. Raises ServerError(SlowDown) where one cannot be asked."""
    told = await asked_at_once(members, asked, lambda storage, _: storage.prefixes.cancel(access_key, request_id), None)
    if told.unreached:
        raise may_still_write(told.unreached[0])
    for error in told.refused.values():
        raise error


async def _first_good(tasks: Sequence[asyncio.Task[DeliveryOutcome]]) -> asyncio.Task[DeliveryOutcome]:
    """The first that ends well; the first of all where none does."""
    pending = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled() and task.exception() is None:
                return task
    return tasks[0]


def _total_s(timing: DeliveryTiming) -> float:
    return timing.plan_s + timing.gather_s + timing.transfer_s + timing.wait_s
