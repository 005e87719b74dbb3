"""`bench aggregate`: one descriptor GET of N chunks, over every transport in both orders, beside what it competes with.

    N chunk_count   L num_layers   G chunk_tokens   S per_layer_chunk_bytes

Rounds are interleaved: each round measures everything once, so slow minutes of the machine hit all alike. The first
round is not counted. The buffer is cleared before every run and every fetched byte compared after it, both untimed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.baselines import MemoryCopy, RawNixlWrites, RawSocket, get_ranges
from bench.content import Bytes, Content, VerificationError, make_content, verify_payload, verify_slices
from bench.jobs import BUCKET
from bench.machine import describe_commit, describe_machine
from bench.progress import progress_bar
from bench.report import MEMCPY, Measurement, Report, Sample
from bench.server import BenchServer, running_server
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from descriptors.prefix_keys import Namespace, chunk_keys
from descriptors.units import MIB
from nixl_client.client import ObjectCacheClient, Transport
from storage_server.settings import StorageSettings

FETCH_TIMEOUT_S = 300.0
FILL_BATCH_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class AggregateSettings:
    """What to measure. `ucx_tls` is UCX_TLS for server, client and raw writer alike; None leaves the environment's.
    `naive_slices_max` bounds the sample of the naive client; `folder` is where the store goes for the time being.
    """

    chunk_count: int
    num_layers: int
    chunk_tokens: int
    per_layer_chunk_bytes: int
    runs: int
    seed: int
    transports: tuple[Transport, ...]
    memcpy_bytes: int
    naive_slices_max: int
    ucx_tls: str | None = None
    folder: Path | None = None

    @property
    def layout(self) -> ChunkLayout:
        """L, G and S as one value."""
        return ChunkLayout(self.num_layers, self.chunk_tokens, self.per_layer_chunk_bytes)

    @property
    def naive_slice_count(self) -> int:
        """How many of the N*L slices the naive client gets in each run."""
        return min(self.chunk_count * self.num_layers, self.naive_slices_max)


@dataclass(frozen=True, slots=True)
class Contender:
    """One thing to measure: `run` takes and checks one sample."""

    name: str
    nbytes: int
    run: Callable[[], Sample]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Bed:
    """What all contenders share: a filled server, the keys and bytes in it, and the buffer to fill."""

    settings: AggregateSettings
    storage: StorageSettings
    server: BenchServer
    keys: Sequence[str]
    content: Content
    buffer: Bytes


def measure_aggregate(settings: AggregateSettings) -> Report:
    """Run the whole benchmark; wrong bytes end it early and are the report's `problem`.

    Raises BaselineError, BenchServerError, ObjectCacheError, NixlFailure, TimeoutError and OSError.
    """
    content = make_content(settings.chunk_count, settings.layout, settings.seed)
    buffer = np.full(settings.layout.payload_bytes(settings.chunk_count), 0xFF, dtype=np.uint8)
    samples: dict[str, list[Sample]] = {}
    problem = None
    with _ucx_tls(settings.ucx_tls), running_server(settings.folder) as server:
        keys = _make_keys(settings)
        _fill(server, keys, content)
        bed = Bed(settings, StorageSettings(data_dir=Path()), server, keys, content, buffer)
        with ExitStack() as stack:
            contenders = _contenders(bed, stack)
            try:
                _run_rounds(contenders, settings.runs, samples)
            except VerificationError as error:
                problem = str(error)
        peak_rss_bytes = server.peak_rss_bytes()
    measurements = [Measurement(c.name, c.nbytes, tuple(samples.get(c.name, ())), c.note) for c in contenders]
    origin = {**describe_commit(), "machine": describe_machine()}
    layer_bytes = settings.layout.layer_bytes(settings.chunk_count)
    return Report("aggregate", origin, _described(bed), measurements, layer_bytes, peak_rss_bytes, problem)


def _run_rounds(contenders: Sequence[Contender], runs: int, samples: dict[str, list[Sample]]) -> None:
    with progress_bar((runs + 1) * len(contenders), "measuring") as advance:
        for round_index in range(runs + 1):
            for contender in contenders:
                sample = contender.run()
                if round_index > 0:
                    samples.setdefault(contender.name, []).append(sample)
                advance(1)


def _make_keys(settings: AggregateSettings) -> list[str]:
    """Prefix keys of seeded tokens."""
    count = settings.chunk_count * settings.chunk_tokens
    tokens = np.random.default_rng(settings.seed).integers(0, 1 << 32, count, dtype=np.uint32)
    namespace = Namespace(model="bench", dtype="uint8", block_tokens=settings.chunk_tokens)
    return chunk_keys(namespace.text(), tokens, settings.chunk_tokens)


def _fill(server: BenchServer, keys: Sequence[str], content: Content) -> None:
    """Put every chunk; only a batch of them exists here at a time."""
    batch = max(1, FILL_BATCH_BYTES // content.layout.chunk_bytes)
    with server.client(Transport.HTTP) as client, progress_bar(len(keys), "storing chunks") as advance:
        for first in range(0, len(keys), batch):
            some = keys[first : first + batch]
            client.put_chunks(some, [content.chunk(first + index) for index in range(len(some))])
            advance(len(some))


def _contenders(bed: Bed, stack: ExitStack) -> list[Contender]:
    """Everything one round measures; what they hold is given back by `stack`."""
    copy = MemoryCopy(bed.settings.memcpy_bytes)
    contenders = [Contender(MEMCPY, copy.nbytes, lambda: Sample(copy.run()), "one thread")]
    if Transport.UCX in bed.settings.transports:
        contenders += _raw_nixl(bed, stack)
    if Transport.HTTP in bed.settings.transports:
        raw = stack.enter_context(RawSocket(bed.buffer, bed.storage.window_bytes))
        contenders.append(Contender("raw_socket", bed.buffer.nbytes, lambda: Sample(raw.run()), "loopback TCP"))
    for transport in bed.settings.transports:
        client = stack.enter_context(bed.server.client(transport))
        client.register_buffer(bed.buffer)
        for delivery in (Delivery.LAYER_MAJOR, Delivery.CHUNK_MAJOR):
            name = f"{transport.value}_{delivery.value.replace('-', '_')}"
            contenders.append(Contender(name, bed.buffer.nbytes, _fetcher(bed, client, delivery)))
    return [*contenders, _naive(bed, stack)]


def _raw_nixl(bed: Bed, stack: ExitStack) -> list[Contender]:
    """Writes as large as a layer, and as large as the payloads a layer is delivered in."""
    payload_bytes = bed.buffer.nbytes
    layer_bytes = bed.settings.layout.layer_bytes(bed.settings.chunk_count)
    aggregation_bytes = min(bed.storage.aggregation_bytes, layer_bytes)
    raw = stack.enter_context(RawNixlWrites(bed.buffer, max(bed.storage.window_bytes, layer_bytes)))

    def contender(name: str, write_bytes: int) -> Contender:
        return Contender(name, payload_bytes, lambda: Sample(raw.run(write_bytes)), f"writes of {write_bytes} bytes")

    return [contender("raw_nixl_write_layer", layer_bytes), contender("raw_nixl_write_payload", aggregation_bytes)]


def _fetcher(bed: Bed, client: ObjectCacheClient, delivery: Delivery) -> Callable[[], Sample]:
    def run() -> Sample:
        bed.buffer.fill(0)
        started_s = time.monotonic()
        with client.fetch(bed.keys, bed.settings.layout, bed.buffer, delivery=delivery) as fetch:
            first_layer = fetch.wait_layer(0, FETCH_TIMEOUT_S)
            result = fetch.wait(FETCH_TIMEOUT_S)
            duration_s = time.monotonic() - started_s
        if result.mode.value != delivery.value or result.transferred_bytes != bed.buffer.nbytes:
            raise VerificationError(f"{result} came of {delivery.value}, {bed.buffer.nbytes} bytes")
        verify_payload(bed.buffer, bed.content, delivery)
        return Sample(duration_s, first_layer.ready_at_s - started_s)

    return run


def _naive(bed: Bed, stack: ExitStack) -> Contender:
    """One boto3 ranged GET per slice, layer by layer; the sample's rate stands for the whole."""
    settings = bed.settings
    s3 = bed.server.s3()
    stack.callback(s3.close)
    slice_count, chunk_count = settings.naive_slice_count, settings.chunk_count
    slices = bed.buffer.reshape(-1, settings.per_layer_chunk_bytes)[:slice_count]

    def run() -> Sample:
        slices.fill(0)
        first_s = get_ranges(s3, BUCKET, bed.keys, slices[:chunk_count])
        rest_s = get_ranges(s3, BUCKET, bed.keys, slices[chunk_count:], chunk_count)
        for layer_index in range(-(-slice_count // chunk_count)):
            layer = slices[layer_index * chunk_count : (layer_index + 1) * chunk_count]
            verify_slices(layer, bed.content, layer_index)
        return Sample(first_s + rest_s, first_s if slice_count >= chunk_count else None)

    total = chunk_count * settings.num_layers
    note = f"boto3, {'all' if slice_count == total else f'a sample of {slice_count} of'} {total} slices"
    return Contender("naive_range_gets", slices.nbytes, run, note)


def _described(bed: Bed) -> dict[str, Any]:
    """The settings as plain values, with the server's own that matter."""
    described = asdict(bed.settings)
    described["transports"] = [transport.value for transport in bed.settings.transports]
    described["ucx_tls"] = bed.settings.ucx_tls or os.environ.get("UCX_TLS")
    described["folder"] = None if bed.settings.folder is None else str(bed.settings.folder)
    described["payload_bytes"] = bed.buffer.nbytes
    described["layer_bytes"] = bed.settings.layout.layer_bytes(bed.settings.chunk_count)
    described["naive_slice_count"] = bed.settings.naive_slice_count
    described["server"] = {
        name: getattr(bed.storage, name) for name in ("aggregation_bytes", "window_bytes", "gather_threads")
    }
    return described


@contextmanager
def _ucx_tls(value: str | None) -> Iterator[None]:
    """Set UCX_TLS for this process and those it starts, and put it back."""
    before = os.environ.get("UCX_TLS")
    if value is not None:
        os.environ["UCX_TLS"] = value
    try:
        yield
    finally:
        if before is not None:
            os.environ["UCX_TLS"] = before
        elif value is not None:
            del os.environ["UCX_TLS"]
