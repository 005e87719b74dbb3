"""The processes of the S3 load, seen from the benchmark."""

from __future__ import annotations

from bench.child import Child
from bench.jobs import Job, Kind, Outcome

JOB_TIMEOUT_S = 3600.0
ENVIRONMENT = {
    "NO_PROXY": "127.0.0.1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
"""No proxy may falsify loopback figures; and glibc keeps freed memory, so that bodies land on pages that are there."""


class LoadProcesses:
    """Processes that do a job together. Every method raises BaselineError when one of them is gone."""

    def __init__(self, process_count: int, seed: int, nbytes_max: int) -> None:
        self._children: list[Child] = []
        try:
            for _ in range(process_count):
                self._children.append(Child("bench.load", seed, nbytes_max, environment=ENVIRONMENT))
        except BaseException:
            self.close()
            raise

    def run(self, job: Job) -> list[tuple[Job, Outcome]]:
        """Do all of a job; what each process had to do, and what came of it. `joined` makes one outcome of these."""
        parts = [job] if job.kind in (Kind.LIST, Kind.DELETE) else job.divided(len(self._children))
        busy = self._children[: len(parts)]
        for child, part in zip(busy, parts, strict=True):
            child.tell(part.to_line())
        outcomes = [Outcome.from_line(child.answer(timeout_s=JOB_TIMEOUT_S)) for child in busy]
        return list(zip(parts, outcomes, strict=True))

    def close(self) -> None:
        """End them."""
        for child in self._children:
            child.close()
