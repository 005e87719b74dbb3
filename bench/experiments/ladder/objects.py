"""Figures 9 and 11, one object in each request and many, by the five paths; and A8, aggregated layers over payload
sizes and chunk sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from bench.core.show import Json
from bench.experiments.ladder.bed import Session, figure, served
from bench.experiments.ladder.paths import FIVE, MANY_OBJECTS, ONE_OBJECT, Operation, S3Path, path_bed
from bench.paper.tables import TOKEN_LAYER_BYTES
from calibration.chunks import fetch_task, make_chunks, store_chunks
from calibration.samples import Cell, Label, Task, run_rounds
from descriptors.layout import ChunkLayout
from descriptors.units import KIB, MIB
from nixl_client.client import Transport

PATH_NOTES = (
    "RDMA paths: one-sided UCX writes and reads by NIXL, without a NIC over shared memory",
    "C=8: eight client threads of one process; C=32: four times as many; each has one blocking request in flight",
    "GETs: warm, stored moments ago; PUTs: under new keys, durable when answered, deleted afterwards",
    "what was fetched is compared byte by byte in the client's memory, what was put is read back over S3TCP; both "
    "outside the clock",
)
SINGLE_BYTES, SINGLE_BYTES_SMOKE = 32 * MIB, 512 * KIB
"""Moved in a sample, or more where the largest concurrency needs more objects."""
OBJECTS_SMOKE_MIN = 2
NUM_LAYERS = 4
SAMPLE_BYTES, SAMPLE_BYTES_SMOKE = 128 * MIB, MIB
CHUNKS_MIN, CHUNKS_MAX = 2, 128
"""Bounds what small slices cost: 32 MiB of 64 KiB slices are 512 requests for one range each."""
COMPARED = {"batch_over_direct": S3Path.BATCH, "agg_over_direct": S3Path.AGG, "ranges_over_direct": S3Path.RANGES}


def _moved(
    session: Session, name: str, counts: Mapping[ChunkLayout, int], asked: Sequence[tuple[S3Path, Operation, int]]
) -> list[Cell]:
    """So many objects of each shape, moved in every way that is asked for: path, operation, requests in flight."""
    cells: list[Cell] = []
    with path_bed(session, max(layout.delivery_bytes(count) for layout, count in counts.items())) as bed:
        for layout, count in counts.items():
            work = bed.work(layout, count)
            title = f"figure {name}: {layout.per_layer_chunk_bytes >> 10} KiB"
            cells += run_rounds([bed.task(work, *one) for one in asked], session.settings.runs, title)
    return cells


def single_objects(session: Session) -> Json:
    """GET and PUT over object sizes."""
    settings = session.settings
    sample_bytes = SINGLE_BYTES_SMOKE if settings.is_smoke else SINGLE_BYTES
    least = OBJECTS_SMOKE_MIN if settings.is_smoke else max(settings.in_flight)
    counts = {size: max(least, sample_bytes // size) for size in settings.block_bytes}
    asked = [(path, operation, each) for operation in Operation for each in settings.in_flight for path in ONE_OBJECT]
    cells = _moved(session, "9", {ChunkLayout(1, 1, size): count for size, count in counts.items()}, asked)
    return figure({"block_bytes": settings.block_bytes, "objects_in_a_sample": counts}, PATH_NOTES, cells)


def many_objects(session: Session) -> Json:
    """GET and PUT of the same chunks by every path."""
    settings = session.settings
    sample_bytes = SAMPLE_BYTES_SMOKE if settings.is_smoke else SAMPLE_BYTES
    layouts = [ChunkLayout(NUM_LAYERS, 1, size) for size in settings.block_bytes]
    counts = {layout: min(CHUNKS_MAX, max(CHUNKS_MIN, sample_bytes // layout.chunk_bytes)) for layout in layouts}
    asked = [
        (path, operation, each)
        for operation in Operation
        for each in (1, *settings.in_flight)
        for path in (MANY_OBJECTS if each == 1 else FIVE)
    ]
    asked += [(S3Path.RANGES, Operation.GET, each) for each in settings.in_flight]
    cells = _moved(session, "11", counts, asked)
    notes = [
        *PATH_NOTES,
        "C=1: one request for everything, which is what a prefix hit asks for",
        f"chunks of {NUM_LAYERS} slices; S3TCP, Buffer and Direct: a request for each chunk",
        "Batch (chunk-major) and Agg (layer-major): as many requests as may be in flight, each naming its share of "
        "the chunks, never more requests than chunks",
        "Direct, a range each: a request for each slice, which is how standard S3 gets layers in order",
    ]
    by_size = {layout.per_layer_chunk_bytes: count for layout, count in counts.items()}
    found = {"slice_bytes": settings.block_bytes, "num_layers": NUM_LAYERS, "chunks_in_a_sample": by_size}
    return figure(found, notes, cells, speedups(cells))


def speedups(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Throughput of each path over S3RDMA Direct's, the best concurrency of either (medians); None where there is no
    such request.
    """
    best: dict[tuple[Label, Label], dict[Label, float]] = {}
    for cell in cells:
        rates = best.setdefault((cell.labels["operation"], cell.labels["block_bytes"]), {})
        rates[cell.labels["path"]] = max(rates.get(cell.labels["path"], 0.0), cell.nbytes / cell.median_s())
    found = []
    for (operation, size), rates in best.items():
        over = {name: rates.get(path.value) for name, path in COMPARED.items()}
        direct = rates[S3Path.DIRECT.value]
        ratios = {name: None if rate is None else round(rate / direct, 2) for name, rate in over.items()}
        found.append({"operation": operation, "block_bytes": size, **ratios})
    return found


