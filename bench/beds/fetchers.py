"""Client processes that fetch at the same moment: `python -m bench.beds.fetchers JOB`, JOB being a `Job` as a line.

Each answers "ready"; then to each line with an `Order` "armed", and to the line after it, the monotonic time at which
to start, with an `Answer`. Every byte is compared after the fetches. Compute windows, where an order has them, are
played by sleeping.

Playing a GPU: layer l is computed from when it is there and layer l-1 is done, and for as long as its window. A sleep
that ends late shifts nothing: windows follow each other on paper, and only a layer that is really late delays the next
one. Layers come from the server, or are copied by this process out of its own memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Protocol

from bench.beds.processes import BaselineError, Child, say, start_children
from bench.core.lines import from_line, to_line
from descriptors.descriptor import Delivery
from descriptors.errors import ObjectCacheError
from descriptors.layout import ChunkLayout
from descriptors.units import MIB
from nixl_client.client import Client, Transport
from nixl_client.fetch.layer_fetch import LayerFetch
from objectcache.adapters.nixl_agent import NixlFailure, leave
from objectcache.calibration.chunks import Chunks, check_fetch, store_chunks
from objectcache.calibration.content import Bytes, VerificationError, make_content, verify_payload
from objectcache.calibration.servers import LocalServer

LAYER_TIMEOUT_S = 300.0


class Source(Protocol):
    """Layers on their way."""

    def wait_layer(self, layer_index: int) -> float:
        """Block until the layer is there; the monotonic time at which it was. In any order, and again."""

    def is_complete(self) -> bool:
        """Whether every layer is there."""


class FetchedLayers:
    """A fetch under way; chunk-major, all its layers are there at once."""

    def __init__(self, fetch: LayerFetch) -> None:
        self._fetch = fetch

    def wait_layer(self, layer_index: int) -> float:
        """Raises what the fetch raises, and TimeoutError."""
        return self._fetch.wait_layer(layer_index, LAYER_TIMEOUT_S).ready_at_s

    def is_complete(self) -> bool:
        """Whether every layer is there."""
        return self._fetch.is_complete


class CopiedLayers:
    """Copies that a thread beside the computation makes one after the other, as a GPU's copy engine does. `copies` has
    one for each layer, or a single one after which all layers are there.
    """

    def __init__(self, copier: Executor, copies: Sequence[Callable[[], None]]) -> None:
        self._copied: list[Future[float]] = [copier.submit(_timed, copy) for copy in copies]

    def wait_layer(self, layer_index: int) -> float:
        """Raises what the copy raised, and TimeoutError."""
        return self._copied[min(layer_index, len(self._copied) - 1)].result(LAYER_TIMEOUT_S)

    def is_complete(self) -> bool:
        """Whether every copy is made."""
        return self._copied[-1].done()


class Waits(Enum):
    """ALL: every window is waited for, and TTFT read from the clock at the end. LOADING: only while layers are still to
    come; the windows after that are added, since nothing can happen in them any more.
    """

    ALL = "all"
    LOADING = "loading"


@dataclass(frozen=True, slots=True)
class Played:
    """Seconds since the request: the first token, and when each layer was there."""

    ttft_s: float
    ready_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Clock:
    """Where time comes from."""

    now_s: Callable[[], float] = time.monotonic
    sleep_s: Callable[[float], None] = time.sleep


def play(
    source: Source, num_layers: int, layer_compute_s: float, started_s: float, waits: Waits, clock: Clock | None = None
) -> Played:
    """Compute each layer in its turn; `started_s` is when the request was made."""
    clock = clock or Clock()
    ended_s = started_s
    ready_s = []
    for layer_index in range(num_layers):
        asked_s = clock.now_s()
        there_s = source.wait_layer(layer_index)
        ready_s.append(there_s - started_s)
        # a layer that had to be waited for is computed when the waiting thread runs again, not when its bytes came
        ended_s = max(ended_s, there_s if there_s <= asked_s else clock.now_s()) + layer_compute_s
        if waits is Waits.ALL or not source.is_complete():
            clock.sleep_s(max(0.0, ended_s - clock.now_s()))
    if waits is Waits.ALL:
        ended_s = max(ended_s, clock.now_s())
    return Played(ended_s - started_s, tuple(ready_s))


def _timed(copy: Callable[[], None]) -> float:
    copy()
    return time.monotonic()


START_DELAY_S = 0.02
WARMING_ROUNDS = 3
SETTLE_S_MAX = 5.0
FILL_BYTES_PER_S = 256 * MIB
"""Surely slower than the server takes chunks into its memory: it proves their bytes first."""


@dataclass(frozen=True, slots=True)
class Job:
    """Where to fetch what. Prefix number p has content of seed `seed` + p; fetch number i is of prefix i % count."""

    server: LocalServer
    transports: tuple[Transport, ...]
    name: str
    chunk_count: int
    layout: ChunkLayout
    seed: int
    prefix_count: int = 1
    fetches_max: int = 1

    @property
    def payload_bytes(self) -> int:
        """N*L*S."""
        return self.layout.delivery_bytes(self.chunk_count)

    def prefixes(self) -> list[Chunks]:
        """The chunks that are stored and fetched. Any names serve as keys."""
        return [
            Chunks(
                [f"{self.name}/{prefix:04d}/{index:06d}" for index in range(self.chunk_count)],
                make_content(self.chunk_count, self.layout, self.seed + prefix),
            )
            for prefix in range(self.prefix_count)
        ]


@dataclass(frozen=True, slots=True)
class Order:
    """Fetches number `first` on. With a compute window they state it, and it is played for each layer."""

    transport: Transport
    first: int = 0
    count: int = 1
    layer_compute_us: int | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """One fetch, in seconds since the common start: asked for, each layer there, the first token. The rate and the
    epoch are what the server said before layer 0.
    """

    asked_s: float
    ready_s: tuple[float, ...]
    ttft_s: float
    rate_bytes_per_s: float
    epoch: int

    @property
    def spacing_s(self) -> float:
        """Between layers, on the average."""
        return (self.ready_s[-1] - self.ready_s[0]) / max(1, len(self.ready_s) - 1)


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one fetch, or the reason why it failed."""

    seen: tuple[Seen, ...] = ()
    problem: str | None = None
    is_wrong_bytes: bool = False


