"""The tier's lookups, loads and stores, in threads of their own, so that the scheduler never waits. Nothing here raises
for what the store does: a failure is a miss, or a store that did not happen.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from descriptors.descriptor import CHUNK_COUNT_MAX, Delivery, OnMissing
from descriptors.errors import ChunkUnavailable, ObjectCacheError
from descriptors.layout import ChunkLayout
from nixl_client.client import Client
from nixl_client.connectors.counters import Counters
from nixl_client.connectors.load_staging import LoadStaging
from nixl_client.connectors.vllm_tier.jobs import TierJob, TierJobEnd, TierJobs
from nixl_client.connectors.vllm_tier.options import TierOptions
from nixl_client.connectors.vllm_tier.rules.naming import TierSpace, group_of, object_name
from nixl_client.connectors.vllm_tier.rules.rows import Bytes, RowForm
from nixl_client.connectors.vllm_tier.rules.verdicts import Question
from nixl_client.fetch.layer_fetch import LayerFetch
from nixl_client.session.retries import Retries
from nixl_client.transports.http import UnansweredError
from objectcache.adapters.breaker import Breaker

LOOKUP_THREADS, LOAD_THREADS, STORE_THREADS = 4, 4, 2
PUT_CHUNKS = 32
"""Chunks that are put before loads may go first again."""
LOADS_FIRST_S = 2.0
"""A store waits no longer for loads to end."""
TRIES_MAX = 4
"""How often a load is asked for again without a chunk that turned out to be missing or damaged."""
SETTLE_PAUSE_S = 1.0
CLOSE_S = 5.0
FAILURES = (ObjectCacheError, OSError, TimeoutError, ValueError, RuntimeError)
_log = logging.getLogger(__name__)
_Entry = tuple[int, bytes]
"""A slot of the primary tier, and the key of its chunk."""


class TierTraffic:
    """`rows` are the primary tier's slots, uint8 of shape (slots, row bytes), over the flat array `region`; `forms` has
    how each group uses a row, None for groups that are not stored. `client` makes clients of the bucket.
    """

    def __init__(
        self,
        options: TierOptions,
        space: TierSpace,
        forms: Mapping[int, RowForm | None],
        region: Bytes,
        row_bytes: int,
    ) -> None:
        self.counters = Counters()
        self.book = TierJobs()
        self.answers: queue.SimpleQueue[tuple[Question, Sequence[bool]]] = queue.SimpleQueue()
        """The store's answers, for the thread of the scheduler."""
        self._options = options
        self._space = space
        self._prefix = space.prefix
        self._forms = forms
        self._region = region
        self._row_bytes = row_bytes
        self._breaker, self._store_breaker = _breaker(options), _breaker(options)
        self._lock = threading.Lock()
        """Guards the breakers, which are asked from all threads."""
        self._is_closing = threading.Event()
        self._loads_idle = threading.Event()
        self._loads_idle.set()
        self._load_count = 0
        quick = Retries.of_engines
        self.lookups = Client(options.endpoint, options.bucket, timeout_s=options.lookup_timeout_s, retries=quick())
        self._loads = Client(
            options.endpoint,
            options.bucket,
            transport=options.transport,
            http_connections=options.http_connections,
            timeout_s=options.load_timeout_s,
            fetch_timeout_s=options.load_timeout_s,
            downlink_bytes_per_s=options.downlink_bytes_per_s or None,
            retries=quick(),
        )
        self._stores = Client(options.endpoint, options.bucket, timeout_s=options.store_timeout_s)
        self._staging = LoadStaging(self._loads, options.staging_bytes, LOAD_THREADS)
        self._workers = [
            _Workers("lookup", LOOKUP_THREADS),
            _Workers("load", LOAD_THREADS),
            _Workers("store", STORE_THREADS),
        ]
        self._lookers, self._loaders, self._storers = self._workers

    def rename(self, space: TierSpace) -> None:
        """Ask for, load and store objects of this space from now on."""
        self._space, self._prefix = space, space.prefix

    def warm(self) -> None:
        """Make the servers acquainted with the primary tier before the first load has to wait for that; elsewhere."""
        self._loaders.submit(partial(self._loads.register_buffer, self._region))

    @property
    def is_resting(self) -> bool:
        """Whether nothing is asked for, since the store did not answer a moment ago."""
        with self._lock:
            return self._breaker.is_open(time.monotonic())

    def ask(self, question: Question) -> None:
        """Ask which of these chunks are stored; the answer goes to `answers`."""
        if self.is_resting:
            self.answers.put((question, [False] * len(question.keys)))
        else:
            self._lookers.submit(partial(self._look_up, question))

    def load(self, job: TierJob) -> None:
        """Load chunks into their slots."""
        if self.is_resting:
            self.refuse(job)
            return
        self.book.begin(job)
        with self._lock:
            self._load_count += 1
            self._loads_idle.clear()
        self._loaders.submit(partial(self._load, job))

    def store(self, job: TierJob) -> None:
        """Store those chunks that are missing, unless too many wait already."""
        is_full = self.book.waiting_chunks + len(job.keys) > self._options.store_queue_chunks
        self.book.begin(job)
        if is_full or not self._options.store:
            self._drop(job)
        else:
            self._storers.submit(partial(self._store, job))

    def skip(self, job: TierJob) -> None:
        """A job of chunks that are not to be stored."""
        self.book.begin(job)
        self.book.end(TierJobEnd(job, frozenset(job.keys)))

    def refuse(self, job: TierJob) -> None:
        """A job of chunks that cannot be loaded."""
        self.book.begin(job)
        self.book.end(TierJobEnd(job, frozenset()))

    def cancel_waiting(self) -> None:
        """Drop stores that have not begun."""
        for work in self._storers.cancel_waiting():
            self._drop(work.args[0])

    def close(self) -> None:
        """End the threads: at once those that wait, and what is under way at its deadline. May be called again."""
        if self._is_closing.is_set():
            return
        self.cancel_waiting()
        self.book.wait_idle(self._options.drain_s)
        self._is_closing.set()
        for workers in self._workers:
            workers.close(CLOSE_S)
        if self.book.running_count:
            _log.warning("%d transfers are still under way: their memory is kept", self.book.running_count)
            return
        for close in (self._staging.close, self.lookups.close, self._loads.close, self._stores.close):
            try:
                close()
            except FAILURES as error:
                _log.warning("closing: %s", error)
        self._region = np.empty(0, dtype=np.uint8)

    def _look_up(self, question: Question) -> None:
        found: list[bool] = []
        began_s = time.monotonic()
        names = [object_name(self._prefix, key) for key in question.keys]
        try:
            for first in range(0, 0 if self.is_resting else len(names), CHUNK_COUNT_MAX):
                found += self.lookups.present(names[first : first + CHUNK_COUNT_MAX], self._options.lease_s)
        except FAILURES as error:
            self._failed("lookup", error, self._breaker)
            self.counters.add(lookup_failures=1)
        else:
            self._succeeded(self._breaker)
        found += [False] * (len(names) - len(found))
        self.counters.add(
            lookups=1, looked_up_chunks=len(names), found_chunks=sum(found), lookup_s=time.monotonic() - began_s
        )
        self.answers.put((question, found))

    def _load(self, job: TierJob) -> None:
        began_s = time.monotonic()
        loaded: set[bytes] = set()
        nbytes = 0
        try:
            for form, entries in self._by_form(job):
                move = self._load_front if form.is_front else self._load_packed
                there = move(form, entries, began_s + self._options.load_timeout_s)
                loaded |= there
                nbytes += len(there) * form.nbytes
        except Exception as error:
            if not isinstance(error, FAILURES):
                _log.exception("load")
            self._failed("load", error, self._breaker)
            self.counters.add(load_failures=1)
        finally:
            with self._lock:
                self._load_count -= 1
                if not self._load_count:
                    self._loads_idle.set()
            seconds = time.monotonic() - began_s
            self.counters.add(loads=1, loaded_chunks=len(loaded), loaded_bytes=nbytes, load_s=seconds)
            self.counters.add(lost_chunks=len(job.keys) - len(loaded))
            self.book.end(TierJobEnd(job, frozenset(loaded), nbytes, seconds))

    def _by_form(self, job: TierJob) -> list[tuple[RowForm, list[_Entry]]]:
        """The chunks by how they lie, in the order of the prompt: rows whose first bytes are used go together where
        these are as many, whichever group they are of.
        """
        by_form: dict[object, tuple[RowForm, list[_Entry]]] = {}
        for slot, key in zip(job.slots, job.keys, strict=True):
            group = group_of(key)
            form = self._forms[group]
            if form is not None:
                kind: object = form.nbytes if form.is_front else ("packed", group)
                by_form.setdefault(kind, (form, []))[1].append((slot, key))
        return list(by_form.values())

    def _load_front(self, form: RowForm, entries: Sequence[_Entry], deadline_s: float) -> set[bytes]:
        """Straight into the slots. Returns when nobody writes there any more."""

        def fetch(part: Sequence[_Entry]) -> int:
            places = [slot * self._row_bytes for slot, _ in part]
            fetch = self._begin(form, part, self._region, places)
            try:
                return fetch.wait(max(0.0, deadline_s - time.monotonic())).chunk_count
            finally:
                self._settle(fetch)

        return self._load_all(entries, fetch, deadline_s)

    def _load_packed(self, form: RowForm, entries: Sequence[_Entry], deadline_s: float) -> set[bytes]:
        """Into a buffer of ours, and from there to where the used bytes of a row lie."""
        step = min(max(1, self._options.staging_bytes // form.nbytes), CHUNK_COUNT_MAX)
        rows = self._rows
        loaded: set[bytes] = set()

        def fetch(part: Sequence[_Entry]) -> int:
            buffer = self._staging.take(len(part) * form.nbytes, deadline_s)
            try:
                fetch = self._begin(form, part, buffer, ())
            except BaseException:
                self._staging.give(buffer)
                raise
            try:
                count = fetch.wait(max(0.0, deadline_s - time.monotonic())).chunk_count
                packed = buffer[: count * form.nbytes].reshape(count, form.nbytes)
                form.unpack(packed, rows, np.array([slot for slot, _ in part[:count]], dtype=np.int64))
                return count
            finally:
                self._staging.end(buffer, fetch)

        for first in range(0, len(entries), step):
            loaded |= self._load_all(entries[first : first + step], fetch, deadline_s)
        return loaded

    def _begin(self, form: RowForm, part: Sequence[_Entry], buffer: Bytes, places: Sequence[int]) -> LayerFetch:
        self.counters.add(fetches=1)
        return self._loads.fetch(
            [object_name(self._prefix, key) for _, key in part],
            ChunkLayout(1, 1, form.nbytes),
            buffer,
            delivery=Delivery.CHUNK_MAJOR,
            on_missing=OnMissing.PREFIX,
            places=places,
        )

    def _load_all(
        self, entries: Sequence[_Entry], fetch: Callable[[Sequence[_Entry]], int], deadline_s: float
    ) -> set[bytes]:
        """Fetch these chunks; and again, without it, where one turns out to be missing or damaged."""
        loaded: set[bytes] = set()
        left = list(entries)
        for _ in range(TRIES_MAX):
            try:
                count = fetch(left)
            except ChunkUnavailable as error:
                index = error.index or 0
                _log.warning("chunk %s cannot be loaded: %s", object_name(self._prefix, left[index][1]), error)
                del left[index]
                count = 0
            loaded |= {key for _, key in left[:count]}
            left = left[count:]
            if count and left:  # the first of them is not stored any more, and it may not be the only one
                names = [object_name(self._prefix, key) for _, key in left]
                there = self.lookups.present(names, timeout_s=max(0.1, deadline_s - time.monotonic()))
                left = [entry for entry, is_there in zip(left, there, strict=True) if is_there]
            if not left:
                break
        self._succeeded(self._breaker)
        return loaded

    def _settle(self, fetch: LayerFetch) -> None:
        """Return when nobody writes into the slots of this fetch, however long that takes: to give them back sooner
        would let a server that hangs write into another request's KV when it goes on.
        """
        has_told = False
        while not fetch.is_settled and not self._is_closing.is_set():
            try:
                fetch.cancel()
            except FAILURES as error:
                with self._lock:
                    self._breaker.failed(time.monotonic())
                if not has_told:
                    _log.warning("the storage server hangs, and may still write: its slots wait for it: %s", error)
                has_told = True
                self._is_closing.wait(SETTLE_PAUSE_S)

    def _store(self, job: TierJob) -> None:
        began_s = time.monotonic()
        stored: set[bytes] = set()
        nbytes = 0
        try:
            with self._lock:
                is_open = self._store_breaker.is_open(began_s)
            if is_open or began_s - job.began_s > self._options.store_wait_s:
                self._drop(job)
                return
            entries = [each for each in zip(job.slots, job.keys, strict=True) if self._forms[group_of(each[1])]]
            stored |= set(job.keys) - {key for _, key in entries}  # of groups that are never stored
            names = [object_name(self._prefix, key) for _, key in entries]
            present = self._stores.present(names) if names else ()
            missing = [entry for entry, is_there in zip(entries, present, strict=True) if not is_there]
            stored |= {key for _, key in entries} - {key for _, key in missing}
            self.counters.add(stored_already_chunks=len(entries) - len(missing))
            for first in range(0, len(missing), PUT_CHUNKS):
                self._loads_idle.wait(LOADS_FIRST_S)
                part = missing[first : first + PUT_CHUNKS]
                bodies = self._bodies(part)
                self._stores.put_chunks(
                    [object_name(self._prefix, key) for _, key in part],
                    bodies,
                    content_class=job.content_class,
                    metadata=self._space.metadata(),
                )
                stored |= {key for _, key in part}
                nbytes += sum(body.nbytes for body in bodies)
                self.counters.add(stored_chunks=len(part))
            self._succeeded(self._store_breaker)
        except Exception as error:
            if not isinstance(error, FAILURES):
                _log.exception("store")
            self._failed("store", error, self._store_breaker)
            self.counters.add(store_failures=1)
        finally:
            self.counters.add(stored_bytes=nbytes)
            self.book.end(TierJobEnd(job, frozenset(stored), nbytes, time.monotonic() - began_s))

    def _bodies(self, part: Sequence[_Entry]) -> list[Bytes]:
        """The objects: parts of the slots where these lie as they are stored, else copies of what is used."""
        rows = self._rows
        by_group: dict[int, list[int]] = defaultdict(list)
        for index, (_, key) in enumerate(part):
            by_group[group_of(key)].append(index)
        bodies: dict[int, Bytes] = {}
        for group, indexes in by_group.items():
            form = self._forms[group]
            assert form is not None
            slots = [part[index][0] for index in indexes]
            if form.is_front:
                bodies |= {index: rows[slot, : form.nbytes] for index, slot in zip(indexes, slots, strict=True)}
            else:
                bodies |= dict(zip(indexes, form.pack(rows[slots]), strict=True))
        return [bodies[index] for index in range(len(part))]

    @property
    def _rows(self) -> Bytes:
        return self._region.reshape(-1, self._row_bytes)

    def _drop(self, job: TierJob) -> None:
        self.counters.add(dropped_chunks=len(job.keys))
        self.book.end(TierJobEnd(job, frozenset()))

    def _failed(self, what: str, error: Exception, breaker: Breaker) -> None:
        """A refusal says nothing against the store's being there."""
        if not isinstance(error, ObjectCacheError) or isinstance(error, UnansweredError):
            with self._lock:
                breaker.failed(time.monotonic())
        _log.warning("%s: %s", what, error)

    def _succeeded(self, breaker: Breaker) -> None:
        with self._lock:
            breaker.succeeded()


class _Workers:
    """A few threads with one queue, which hold no exit of the process up."""

    def __init__(self, name: str, count: int) -> None:
        self._changed = threading.Condition()
        self._waiting: list[partial[Any]] = []
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"objectcache-tier-{name}", daemon=True) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: partial[Any]) -> None:
        """Do this when a thread is free."""
        with self._changed:
            self._waiting.append(work)
            self._changed.notify()

    def cancel_waiting(self) -> list[partial[Any]]:
        """Take back what has not begun."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
            return waiting

    def close(self, timeout_s: float) -> None:
        """Begin nothing more, and wait for what is under way."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                work = self._waiting.pop(0)
            try:
                work()
            except Exception as error:
                _log.warning("%s", error)
            del work


def _breaker(options: TierOptions) -> Breaker:
    return Breaker(1, options.retry_s, max(options.retry_s, 60.0))
