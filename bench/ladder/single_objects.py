"""Figure 9: one object in each request, over TCP, through a staging buffer, and directly."""

from __future__ import annotations

from bench.ladder.bed import Session
from bench.ladder.blocks import ladder
from bench.ladder.path_tasks import NOTES, client_threads, path_bed, path_task
from bench.ladder.paths import ONE_OBJECT, Operation
from bench.ladder.results import Cell, Figure, FigureName, State
from bench.ladder.rounds import run_rounds
from descriptors.layout import ChunkLayout
from descriptors.units import KIB, MIB

TITLE = "one object a request: S3TCP, S3RDMA Buffer, S3RDMA Direct"
SAMPLE_BYTES, SAMPLE_BYTES_SMOKE = 32 * MIB, 512 * KIB
"""Moved in a sample, or more where the largest concurrency needs more objects."""
OBJECTS_SMOKE_MIN = 2


def single_objects(session: Session) -> Figure:
    """GET and PUT over object sizes."""
    settings = session.settings
    steps = ladder(settings)
    sample_bytes = SAMPLE_BYTES_SMOKE if settings.is_smoke else SAMPLE_BYTES
    least = OBJECTS_SMOKE_MIN if settings.is_smoke else steps.in_flight_max
    counts = {size: max(least, sample_bytes // size) for size in steps.block_bytes}
    cells: list[Cell] = []
    with (
        path_bed(session, max(size * count for size, count in counts.items())) as bed,
        client_threads(steps.concurrency) as pools,
    ):
        for size, count in counts.items():
            work = bed.work(ChunkLayout(1, 1, size), count)
            tasks = [
                path_task(bed, work, path, operation, concurrency, pools[concurrency], size)
                for operation in Operation
                for concurrency in steps.concurrency
                for path in ONE_OBJECT
            ]
            cells += run_rounds(tasks, settings.runs, f"figure 9: {size >> 10} KiB")
    objects = {str(size): count for size, count in counts.items()}
    return Figure(
        FigureName.SINGLE_OBJECTS,
        TITLE,
        State.DONE,
        settings={"block_bytes": steps.block_bytes, "objects_in_a_sample": objects},
        notes=NOTES,
        cells=cells,
    )