def fill(server: LocalServer, jobs: Sequence[Job]) -> None:
    """Store every prefix."""
    for job in jobs:
        for chunks in job.prefixes():
            store_chunks(server, chunks)


def start_fetchers(jobs: Sequence[Job], stack: ExitStack) -> list[Child]:
    """A process for each job; `stack` ends them. Raises BaselineError."""
    return start_children([partial(Child, "bench.beds.fetchers", to_line(job)) for job in jobs], stack)


def fetch_at_once(orders: Sequence[tuple[Child, Order]]) -> list[tuple[Seen, ...]]:
    """Have all orders carried out at the same moment. Raises VerificationError and BaselineError."""
    for child, order in orders:
        child.tell(to_line(order))
    for child, _ in orders:
        child.answer()
    start_at_s = time.monotonic() + START_DELAY_S
    for child, _ in orders:
        child.tell(repr(start_at_s))
    answers = [from_line(Answer, child.answer()) for child, _ in orders]
    for answer in answers:
        if answer.problem is not None:
            raise (VerificationError if answer.is_wrong_bytes else BaselineError)(answer.problem)
    return [answer.seen for answer in answers]


def warm_up(fetch: Callable[[], object], stored_bytes: int) -> None:
    """Fetch until connections stand, and so many stored bytes are in the server's DRAM tier."""
    for round_index in range(WARMING_ROUNDS):
        fetch()
        if round_index:
            time.sleep(min(SETTLE_S_MAX, stored_bytes / FILL_BYTES_PER_S))


def main() -> int:
    """Carry out orders until standard input ends."""
    job = from_line(Job, sys.argv[1])
    prefixes = job.prefixes()
    with ExitStack() as stack:
        clients = {each: stack.enter_context(job.server.client(each)) for each in job.transports}
        buffer = next(iter(clients.values())).allocate_buffer(job.payload_bytes * job.fetches_max)
        for client in clients.values():
            client.register_buffer(buffer)
        say("ready")
        for line in sys.stdin:
            order = from_line(Order, line)
            wanted = [prefixes[(order.first + index) % len(prefixes)] for index in range(order.count)]
            buffer[: order.count * job.payload_bytes].fill(0)
            say("armed")
            start_at_s = float(sys.stdin.readline())
            try:
                answer = Answer(_fetch(clients[order.transport], wanted, buffer, order.layer_compute_us, start_at_s))
            except (ObjectCacheError, NixlFailure, TimeoutError, VerificationError) as error:
                answer = Answer((), str(error), isinstance(error, VerificationError))
            say(to_line(answer))
    return 0


def _fetch(
    client: Client, wanted: Sequence[Chunks], buffer: Bytes, window_us: int | None, start_at_s: float
) -> tuple[Seen, ...]:
    """Prefixes one behind the other in the buffer, compared once all are there."""
    layers, nbytes = wanted[0].layout.num_layers, wanted[0].payload_bytes
    windows_us: Sequence[int] = () if window_us is None else [window_us] * layers
    fetches, seen = [], []
    time.sleep(max(0.0, start_at_s - time.monotonic()))
    with ExitStack() as stack:
        for index, chunks in enumerate(wanted):
            asked_s = time.monotonic() - start_at_s
            fetch = client.fetch(
                chunks.keys,
                chunks.layout,
                buffer,
                offset=index * nbytes,
                delivery=Delivery.LAYER_MAJOR,
                layer_compute_us=windows_us,
            )
            fetches.append((asked_s, stack.enter_context(fetch)))
        for asked_s, fetch in fetches:
            if window_us is None:
                fetch.wait(LAYER_TIMEOUT_S)
                ready_s = tuple(fetch.wait_layer(index).ready_at_s - start_at_s for index in range(layers))
                ttft_s = max(ready_s)
            else:
                played = play(FetchedLayers(fetch), layers, window_us / 1e6, start_at_s, Waits.ALL)
                ready_s, ttft_s = played.ready_s, played.ttft_s
            check_fetch(fetch, Delivery.LAYER_MAJOR, nbytes)
            seen.append(Seen(asked_s, ready_s, ttft_s, float(fetch.grant.rate_bytes_per_s), fetch.grant.epoch))
    for index, chunks in enumerate(wanted):
        verify_payload(buffer[index * nbytes : (index + 1) * nbytes], chunks.content, Delivery.LAYER_MAJOR)
    return tuple(seen)


if __name__ == "__main__":
    leave(main())
