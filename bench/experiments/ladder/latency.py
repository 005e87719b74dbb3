"""Figure 10: one request at a time, its latency split into client, gateway, storage and transfer, for each path."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from bench.core.show import Json
from bench.experiments.ladder.bed import NotRun, Session, figure
from bench.experiments.ladder.paths import FIVE, Operation, PathBed, S3Path, Work, path_bed
from calibration.content import VerificationError
from calibration.samples import Cell, progress_bar
from descriptors.layout import ChunkLayout
from descriptors.tracing import TIMING_HEADER, parse_timing, timing_header
from descriptors.units import KIB, MIB
from nixl_client.client import ObjectCacheClient
from nixl_client.session.timing import Timing, split_time
from nixl_client.transports.http import Stream

NUM_LAYERS = 4
REQUESTS_PER_RUN = 20
WARM_UP = 3
PARTS = ("client", "gateway", "storage", "transfer")
"""Parts of a request's time (ObjectCache paper, section 4.4)."""


def latency(session: Session) -> Json:
    """Every path and both operations, over object sizes. Raises NotRun where answers carry no account."""
    settings = session.settings
    sizes = (64 * KIB,) if settings.is_smoke else (64 * KIB, 512 * KIB, 4 * MIB)
    count = 2 if settings.is_smoke else settings.runs * REQUESTS_PER_RUN
    cases = [(path, operation, size) for size in sizes for operation in Operation for path in FIVE]
    cells: list[Cell] = []
    with path_bed(session, max(sizes)) as bed, progress_bar(len(cases), "figure 10") as advance:
        heads = _heads_of(bed.client)
        works = {size: bed.work(ChunkLayout(NUM_LAYERS, 1, size // NUM_LAYERS), 1) for size in sizes}
        for path, operation, size in cases:
            seen = [_one(bed, works[size], path, operation, heads) for _ in range(WARM_UP + count)]
            labels = {"path": path.value, "operation": operation.value, "block_bytes": size}
            for part in PARTS:
                samples_s = tuple(getattr(timing, f"{part}_s") for timing in seen[WARM_UP:])
                cells.append(Cell({**labels, "part": part}, 0, samples_s))
            advance(1)
    notes = [
        f"one request in flight; gateway, storage and transfer as the answer's {TIMING_HEADER} says, client the rest "
        "of the client's own time",
        "S3TCP GET: its body comes after that header, so the time between head and end of body is transfer",
        f"an object is one chunk of {NUM_LAYERS} slices; Batch and Agg name it in a descriptor",
        "every object is compared byte by byte after its request, outside the clock",
    ]
    return figure({"object_bytes": sizes, "num_layers": NUM_LAYERS, "requests": count}, notes, cells)


Heads = list[tuple[float, Mapping[str, str]]]
"""Of each answer that a client got: when its head was there, and its headers."""


def _heads_of(client: ObjectCacheClient) -> Heads:
    """Of a client that serves this figure alone, from now on."""
    http: Any = client.http
    stream, heads = http.stream, Heads()

    def tapped(*arguments: Any, **options: Any) -> Stream:
        answer: Stream = stream(*arguments, **options)
        heads.append((time.monotonic(), answer.headers))
        return answer

    http.stream = tapped
    return heads


def _one(bed: PathBed, work: Work, path: S3Path, operation: Operation, heads: Heads) -> Timing:
    """One request, checked, and the parts of its time. Where the payload is the answer's body, the server's account
    ends with the head, and what comes after it is transfer.
    """
    prepared = bed.prepare(work, path, operation)
    (request,) = prepared.requests(path, operation)
    heads.clear()
    started_s = time.monotonic()
    request()
    ended_s = time.monotonic()
    head_at_s, headers = heads[-1]
    bed.check(prepared, path, operation)
    check_account(headers.get(TIMING_HEADER), f"{path.value} {operation.value}")
    body_s = ended_s - head_at_s if operation is Operation.GET and path is S3Path.TCP else 0.0
    return split_time(ended_s - started_s, headers, body_s)


def check_account(text: str | None, what: str) -> None:
    """A part that is left out would be counted as the client's. Raises NotRun without an account, VerificationError for
    one that is not understood.
    """
    if text is None:
        raise NotRun(f"{what}: the answer carries no {TIMING_HEADER}")
    if timing_header(parse_timing(text)) != text:
        raise VerificationError(f"{TIMING_HEADER}: {text!r} is not understood")
