"""Interleaved rounds: each measures everything once, so that slow minutes of the machine hit all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.ladder.results import Cell, Label
from bench.progress import progress_bar


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to measure. `run` prepares, measures and checks one sample and returns the seconds measured; it raises
    bench.content.VerificationError at wrong bytes.
    """

    labels: Mapping[str, Label]
    nbytes: int
    run: Callable[[], float]


def run_rounds(tasks: Sequence[Task], runs: int, title: str) -> list[Cell]:
    """The tasks' cells after `runs` rounds, and one before them that is not counted."""
    samples: list[list[float]] = [[] for _ in tasks]
    with progress_bar((runs + 1) * len(tasks), title) as advance:
        for round_index in range(runs + 1):
            for task, found in zip(tasks, samples, strict=True):
                seconds = task.run()
                if round_index > 0:
                    found.append(seconds)
                advance(1)
    return [Cell(task.labels, task.nbytes, tuple(found)) for task, found in zip(tasks, samples, strict=True)]
