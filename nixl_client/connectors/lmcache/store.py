"""Whole chunks of one bucket, in batches: what both of LMCache's modes do with the store. Blocking, safe from any
thread, and never raising for what the store does: a failure is a miss, or a store that did not happen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from descriptors.descriptor import CHUNK_COUNT_MAX, ELEMENT_BYTES, Accept, Delivery, OnMissing
from descriptors.errors import ChunkUnavailable, ObjectCacheError
from descriptors.layout import ChunkLayout
from descriptors.recompute import AdviceRequest
from nixl_client.client import Client
from nixl_client.connectors.counters import Counters
from nixl_client.connectors.lmcache.chunks import (
    ChunkSize,
    batches,
    opaque_layout,
    partial_tokens,
    row_layout,
    worth_loading,
)
from nixl_client.connectors.lmcache.options import LMCacheOptions
from nixl_client.connectors.load_staging import LoadStaging
from nixl_client.connectors.startup import say
from nixl_client.lossy import accept_of
from nixl_client.objects import Path
from nixl_client.session.retries import Retries
from nixl_client.transports.http import UnansweredError
from objectcache.adapters.breaker import Breaker

KEYS_THEN_VALUES = "KV_2LTD"
"""LMCache's name of the format [2, L, T, hidden]."""
TOKENS_HEADER = "x-amz-meta-lmcache-tokens"
FAILURES = (ObjectCacheError, OSError, TimeoutError)
_log = logging.getLogger(__name__)


_Asking = tuple[ChunkLayout, Accept | None]


