"""Samples: where chunks were, how far samples lie apart, and the interleaved rounds in which they are taken.

Each round measures everything once, so that slow minutes of the machine hit all alike. Pure but for the rounds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, TypeVar


class State(Enum):
    """Where the chunks are: in the page cache, in the server's DRAM tier, there too with UCX over TCP, on disk only."""

    PAGE_CACHE = "page_cache"
    DRAM = "dram"
    TCP = "tcp"
    COLD = "cold"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes of the same samples."""

    median: float
    min: float
    max: float


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest. Raises ValueError without a value."""
    if not values:
        raise ValueError("no samples")
    return Spread(statistics.median(values), min(values), max(values))


Label = str | int
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cell:
    """Counted runs of one thing, in seconds; `labels` say which thing. `nbytes` were moved by each, 0 where the time
    itself is the figure.
    """

    labels: Mapping[str, Label]
    nbytes: int
    samples_s: tuple[float, ...]

    def median_s(self) -> float:
        """The median run."""
        return statistics.median(self.samples_s)


def cell_json(cell: Cell) -> dict[str, Any]:
    """The cell as plain values, raw samples included."""
    rates = {"throughput_bytes_per_s": asdict(spread([cell.nbytes / s for s in cell.samples_s]))} if cell.nbytes else {}
    return {
        **cell.labels,
        "nbytes": cell.nbytes,
        "sample_count": len(cell.samples_s),
        "duration_s": asdict(spread(cell.samples_s)),
        **rates,
        "samples_s": list(cell.samples_s),
    }


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to measure. `run` prepares, measures and checks one sample and returns the seconds measured; it raises
    calibration.content.VerificationError at wrong bytes.
    """

    labels: Mapping[str, Label]
    nbytes: int
    run: Callable[[], float]


class RoundTurns(Enum):
    """In which sequence a round measures everything. ALTERNATING: forwards, then backwards, so that none always finds
    what another left behind. ROTATING: each round begins with the next one.
    """

    SAME = "same"
    ALTERNATING = "alternating"
    ROTATING = "rotating"

    def ordered(self, tasks: Sequence[T], round_index: int) -> Sequence[T]:
        """The tasks as that round has them."""
        if self is RoundTurns.ALTERNATING and round_index % 2 == 0:
            return tasks[::-1]
        first = round_index % max(1, len(tasks)) if self is RoundTurns.ROTATING else 0
        return [*tasks[first:], *tasks[:first]]


def interleaved(
    tasks: Sequence[T], runs: int, title: str, *, uncounted: int = 1, turns: RoundTurns = RoundTurns.SAME
) -> Iterator[tuple[int, T]]:
    """Every task once in each round, with the number of the round; rounds before number 1 are not to be counted."""
    with progress_bar((runs + uncounted) * len(tasks), title) as advance:
        for round_index in range(1 - uncounted, runs + 1):
            for task in turns.ordered(tasks, round_index):
                yield round_index, task
                advance(1)


def run_rounds(tasks: Sequence[Task], runs: int, title: str) -> list[Cell]:
    """The tasks' cells after `runs` rounds, and one before them that is not counted."""
    samples: dict[int, list[float]] = {index: [] for index in range(len(tasks))}
    for round_index, (index, task) in interleaved(list(enumerate(tasks)), runs, title):
        seconds = task.run()
        if round_index > 0:
            samples[index].append(seconds)
    return [Cell(task.labels, task.nbytes, tuple(samples[index])) for index, task in enumerate(tasks)]


@contextmanager
def progress_bar(total: int | None, title: str) -> Iterator[Callable[[int], None]]:
    """A bar of `total` steps, or a count where it is None. Call what it gives with the number of steps done since the
    last call.
    """
    from tqdm import tqdm

    with tqdm(total=total, desc=title, file=sys.stderr, disable=None, leave=False) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        yield advance
