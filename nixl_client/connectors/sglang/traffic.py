"""The back-end's lookups, loads and stores: what SGLang's storage threads wait for. Nothing here raises for what the
store does: a failure is a miss, or a store that did not happen.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from descriptors.descriptor import CHUNK_COUNT_MAX, Delivery, OnMissing
from descriptors.errors import ChunkUnavailable, ObjectCacheError
from descriptors.layout import ChunkLayout
from nixl_client.client import Client
from nixl_client.connectors.counters import Counters
from nixl_client.connectors.load_staging import LoadStaging
from nixl_client.connectors.sglang.options import HiCacheOptions
from nixl_client.connectors.sglang.rules.parts import portions
from nixl_client.connectors.startup import say
from nixl_client.fetch.layer_fetch import LayerFetch
from nixl_client.session.retries import Retries
from nixl_client.transports.http import UnansweredError
from nixl_client.transports.transport import Transport
from objectcache.adapters.breaker import Breaker

STAGING_BUFFERS = 4
"""Two loads at a time, each with a buffer that is filled while another one is emptied."""
PUT_OBJECTS = 32
"""Objects that are put before loads may go first again."""
LOADS_FIRST_S = 2.0
"""A store waits no longer for loads to end."""
PROBE_BYTES = 4096
FAILURES = (ObjectCacheError, OSError, TimeoutError, ValueError, RuntimeError)
_log = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]
Write = Callable[[int, Bytes], None]
"""Takes the number of an object, and rows of the objects from it on: uint8 of shape (objects, bytes)."""
Bodies = Callable[[Sequence[int]], Sequence[Bytes]]
"""Gives the bytes of the objects with these numbers, which stay as they are until it is called again."""


class PageTraffic:
    """Requests for one bucket. Blocking, and safe from any thread."""

    def __init__(self, options: HiCacheOptions) -> None:
        self.counters = Counters()
        self._options = options
        self._lock = threading.Lock()
        """Guards the breakers, which are asked from several threads."""
        self._breaker, self._store_breaker = _breaker(options), _breaker(options)
        self._is_closing = threading.Event()
        self._loads_idle = threading.Event()
        self._loads_idle.set()
        self._load_count = 0
        self._probe: Bytes | None = None
        quick = Retries.of_engines
        self._lookups = Client(options.endpoint, options.bucket, timeout_s=options.lookup_timeout_s, retries=quick())
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
        self._stores = Client(options.endpoint, options.bucket, timeout_s=options.store_timeout_s, retries=quick())
        self._staging = LoadStaging(self._loads, options.staging_bytes, STAGING_BUFFERS)

    def introduce(self, about: str) -> None:
        """Say whether the store is there, and how loads will go; make the bucket where it is missing. Raises
        nothing.
        """
        try:
            if say(self._lookups, about) and self._is_staged():
                self._staging.warm()
        except Exception as error:
            _log.warning("the store is not looked at: %s", error)

    def leading(self, names: Sequence[str]) -> int:
        """How many objects, from the first, are stored. They are kept from eviction for the time of the lease."""
        return self._ask(names, lambda part: self._lookups.lookup(part, self._options.lease_s))

    def present(self, names: Sequence[str]) -> list[bool]:
        """For each object whether it is stored. Those that are, are kept from eviction for the time of the lease."""
        found: list[bool] = []

        def ask(part: Sequence[str]) -> int:
            found.extend(self._lookups.present(part, self._options.lease_s))
            return len(part)

        self._ask(names, ask)
        return found + [False] * (len(names) - len(found))

    def load_into(self, names: Sequence[str], nbytes: int, memory: Bytes, places: Sequence[int]) -> int:
        """Load these objects of `nbytes` each, to the places given in `memory`; how many, from the first, are there.
        Nobody writes into the memory any more on return.
        """

        def write(first: int, rows: Bytes) -> None:
            for place, row in zip(places[first : first + len(rows)], rows, strict=True):
                memory[place : place + nbytes] = row

        def load(deadline_s: float) -> int:
            if self._is_staged():
                return self._load_rows(names, nbytes, write, deadline_s)
            return self._load_direct(names, nbytes, memory, places, deadline_s)

        return self._load(names, nbytes, load)

    def load_rows(self, names: Sequence[str], nbytes: int, write: Write) -> int:
        """Load these objects of `nbytes` each into buffers of our own, and `write` them on; how many, from the first,
        were written.
        """
        return self._load(names, nbytes, lambda deadline_s: self._load_rows(names, nbytes, write, deadline_s))

    def store(
        self, names: Sequence[str], bodies: Bodies, metadata: Mapping[str, str], at_once: int = PUT_OBJECTS
    ) -> list[bool]:
        """Store those of these objects that are missing, `at_once` at most at a time; `bodies` gives their bytes. For
        each whether it is stored now. After a failure, and past the deadline, no further object is begun.
        """
        is_stored = [False] * len(names)
        deadline_s = time.monotonic() + self._options.store_timeout_s
        if not names or not self._options.store or self._is_open(self._store_breaker):
            self.counters.add(dropped_objects=len(names))
            return is_stored
        try:
            is_stored = list(self._stores.present(names, timeout_s=self._left_s(deadline_s)))
            missing = [number for number, is_there in enumerate(is_stored) if not is_there]
            self.counters.add(stored_already_objects=len(names) - len(missing))
            for first in range(0, len(missing), at_once):
                self._loads_idle.wait(min(LOADS_FIRST_S, self._left_s(deadline_s)))
                part = missing[first : first + at_once]
                taken = bodies(part)
                self._stores.put_chunks(
                    [names[number] for number in part],
                    taken,
                    content_class=self._options.content_class,
                    metadata=metadata,
                    timeout_s=self._left_s(deadline_s),
                )
                for number in part:
                    is_stored[number] = True
                self.counters.add(stored_objects=len(part), stored_bytes=sum(each.nbytes for each in taken))
            self._succeeded(self._store_breaker)
        except FAILURES as error:
            self._failed("store", error, self._store_breaker)
            self.counters.add(store_failures=1, dropped_objects=is_stored.count(False))
        return is_stored

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects. Raises ObjectCacheError."""
        self._stores.delete(names)

    @property
    def stores(self) -> Client:
        """The client that stores, for requests about objects."""
        return self._stores

    def close(self) -> None:
        """Free everything; waits for what is under way, which has deadlines. May be called again."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self._probe = None
        for close in (self._staging.close, self._lookups.close, self._loads.close, self._stores.close):
            try:
                close()
            except FAILURES as error:
                _log.warning("closing: %s", error)

    def _ask(self, names: Sequence[str], ask: Callable[[Sequence[str]], int]) -> int:
        """Ask about these names, as many at a time as a request may have, until an answer is less than all of them."""
        count, began_s = 0, time.monotonic()
        if not names or self._is_open(self._breaker):
            return 0
        try:
            for first in range(0, len(names), CHUNK_COUNT_MAX):
                part = names[first : first + CHUNK_COUNT_MAX]
                found = ask(part)
                count += found
                if found < len(part):
                    break
            self._succeeded(self._breaker)
        except FAILURES as error:
            self._failed("lookup", error, self._breaker)
            self.counters.add(lookup_failures=1)
        self.counters.add(lookups=1, looked_up_objects=len(names), lookup_s=time.monotonic() - began_s)
        return count

    def _load(self, names: Sequence[str], nbytes: int, load: Callable[[float], int]) -> int:
        began_s = time.monotonic()
        if not names or self._is_open(self._breaker):
            self.counters.add(lost_objects=len(names))
            return 0
        count = 0
        with self._lock:
            self._load_count += 1
            self._loads_idle.clear()
        try:
            count = load(began_s + self._options.load_timeout_s)
            self._succeeded(self._breaker)
        except FAILURES as error:
            self._failed("load", error, self._breaker)
            self.counters.add(load_failures=1)
        finally:
            with self._lock:
                self._load_count -= 1
                if not self._load_count:
                    self._loads_idle.set()
        self.counters.add(
            loads=1,
            loaded_objects=count,
            loaded_bytes=count * nbytes,
            lost_objects=len(names) - count,
            load_s=time.monotonic() - began_s,
        )
        return count

    def _is_staged(self) -> bool:
        """Whether loads go by way of a buffer of ours: wherever a server writes by itself. It cannot be handed the host
        pool's memory on this host. From another one it could, but one that hangs or dies might write into pages that
        have gone to other requests, and to wait until it cannot would hold all further loads up. Over http only this
        process writes.
        """
        with self._lock:
            if self._probe is None:
                self._probe = self._loads.allocate_buffer(PROBE_BYTES)
            probe = self._probe
        return self._loads.register_buffer(probe) is not Transport.HTTP

    def _load_direct(
        self, names: Sequence[str], nbytes: int, memory: Bytes, places: Sequence[int], deadline_s: float
    ) -> int:
        """Straight into the host pool. On return nobody writes there any more."""

        def fetch(wanted: int) -> int:
            with self._begin(names[:wanted], nbytes, memory, places[:wanted]) as begun:
                return begun.wait(self._left_s(deadline_s)).chunk_count

        return _without_damaged(fetch, len(names))

    def _load_rows(self, names: Sequence[str], nbytes: int, write: Write, deadline_s: float) -> int:
        """By way of buffers of ours: one request is under way while the objects of the one before are written."""
        parts = portions(len(names), nbytes, self._options.staging_bytes, CHUNK_COUNT_MAX)
        count = 0
        begun: deque[tuple[Bytes, LayerFetch]] = deque()
        try:
            for index, (first, end) in enumerate(parts):
                if not begun:
                    begun.append(self._stage(names[first:end], nbytes, deadline_s))
                if index + 1 < len(parts):
                    with suppress(TimeoutError):  # every buffer is in use: it begins when its turn comes
                        begun.append(self._stage(names[slice(*parts[index + 1])], nbytes, time.monotonic()))
                found = self._take(
                    names[first:end], nbytes, staged=begun.popleft(), write=write, first=first, deadline_s=deadline_s
                )
                count += found
                if found < end - first:
                    break
        finally:
            for staged in begun:
                self._staging.end(*staged)
        return count

    def _stage(self, names: Sequence[str], nbytes: int, deadline_s: float) -> tuple[Bytes, LayerFetch]:
        buffer = self._staging.take(len(names) * nbytes, deadline_s)
        try:
            return buffer, self._begin(names, nbytes, buffer, ())
        except BaseException:
            self._staging.give(buffer)
            raise

    def _take(
        self,
        names: Sequence[str],
        nbytes: int,
        staged: tuple[Bytes, LayerFetch],
        write: Write,
        first: int,
        deadline_s: float,
    ) -> int:
        """Write what a request has brought, and where an object was damaged, ask again for those before it."""
        waiting: list[tuple[Bytes, LayerFetch]] = [staged]

        def fetch(wanted: int) -> int:
            buffer, begun = waiting.pop() if waiting else self._stage(names[:wanted], nbytes, deadline_s)
            try:
                count = begun.wait(self._left_s(deadline_s)).chunk_count
                write(first, buffer[: count * nbytes].reshape(count, nbytes))
                return count
            finally:
                self._staging.end(buffer, begun)

        return _without_damaged(fetch, len(names))

    def _begin(self, names: Sequence[str], nbytes: int, memory: Bytes, places: Sequence[int]) -> LayerFetch:
        self.counters.add(fetches=1)
        return self._loads.fetch(
            names,
            ChunkLayout(1, 1, nbytes),
            memory,
            delivery=Delivery.CHUNK_MAJOR,
            on_missing=OnMissing.PREFIX,
            places=places,
        )

    def _is_open(self, breaker: Breaker) -> bool:
        with self._lock:
            return breaker.is_open(time.monotonic())

    def _left_s(self, deadline_s: float) -> float:
        """The time left, and a little past the deadline: a request that is begun ends as one that timed out."""
        return max(0.05, deadline_s - time.monotonic())

    def _failed(self, what: str, error: Exception, breaker: Breaker) -> None:
        """A refusal says nothing against the store's being there."""
        if not isinstance(error, ObjectCacheError) or isinstance(error, UnansweredError):
            with self._lock:
                breaker.failed(time.monotonic())
        _log.warning("%s: %s", what, error)

    def _succeeded(self, breaker: Breaker) -> None:
        with self._lock:
            breaker.succeeded()


def _without_damaged(fetch: Callable[[int], int], wanted: int) -> int:
    """Fetch so many objects; and where the server says that one of them is damaged or of another size, those before it.
    How many came.
    """
    try:
        return fetch(wanted)
    except ChunkUnavailable as error:
        _log.warning("a page cannot be loaded: %s", error)
        before = min(error.index or 0, wanted - 1)
        return fetch(before) if before else 0


def _breaker(options: HiCacheOptions) -> Breaker:
    return Breaker(1, options.retry_s, max(options.retry_s, 60.0))