@dataclass(frozen=True, slots=True)
class ChunkKind:
    """The shape of full chunks, and the dtype of their elements. `is_kv` where they are [2, L, T, hidden]: keys, then
    values.
    """

    shape: tuple[int, ...]
    dtype: str
    is_kv: bool

    @classmethod
    def of(cls, shapes: Sequence[Any], dtypes: Sequence[Any], memory_format: Any) -> ChunkKind | None:
        """That of LMCache's shapes, dtypes and format; None for chunks of several groups of layers."""
        if len(shapes) != 1 or len(dtypes) != 1:
            return None
        dtype = str(dtypes[0]).removeprefix("torch.")
        return cls(tuple(shapes[0]), dtype, getattr(memory_format, "name", "") == KEYS_THEN_VALUES)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The first `chunk_count` chunks are in their buffers. `unusable` is the key of the next chunk where the server
    says that it is missing, damaged or of another size.
    """

    chunk_count: int
    unusable: str | None = None


class ChunkStore:
    """Chunks are byte buffers (memoryviews); keys are object names, those of one prefix in order."""

    def __init__(self, options: LMCacheOptions) -> None:
        self.counters = Counters()
        self._options = options
        self._breaker, self._store_breaker = _breaker(options), _breaker(options)
        self._lookups = Client(
            options.endpoint,
            options.bucket,
            timeout_s=options.lookup_timeout_s,
            retries=Retries.of_engines(),
        )
        self._loads = Client(
            options.endpoint,
            options.bucket,
            transport=options.transport,
            http_connections=options.http_connections,
            timeout_s=options.load_timeout_s,
            fetch_timeout_s=options.load_timeout_s,
            downlink_bytes_per_s=options.downlink_bytes_per_s or None,
            retries=Retries.of_engines(),
        )
        self._stores = Client(
            options.endpoint,
            options.bucket,
            timeout_s=options.store_timeout_s,
            fetch_timeout_s=options.store_timeout_s,
        )
        say(self._lookups)
        self._staging = LoadStaging(self._loads, options.staging_bytes, options.loads_max)

    def warm(self) -> None:
        """Prepare for loads, in the background."""
        self._staging.warm()

    def close(self) -> None:
        """Free everything; waits for what is under way, which has deadlines."""
        for close in (
            self._staging.close,
            self._lookups.close,
            self._loads.close,
            self._stores.close,
        ):
            try:
                close()
            except FAILURES as error:
                _log.warning("closing: %s", error)

    def is_answering(self) -> bool:
        """Whether the server answers a small lookup."""
        try:
            self._lookups.lookup(("lmcache/ping",))
        except FAILURES as error:
            self._fail("ping", error)
            return False
        return True

    def lookup(self, keys: Sequence[str], chunk: ChunkSize | None = None) -> int:
        """How many chunks, from the first, are stored; with a `chunk`'s size, and costs of computing in the options,
        how many are worth loading. They are kept from eviction for the time of the lease.
        """
        if not keys or self._is_resting():
            return 0
        keys, prefill = keys[:CHUNK_COUNT_MAX], self._options.prefill
        try:
            if prefill is None or chunk is None:
                worth = matched = self._lookups.lookup(keys, self._options.lease_s)
            else:
                asked = AdviceRequest(len(keys) * chunk.tokens + 1, chunk.layout, prefill)
                matched, advice = self._lookups.advise(keys, asked, self._options.lease_s)
                worth = worth_loading(matched, chunk, len(keys), prefill, advice.rate_bytes_per_s)
        except FAILURES as error:
            self._fail("lookup", error)
            return 0
        self.counters.add(
            lookups=1, looked_up_chunks=len(keys), matched_chunks=matched, advised_against_chunks=matched - worth
        )
        return worth

    def present(self, keys: Sequence[str]) -> Sequence[bool]:
        """For each chunk whether it is stored. Those that are, are kept from eviction for the time of the lease."""
        found: list[bool] = []
        if keys and not self._is_resting():
            try:
                for first in range(0, len(keys), CHUNK_COUNT_MAX):
                    found += self._lookups.present(keys[first : first + CHUNK_COUNT_MAX], self._options.lease_s)
            except FAILURES as error:
                self._fail("lookup", error)
            self.counters.add(lookups=1, looked_up_chunks=len(keys), matched_chunks=sum(found))
        return found + [False] * (len(keys) - len(found))

    def load(self, keys: Sequence[str], targets: Sequence[memoryview], kind: ChunkKind | None = None) -> Loaded:
        """Load the chunks of these keys into `targets`, which are all of one size. With their `kind` they may come
        encoded, if the options accept that.
        """
        deadline_s = time.monotonic() + self._options.load_timeout_s
        chunk_bytes = targets[0].nbytes
        asking = self._asking(chunk_bytes, kind)
        count, unusable = 0, None
        for first, end in batches(len(keys), chunk_bytes, self._options.staging_bytes):
            if self._is_resting():
                break
            batch = self._load_batch(keys[first:end], targets[first:end], asking, deadline_s)
            count, unusable = count + batch.chunk_count, batch.unusable
            if batch.chunk_count < end - first:
                break
        self.counters.add(loaded_chunks=count, loaded_bytes=count * chunk_bytes, lost_chunks=len(keys) - count)
        return Loaded(count, unusable)

    def put(self, keys: Sequence[str], chunks: Sequence[memoryview], metadata: Mapping[str, str] | None = None) -> bool:
        """Store those that are missing; whether all are stored. After a failure no further chunk is begun."""
        if self._store_breaker.is_open(time.monotonic()):
            return False
        try:
            present = self._stores.present(keys)
            missing = [at for at, is_there in enumerate(present) if not is_there]
            self._stores.put_chunks(
                [keys[at] for at in missing],
                [chunks[at] for at in missing],
                content_class=self._options.content_class,
                metadata=metadata,
            )
        except FAILURES as error:
            self._fail("store", error, self._store_breaker)
            self.counters.add(store_failures=1)
            return False
        self.counters.add(
            stored_chunks=len(missing),
            stored_bytes=sum(chunks[at].nbytes for at in missing),
            stored_already_chunks=len(keys) - len(missing),
        )
        return True

    def put_partial(self, key: str, chunk: memoryview, tokens: int) -> bool:
        """Store a chunk that is not full, and say so: its size alone could be that of a chunk cut short."""
        if self._store_breaker.is_open(time.monotonic()):
            return False
        try:
            headers = {TOKENS_HEADER: str(tokens)}
            self._stores.objects.put_object(key, chunk, path=Path.TCP, headers=headers)
        except FAILURES as error:
            self._fail("store", error, self._store_breaker)
            self.counters.add(store_failures=1)
            return False
        self.counters.add(stored_chunks=1, stored_bytes=chunk.nbytes)
        return True

    def load_partial(self, key: str, target: memoryview, token_bytes: int) -> int:
        """Load a chunk that is not full into the first bytes of a full chunk's buffer. Returns its tokens, 0 when no
        such chunk is stored.
        """
        if self._is_resting():
            return 0
        try:
            moved = self._loads.objects.get_object(key, target, path=Path.TCP)
        except (*FAILURES, ValueError) as error:
            self._fail("load", error)
            return 0
        tokens = partial_tokens(moved.nbytes, token_bytes, target.nbytes // token_bytes)
        if moved.headers.get(TOKENS_HEADER) != str(tokens):
            return 0
        self.counters.add(loaded_chunks=1, loaded_bytes=moved.nbytes)
        return tokens

    def delete(self, keys: Sequence[str]) -> int:
        """Delete chunks; how many requests were answered."""
        answered = 0
        for key in keys:
            try:
                self._lookups.delete((key,))
                answered += 1
            except FAILURES as error:
                self._fail("delete", error)
                break
        return answered

    def discard(self, key: str) -> None:
        """The chunk stored under this key cannot be used. Delete it, unless the options forbid writing."""
        if self._options.store and not self._is_resting():
            self.counters.add(discarded_chunks=self.delete((key,)))

    def _asking(self, chunk_bytes: int, kind: ChunkKind | None) -> _Asking:
        """How these chunks are declared, and what is accepted."""
        if kind is not None and kind.is_kv and kind.dtype in ELEMENT_BYTES:
            layout = row_layout(kind.shape, ELEMENT_BYTES[kind.dtype])
            accept = accept_of(self._options.lossy, kind.dtype, self._options.max_error, self._options.loss_bound)
            if accept is not None and layout is not None and layout.chunk_bytes == chunk_bytes:
                return layout, accept
        return opaque_layout(chunk_bytes), None

    def _load_batch(
        self, keys: Sequence[str], targets: Sequence[memoryview], asking: _Asking, deadline_s: float
    ) -> Loaded:
        """One fetch, and where a chunk turns out damaged another one for those before it."""
        count, unusable = 0, None
        wanted = len(keys)
        try:
            for _ in range(2):
                try:
                    count = self._fetch(keys[:wanted], targets[:wanted], asking, deadline_s) if wanted else 0
                except ChunkUnavailable as error:
                    _log.warning("chunk %s cannot be loaded: %s", keys[error.index or 0], error)
                    wanted = error.index or 0
                    unusable = keys[wanted]
                    continue
                unusable = keys[count] if count < len(keys) else None
                break
        except UnansweredError as error:
            _log.warning("load: %s", error)
            if self.is_answering():
                return self._search(keys, targets, asking, deadline_s)
        except FAILURES as error:
            self._fail("load", error)
        return Loaded(count, unusable)

    def _search(self, keys: Sequence[str], targets: Sequence[memoryview], asking: _Asking, deadline_s: float) -> Loaded:
        """Find the damaged chunk, after an answer broke off although the server is there: over http the server reports
        a damaged chunk in no other way. A chunk counts as damaged once a load of it alone has broken off, since
        connections break for other reasons, too.
        """
        good, bad = 0, len(keys)
        while good < bad:
            middle = max(good + 1, (good + bad) // 2)
            try:
                served = self._fetch(keys[good:middle], targets[good:middle], asking, deadline_s)
            except (UnansweredError, ChunkUnavailable):
                if middle == good + 1:
                    return Loaded(good, keys[good])
                bad = middle
                continue
            except FAILURES as error:
                self._fail("load", error)
                return Loaded(good)
            good += served
            if good < middle:  # this chunk is not stored
                return Loaded(good, keys[good])
        return Loaded(good)

    def _fetch(self, keys: Sequence[str], targets: Sequence[memoryview], asking: _Asking, deadline_s: float) -> int:
        chunk_bytes = targets[0].nbytes
        layout, accept = asking
        buffer = self._staging.take(layout.delivery_bytes(len(keys)), deadline_s)
        try:
            fetch = self._loads.fetch(
                keys, layout, buffer, delivery=Delivery.CHUNK_MAJOR, on_missing=OnMissing.PREFIX, accept=accept
            )
        except BaseException:
            self._staging.give(buffer)
            raise
        try:
            result = fetch.wait(max(0.0, deadline_s - time.monotonic()))
            served, forms = result.chunk_count, result.forms
            for index, target in enumerate(targets[:served]):
                np.copyto(np.frombuffer(target, np.uint8), buffer[index * chunk_bytes : (index + 1) * chunk_bytes])
        finally:
            self._staging.end(buffer, fetch)
        self.counters.add(fetches=1)
        if forms is not None:
            self.counters.add(lossy_chunks=forms.encoded_count, lossy_error=forms.mean_error * forms.chunk_count)
        return served

    def _is_resting(self) -> bool:
        return self._breaker.is_open(time.monotonic())

    def _fail(self, what: str, error: Exception, breaker: Breaker | None = None) -> None:
        if not isinstance(error, ObjectCacheError) or isinstance(error, UnansweredError):
            (breaker or self._breaker).failed(time.monotonic())
        self.counters.add(failures=1)
        _log.warning("%s: %s", what, error)


def _breaker(options: LMCacheOptions) -> Breaker:
    """After one request that was not answered, none is made for `retry_s`: an engine must not wait for a dead server
    each time.
    """
    return Breaker(1, options.retry_s, options.retry_s)