def aggregation(session: Session) -> Json:
    """Every payload size with every chunk size, in layer-major order. A server for each payload size, all running at
    once, so that rounds can be interleaved; those not asked idle.
    """
    settings = session.settings
    sizes: dict[str, Any] = {
        "aggregation_bytes": (512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB),
        "chunk_tokens": (16, 32, 64, 128, 256, 512),
        "num_layers": 16,
        "token_count": 2048,
    }
    if settings.is_smoke:
        sizes = {"aggregation_bytes": (512 * KIB,), "chunk_tokens": (16, 256), "num_layers": 4, "token_count": 256}
    layers, token_count = sizes["num_layers"], sizes["token_count"]
    layouts = [ChunkLayout(layers, tokens, TOKEN_LAYER_BYTES * tokens) for tokens in sizes["chunk_tokens"]]
    prefixes = [make_chunks(token_count // each.chunk_tokens, each, settings.seed) for each in layouts]
    tasks: list[Task] = []
    with ExitStack() as stack:
        for nbytes in sizes["aggregation_bytes"]:
            config = f"[storage]\naggregation_bytes = {nbytes}\ndirect_payload_bytes = {nbytes}\n"
            server = stack.enter_context(served(settings, config))
            for prefix in prefixes:
                store_chunks(server, prefix, f"figure A8: storing, {nbytes >> 10} KiB")
            client = stack.enter_context(server.client(Transport(settings.transport)))
            buffer = client.allocate_buffer(max(prefix.payload_bytes for prefix in prefixes))
            client.register_buffer(buffer)
            for prefix in prefixes:
                shape = {"chunk_tokens": prefix.layout.chunk_tokens, "slice_bytes": prefix.layout.per_layer_chunk_bytes}
                tasks.append(fetch_task({"aggregation_bytes": nbytes, **shape}, client, prefix, buffer))
        cells = run_rounds(tasks, settings.runs, "figure A8")
    notes = [
        f"one descriptor GET of {token_count} tokens and {layers} layers, layer-major, over {settings.transport}; "
        "warm: stored moments ago and fetched once before",
        "a slice larger than the payload is sent in pieces",
    ]
    return figure({**sizes, "transport": settings.transport}, notes, cells)
