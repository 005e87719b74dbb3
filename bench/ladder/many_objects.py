"""Figure 11: what naming many objects in one request gains, and what laying them out by layers does.

The same chunks of four layers, by all five paths; a slice, one layer of one chunk, is the block of the axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.ladder.bed import Session
from bench.ladder.blocks import C1, ladder
from bench.ladder.path_tasks import DIRECT_RANGES, NOTES, client_threads, path_bed, path_task, slices_task
from bench.ladder.paths import Operation, S3Path
from bench.ladder.results import Cell, Figure, FigureName, Label, State
from bench.ladder.rounds import run_rounds
from descriptors.layout import ChunkLayout
from descriptors.units import MIB

TITLE = "many objects: five paths over slice sizes"
NUM_LAYERS = 4
SAMPLE_BYTES, SAMPLE_BYTES_SMOKE = 128 * MIB, MIB
MANY_IN_ONE = (S3Path.BATCH, S3Path.AGG)
COMPARED = {
    "batch_over_direct": S3Path.BATCH.value,
    "agg_over_direct": S3Path.AGG.value,
    "ranges_over_direct": DIRECT_RANGES,
}
CHUNKS_MIN, CHUNKS_MAX = 2, 128
"""Bounds what small slices cost: 32 MiB of 64 KiB slices are 512 requests for one range each."""


def many_objects(session: Session) -> Figure:
    """GET and PUT of the same chunks by every path."""
    settings = session.settings
    steps = ladder(settings)
    sample_bytes = SAMPLE_BYTES_SMOKE if settings.is_smoke else SAMPLE_BYTES
    layouts = [ChunkLayout(NUM_LAYERS, 1, size) for size in steps.block_bytes]
    counts = [min(CHUNKS_MAX, max(CHUNKS_MIN, sample_bytes // layout.chunk_bytes)) for layout in layouts]
    buffer_bytes = max(layout.payload_bytes(count) for layout, count in zip(layouts, counts, strict=True))
    cells: list[Cell] = []
    with path_bed(session, buffer_bytes) as bed, client_threads([C1, *steps.concurrency]) as pools:
        for layout, count in zip(layouts, counts, strict=True):
            size = layout.per_layer_chunk_bytes
            work = bed.work(layout, count)
            tasks = [
                path_task(bed, work, path, operation, concurrency, pools[concurrency], size)
                for operation in Operation
                for concurrency in (C1, *steps.concurrency)
                for path in (MANY_IN_ONE if concurrency == C1 else S3Path)
            ]
            tasks += [slices_task(bed, work, each, pools[each], size) for each in steps.concurrency]
            cells += run_rounds(tasks, settings.runs, f"figure 11: {size >> 10} KiB")
    return Figure(
        FigureName.MANY_OBJECTS,
        TITLE,
        State.DONE,
        settings={
            "slice_bytes": steps.block_bytes,
            "num_layers": NUM_LAYERS,
            "chunks_in_a_sample": dict(zip(map(str, steps.block_bytes), counts, strict=True)),
        },
        notes=[
            *NOTES,
            "C=1: one request for everything, which is what a prefix hit asks for",
            f"chunks of {NUM_LAYERS} slices; S3TCP, Buffer and Direct: a request for each chunk",
            "Batch (chunk-major) and Agg (layer-major): as many requests as may be in flight, each naming its share of "
            "the chunks, never more requests than chunks",
            "Direct, a range each: a request for each slice, which is how standard S3 gets layers in order",
        ],
        cells=cells,
        rows=speedups(cells),
    )


def speedups(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Throughput of each path over S3RDMA Direct's, the best concurrency of either (medians); None where there is no
    such request.
    """
    best: dict[tuple[Label, Label], dict[Label, float]] = {}
    for cell in cells:
        rates = best.setdefault((cell.labels["operation"], cell.labels["block_bytes"]), {})
        rates[cell.labels["path"]] = max(rates.get(cell.labels["path"], 0.0), cell.nbytes / cell.median_s())
    return [
        {"operation": operation, "block_bytes": size}
        | {
            name: round(rates[path] / rates[S3Path.DIRECT.value], 2) if path in rates else None
            for name, path in COMPARED.items()
        }
        for (operation, size), rates in best.items()
    ]
