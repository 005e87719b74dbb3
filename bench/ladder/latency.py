"""Figure 10: one request at a time, its latency split into client, gateway, storage and transfer, for each path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.ladder.bed import Session
from bench.ladder.path_tasks import PathBed, path_bed
from bench.ladder.paths import Operation, Request, Requests, S3Path
from bench.ladder.results import Cell, Figure, FigureName, State
from bench.ladder.timing import HEADER, Part, Tap, split
from bench.ladder.transfers import Work, clear, place, verify
from bench.progress import progress_bar
from descriptors.layout import ChunkLayout
from descriptors.units import KIB, MIB

TITLE = "latency of one request, by its parts"
NUM_LAYERS = 4
REQUESTS_PER_RUN = 20
WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One bar."""

    path: S3Path
    operation: Operation
    object_bytes: int


class NoTimingError(Exception):
    """The server says nothing of where time went."""


def latency(session: Session) -> Figure:
    """Every path and both operations, over object sizes."""
    settings = session.settings
    sizes = (64 * KIB,) if settings.is_smoke else (64 * KIB, 512 * KIB, 4 * MIB)
    count = 2 if settings.is_smoke else settings.runs * REQUESTS_PER_RUN
    cells: list[Cell] = []
    cases = [Case(path, operation, size) for size in sizes for operation in Operation for path in S3Path]
    with path_bed(session, max(sizes)) as bed, progress_bar(len(cases), "figure 10") as advance:
        works = {size: bed.work(ChunkLayout(NUM_LAYERS, 1, size // NUM_LAYERS), 1) for size in sizes}
        for case in cases:
            try:
                cells += _measure(bed, works[case.object_bytes], case, count)
            except NoTimingError as error:
                return Figure(FigureName.LATENCY, TITLE, State.NOT_RUN, reason=str(error))
            advance(1)
    return Figure(
        FigureName.LATENCY,
        TITLE,
        State.DONE,
        settings={"object_bytes": sizes, "num_layers": NUM_LAYERS, "requests": count},
        notes=[
            f"one request in flight; gateway, storage and transfer as the answer's {HEADER} says, client the rest of "
            "the client's own time",
            "S3TCP GET: its body comes after that header, so the time between head and end of body is transfer",
            f"an object is one chunk of {NUM_LAYERS} slices; Batch and Agg name it in a descriptor",
            "every object is compared byte by byte after its request, outside the clock",
        ],
        cells=cells,
    )


def _measure(bed: PathBed, work: Work, case: Case, count: int) -> list[Cell]:
    """The parts of `count` requests, as a cell for each part."""
    samples: dict[Part, list[float]] = {part: [] for part in Part}
    requests = Requests(bed.client, work, 1)
    with Tap(bed.client) as tap:
        for number in range(WARM_UP + count):
            keys = work.keys if case.operation is Operation.GET else bed.new_keys(1)
            (request,) = requests.of(case.path, case.operation, keys)
            for part, seconds in _one(bed, tap, work, case, request, keys).items():
                if number >= WARM_UP:
                    samples[part].append(seconds)
    labels = {"path": case.path.value, "operation": case.operation.value, "block_bytes": case.object_bytes}
    return [Cell({**labels, "part": part.value}, 0, tuple(found)) for part, found in samples.items()]


def _one(bed: PathBed, tap: Tap, work: Work, case: Case, request: Request, keys: Sequence[str]) -> dict[Part, float]:
    """One request, checked; the seconds of its parts."""
    is_get = case.operation is Operation.GET
    if is_get:
        clear(work)
    else:
        place(work, 1, case.path.delivery)
    seen = tap.observe(request)
    if seen is None:
        raise NoTimingError(f"{case.path.value} {case.operation.value}: the answer carries no {HEADER}")
    if not is_get:
        clear(work)
        Requests(bed.client, work, 1).of(S3Path.TCP, Operation.GET, keys)[0]()
        bed.delete(keys)
    verify(work, 1, case.path.delivery if is_get else S3Path.TCP.delivery)
    return split(seen, is_body_the_payload=is_get and case.path is S3Path.TCP)
